"""The table of the routes of models that pool."""

from __future__ import annotations

from tokserve.features.pooling.routes import classify, cohere, embeddings, rerank, score
from tokserve.server.endpoint import OCTETS, POOLING, Endpoint

POST = ("POST",)
EMBEDDINGS = (embeddings.EmbeddingReply, OCTETS)
ENDPOINTS = (
    Endpoint(
        POST,
        "/v1/embeddings",
        embeddings.embeddings,
        embeddings.EmbeddingBody,
        reply=EMBEDDINGS,
        runner="pooling",
        raises=POOLING,
    ),
    Endpoint(
        POST,
        "/pooling",
        embeddings.vectors,
        embeddings.VectorsBody,
        reply=(embeddings.VectorsReply, OCTETS),
        runner="pooling",
        raises=POOLING,
    ),
    Endpoint(
        POST, "/v2/embed", cohere.embed, cohere.CohereBody, reply=cohere.CohereReply, runner="pooling", raises=POOLING
    ),
    Endpoint(
        POST,
        "/classify",
        classify.classify,
        classify.ClassifyBody,
        reply=classify.ClassifyReply,
        runner="pooling",
        raises=POOLING,
    ),
    *(
        Endpoint(POST, path, score.score, score.ScoreBody, reply=score.ScoreReply, runner="pooling", raises=POOLING)
        for path in score.PATHS
    ),
    *(
        Endpoint(
            POST, path, rerank.rerank, rerank.RerankBody, reply=rerank.RerankReply, runner="pooling", raises=POOLING
        )
        for path in rerank.PATHS
    ),
)
