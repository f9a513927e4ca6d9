"""Vectors by the SDKs of OpenAI and Cohere, litellm and LangChain, against a demo server that makes embeddings."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

os.environ["OPENAI_API_KEY"] = "none"
import cohere
import litellm
import openai
from langchain_openai import OpenAIEmbeddings
from report import Report

TEXTS = ["What is 47 + 38?", "Reverse the word apple.", "naïve 漢字", "a"]


def openai_sdk(report: Report) -> list[list[float]]:
    """The vectors of TEXTS, as floats."""
    client = openai.OpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0)
    create = client.embeddings.create
    floats = create(model="demo", input=TEXTS, encoding_format="float")
    vectors = [item.embedding for item in floats.data]
    report.check("vectors", len(vectors) == len(TEXTS) and [item.index for item in floats.data] == [0, 1, 2, 3])
    report.check("of length one", all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in vectors))
    default = create(model="demo", input=TEXTS)
    report.check("base64, the SDK's default, is the same bits", [item.embedding for item in default.data] == vectors)
    report.check("usage", default.usage.prompt_tokens == default.usage.total_tokens > len(TEXTS))
    alone = [create(model="demo", input=text).data[0].embedding for text in TEXTS]
    report.check("alone as together", alone == vectors)
    raw = client.embeddings.with_raw_response.create(model="demo", input=TEXTS[0], user="u")
    report.check("raw responses", raw.parse().data[0].embedding == vectors[0] and raw.headers["x-request-id"])
    for options, kind in (
        ({"dimensions": 8}, openai.BadRequestError),
        ({"input": []}, openai.BadRequestError),
        ({"model": "gpt-9"}, openai.NotFoundError),
        ({"encoding_format": "hex"}, openai.BadRequestError),
    ):
        try:
            create(**{"model": "demo", "input": TEXTS} | options)
        except kind as error:
            report.check(f"{kind.__name__} names {error.param}", error.param in options)
        else:
            report.check(f"{options} must be refused", False)
    try:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}])
    except openai.BadRequestError as error:
        report.check("it does not chat", error.code == "unsupported")
    else:
        report.check("chat must be refused", False)
    return vectors


async def many(report: Report, vectors: list[list[float]]) -> None:
    async with openai.AsyncOpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0) as client:
        replies = await asyncio.gather(
            *(client.embeddings.create(model="demo", input=TEXTS[i % 4 :] + TEXTS[: i % 4]) for i in range(32))
        )
    right = [[vectors[(i + j) % 4] for j in range(4)] for i in range(32)]
    actual = [[item.embedding for item in reply.data] for reply in replies]
    report.check("32 requests at once are what they are alone", actual == right)


def bits(values: list[float]) -> int:
    """The signs of eight values as a byte, the first one highest."""
    return int("".join("1" if value > 0 else "0" for value in values), 2)


def cohere_sdk(report: Report, vectors: list[list[float]]) -> None:
    client = cohere.ClientV2(api_key="none", base_url=report.url)
    options: dict[str, Any] = {"model": "demo", "input_type": "search_document"}
    reply = client.embed(texts=TEXTS, embedding_types=["float", "binary", "ubinary"], **options)
    report.check("Cohere's floats", reply.embeddings.float_ == vectors)
    signs = [[bits(vector[start : start + 8]) for start in range(0, len(vector), 8)] for vector in vectors]
    report.check("Cohere's ubinary", reply.embeddings.ubinary == signs)
    report.check("Cohere's binary", reply.embeddings.binary == [[byte - 128 for byte in row] for row in signs])
    report.check("Cohere's meta", reply.meta.billed_units.input_tokens > len(TEXTS) and reply.texts == TEXTS)
    try:
        client.embed(texts=TEXTS, embedding_types=["int8"], **options)
    except cohere.BadRequestError as error:
        report.check("Cohere's BadRequestError", "embedding_types" in str(error.body))
    else:
        report.check("int8 must be refused", False)
    ranks = client.rerank(model="demo", query=TEXTS[3], documents=TEXTS, top_n=2).results
    report.check("Cohere's rerank by cosines", ranks[0].index == 3 and abs(ranks[0].relevance_score - 1) < 1e-5)


def others(report: Report, vectors: list[list[float]]) -> None:
    embeddings = OpenAIEmbeddings(model="demo", base_url=report.url + "/v1", check_embedding_ctx_length=False)
    report.check("LangChain's documents", embeddings.embed_documents(TEXTS) == vectors)
    report.check("LangChain's query", embeddings.embed_query(TEXTS[0]) == vectors[0])
    for provider in ("openai", "hosted_vllm"):
        reply = litellm.embedding(model=f"{provider}/demo", input=TEXTS, api_base=report.url + "/v1", api_key="none")
        report.check(f"litellm's {provider}", [item["embedding"] for item in reply.data] == vectors)


def main() -> None:
    report = Report()
    vectors = openai_sdk(report)
    asyncio.run(many(report, vectors))
    cohere_sdk(report, vectors)
    others(report, vectors)
    report.done("openai", "cohere", "litellm", "langchain-openai")


if __name__ == "__main__":
    main()
