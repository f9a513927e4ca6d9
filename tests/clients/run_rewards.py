"""Scores of a reward model: verl's body, and reranking by Cohere's SDK and by litellm with the bodies of Jina's and
vLLM's."""

from __future__ import annotations

import math

import cohere
import httpx
import litellm
from report import Report

QUERY = "Which words are short?"
DOCUMENTS = ["a long sentence about something else", "a", "ab cd", "the word apple, reversed"]


def verl(report: Report) -> None:
    """The request of verl 0.9.1 (experimental/reward_loop), and what it reads of the reply."""
    answer = httpx.get(f"{report.url}/health")
    report.check("health", answer.status_code == 200)
    body = {"model": "demo", "input": "<|im_start|>user\nWhat is 47 + 38?<|im_end|>\n", "use_activation": False}
    logits = []
    for use in (False, True):
        answer = httpx.post(f"{report.url}/classify", json=body | {"use_activation": use}, timeout=60)
        report.check(f"verl's body, use_activation {use}", answer.status_code == 200)
        logits.append(answer.json()["data"][-1]["probs"][-1])
    report.check("a logit, and its sigmoid", math.isclose(1 / (1 + math.exp(-logits[0])), logits[1], rel_tol=1e-5))


def scores(report: Report) -> list[float]:
    """The server's own scores of all documents, alone and together."""
    body = {"model": "demo", "queries": QUERY, "documents": DOCUMENTS}
    together = [item["score"] for item in httpx.post(f"{report.url}/score", json=body, timeout=60).json()["data"]]
    alone = [
        httpx.post(f"{report.url}/score", json=body | {"documents": text}, timeout=60).json()["data"][0]["score"]
        for text in DOCUMENTS
    ]
    report.check("a score alone is the one together", alone == together and len(set(alone)) == len(DOCUMENTS))
    return together


def rerank(report: Report, expected: list[float]) -> None:
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    ranking = [(index, expected[index]) for index in order]
    client = cohere.ClientV2(api_key="none", base_url=report.url)
    results = client.rerank(model="demo", query=QUERY, documents=DOCUMENTS).results
    report.check("Cohere's SDK", [(one.index, one.relevance_score) for one in results] == ranking)
    results = client.rerank(model="demo", query=QUERY, documents=DOCUMENTS, top_n=2, max_tokens_per_doc=4096).results
    report.check("Cohere's top_n", [one.index for one in results] == order[:2])
    try:
        client.rerank(model="demo", query=QUERY, documents=[])
    except cohere.BadRequestError as error:
        report.check("Cohere's BadRequestError", "documents" in str(error.body))
    else:
        report.check("no documents must be refused", False)
    for provider, base in (("jina_ai", "/v1/rerank"), ("cohere", "/v2/rerank"), ("hosted_vllm", "")):
        for top in (None, 2):
            reply = litellm.rerank(
                model=f"{provider}/demo",
                query=QUERY,
                documents=DOCUMENTS,
                top_n=top,
                api_base=report.url + base,
                api_key="none",
                return_documents=True,
            )
            actual = [(one["index"], one["relevance_score"]) for one in reply.results]
            report.check(f"litellm as {provider}, top_n {top}", actual == ranking[:top])


def main() -> None:
    report = Report()
    verl(report)
    rerank(report, scores(report))
    report.done("cohere", "litellm")


if __name__ == "__main__":
    main()
