"""What is done for each prompt and each choice of a large request is done in threads, however short they are."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from tests.server.byte_tokenizer import TOKENIZER
from tests.server.scripted_llm import endless
from tests.server.site import Site, site
from tokserve.checkpoint import DEMO_DIR
from tokserve.dialects.openai.completions import CompletionRenderer
from tokserve.dialects.sglang.reply import ChoiceDetails, GenerateRenderer
from tokserve.features.pooling.pooled_outputs import LabelRules, VectorRules
from tokserve.features.pooling.routes import inputs
from tokserve.features.pooling.routes.inputs import PooledPrompts, PoolingUsage
from tokserve.text.tokenizer import Tokenizer

COMPLETIONS = ("/v1/completions", "prompt", {"max_tokens": 2})
SGLANG = ("/generate", "text", {"sampling_params": {"max_new_tokens": 2}})


@pytest.mark.parametrize(("path", "field", "others"), [COMPLETIONS, SGLANG])
@pytest.mark.parametrize(("count", "in_threads"), [(2, False), (200, True)])
def test_where_prompts_are_tokenized_and_choices_written(
    monkeypatch: pytest.MonkeyPatch, path: str, field: str, others: dict[str, Any], count: int, in_threads: bool
) -> None:
    names: dict[str, set[str]] = {}

    def noted(kind: type, method: str) -> None:
        original = getattr(kind, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            names.setdefault(method, set()).add(threading.current_thread().name)
            return original(*args, **kwargs)

        monkeypatch.setattr(kind, method, call)

    renderer = CompletionRenderer if path == COMPLETIONS[0] else GenerateRenderer
    for kind, method in ((Tokenizer, "encode_each"), (renderer, "reply"), (ChoiceDetails, "begin")):
        noted(kind, method)
    answer = site(endless, sglang_api=True).post(path, {field: ["ab"] * count, **others})
    assert answer.status_code == 200, answer.text
    assert {"encode_each", "reply"} <= names.keys()
    assert {name.startswith("tokserve-") for actual in names.values() for name in actual} == {in_threads}


VECTORS = [("/encode", {"input_ids": [[5]] * 50}), ("/score", {"queries": "ab", "documents": ["ab"] * 50})]


def embedder(**options: Any) -> Site:
    running = site(runner="pooling", model=str(DEMO_DIR), sglang_api=True, **options)
    running.llm.ready.facts["hidden_size"] = 64
    return running


@pytest.mark.parametrize(("path", "payload"), VECTORS)
def test_where_vectors_are_worked_on(monkeypatch: pytest.MonkeyPatch, path: str, payload: dict[str, Any]) -> None:
    names: set[str] = set()
    finish = VectorRules.finish

    def noted(*args: Any, **kwargs: Any) -> Any:
        names.add(threading.current_thread().name)
        return finish(*args, **kwargs)

    async def pool(call: Any, params: Any, prompts: Any, *_: Any) -> PooledPrompts:
        vectors = [np.ones(64, "<f4").tobytes() for _ in prompts]
        return PooledPrompts("key", vectors, PoolingUsage(1, 1), {"X-Request-Id": "id"}, "0")

    monkeypatch.setattr(VectorRules, "finish", noted)
    monkeypatch.setattr(inputs, "pool", pool)
    answer = embedder().post(path, payload)
    assert answer.status_code == 200, answer.text
    assert names and all(name.startswith("tokserve-") for name in names)


DIMENSIONS = {"/v1/embeddings": {"input": "ab"}, "/pooling": {"input": "ab"}, "/encode": {"text": "ab"}}


@pytest.mark.parametrize("path", DIMENSIONS)
def test_the_models_own_number_of_dimensions_has_no_effect(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """serving-faults F16."""

    async def pool(*_: Any) -> PooledPrompts:
        return PooledPrompts("key", [np.ones(64, "<f4").tobytes()], PoolingUsage(1, 1), {"X-Request-Id": "id"}, "0")

    monkeypatch.setattr(inputs, "pool", pool)
    s = embedder()
    replies = [s.post(path, DIMENSIONS[path] | fields) for fields in ({}, {"dimensions": 64})]
    assert [reply.status_code for reply in replies] == [200, 200]
    vectors = [json.dumps(reply.json()).partition("embedding")[2] for reply in replies]
    assert vectors[0][:200] == vectors[1][:200]
    refused = s.post(path, DIMENSIONS[path] | {"dimensions": 32})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "dimensions"


CUT = {
    "/v1/embeddings": {"input": "ab"},
    "/pooling": {"input": "ab"},
    "/score": {"queries": "a", "documents": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize("path", CUT)
def test_a_prompt_cannot_be_cut_to_more_than_the_context(path: str) -> None:
    """peer-suites-3 A25: vLLM refuses it too."""
    refused = embedder().post(path, CUT[path] | {"truncate_prompt_tokens": 513})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert "512" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("path", "field"), [("/encode", "input_ids"), ("/classify", "text"), ("/classify", "input")])
def test_vectors_that_would_make_too_large_a_reply_are_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    async def pool(*_: Any) -> PooledPrompts:
        raise AssertionError("the engine was asked")

    monkeypatch.setattr(inputs, "pool", pool)
    monkeypatch.setattr(inputs, "label_rules", lambda serving: LabelRules(tuple(map(str, range(64))), "softmax"))
    prompts = [[5] if field == "input_ids" else "a"] * 2000
    answer = embedder(max_reply_bytes=1 << 20).post(path, {field: prompts})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "reply_too_large" and answer.json()["error"]["param"] == field


def test_texts_are_encoded_together_as_each_alone() -> None:
    tokenizer = TOKENIZER
    texts = ["ab", "", "ü", "a" * 1000]
    assert tokenizer.encode_each(texts) == [tokenizer.encode(text) for text in texts]
