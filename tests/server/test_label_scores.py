"""/generative_scoring and SGLang's /v1/score: the probabilities of labels after a query and each item."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.replies import good
from tests.server.byte_tokenizer import ids
from tests.server.scripted_llm import VOCAB
from tests.server.site import Site, site

VLLM, SGLANG = "/generative_scoring", "/v1/score"
LABELS = [5, 9, 7]


@pytest.fixture(scope="module")
def server() -> Site:
    return site(sglang_api=True)


def scored(s: Site, path: str = SGLANG, **fields: Any) -> Any:
    return good(s.post(path, {"query": "ab", "items": ["c", "d"], "label_token_ids": LABELS} | fields))


def logprobs_of(s: Site, prompt: list[int]) -> list[float]:
    """The labels' logprobs at the next token, as the token route says them."""
    params = {"max_tokens": 1, "logprob_token_ids": LABELS, "logprobs_mode": "raw", "temperature": 0}
    body = {"token_ids": prompt, "sampling_params": params, "logprobs_format": "arrays"}
    rows = good(s.post("/inference/v1/generate", body))["choices"][0]["logprobs"]
    assert rows["top_token_ids"][0] == LABELS
    values: list[float] = rows["top_logprobs"][0]
    return values


def test_scores_are_the_probabilities_that_the_token_route_has(server: Site) -> None:
    expected = [[math.exp(value) for value in logprobs_of(server, ids(text))] for text in ("abc", "abd")]
    reply = scored(server)
    assert reply["scores"] == [pytest.approx(row) for row in expected]
    assert reply["object"] == "scoring" and reply["model"] == "tiny" and reply["usage"]["prompt_tokens"] == 6
    first = scored(server, VLLM, apply_softmax=False)
    assert [one["score"] for one in first["data"]] == [row[0] for row in reply["scores"]]


def test_with_softmax_they_are_those_among_the_labels(server: Site) -> None:
    """It is vLLM's default, and not SGLang's: https://github.com/vllm-project/vllm,
    vllm/entrypoints/generate/generative_scoring/serving.py."""
    plain, normal = scored(server)["scores"], scored(server, apply_softmax=True)["scores"]
    for row, normal_row in zip(plain, normal, strict=True):
        assert normal_row == pytest.approx([value / sum(row) for value in row])
    reply = scored(server, VLLM)
    assert [(one["index"], one["object"], one["score"]) for one in reply["data"]] == [
        (index, "score", row[0]) for index, row in enumerate(normal)
    ]
    assert reply["object"] == "list" and reply["id"].startswith("generative-scoring-")
    assert reply["usage"]["total_tokens"] == 8 and reply["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", [VLLM, SGLANG])
def test_queries_and_items_are_texts_or_ids_in_either_order(path: str) -> None:
    s = site(sglang_api=True)
    for fields, prompts in (
        ({}, [ids("abc"), ids("abd")]),
        ({"item_first": True}, [ids("cab"), ids("dab")]),
        ({"query": [5, 6], "items": [[7], []]}, [[5, 6, 7], [5, 6]]),
        ({"query": [5, 6], "items": ["c"]}, [[5, 6, *ids("c")]]),
        ({"items": [""]}, [ids("ab")]),
        ({"items": "c"}, [ids("abc")]),
    ):
        s.llm.calls.clear()
        scored(s, path, **fields)
        assert [call.prompt for call in s.llm.calls] == prompts, fields


@pytest.mark.parametrize("path", [VLLM, SGLANG])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": [], "items": [[5], []]}, "items[1]"),
        ({"items": None}, "items"),
        ({"items": []}, "items"),
        ({"items": ["a", [5]]}, "items[1]"),
        ({"items": [[7], [5, VOCAB]]}, "items[1][1]"),
        ({"query": [-1]}, "query[0]"),
        ({"items": ["x" * 10_000]}, "items[0]"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [5, VOCAB]}, "label_token_ids[1]"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"apply_softmax": "yes"}, "apply_softmax"),
        ({"model": "other"}, "model"),
    ],
)
def test_bodies_are_refused_by_field(server: Site, path: str, fields: dict[str, Any], param: str) -> None:
    body = {"query": "ab", "items": ["c", "d"], "label_token_ids": LABELS} | fields
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param, answer.text


def test_texts_need_a_tokenizer() -> None:
    s = site(tokens_only=True)
    answer = s.post(VLLM, {"query": "ab", "items": ["c"], "label_token_ids": LABELS})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "tokens_only"
    good(s.post(VLLM, {"query": [5], "items": [[6]], "label_token_ids": LABELS}))
