"""`return_entropy` through real engines: on every route, and the same however a token is computed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import Served
from tests.replies import good
from tests.server.site import parse_events
from tests.threads import ServerThread
from tokserve import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("engine_threads")

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
PROMPTS = [[5 + seed, 6, 7, 8] * (1 + 5 * seed) for seed in range(4)]
OUTPUT: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "return_entropy": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with ServerThread("demo", "--sglang-api", "--dtype", "float32", "--spec-method", "ngram") as one:
        yield one


def params(seed: int) -> SamplingParams:
    temperature = 0.0 if seed == 0 else 0.8
    return SamplingParams(temperature=temperature, seed=seed, logprobs=-1, logprobs_mode="temperature", **OUTPUT)


def outcome(llm: LLM, numbers: range) -> list[tuple[list[int], list[float]]]:
    """The tokens and the entropies of prompts that are computed together."""
    outputs = llm.generate([PROMPTS[i] for i in numbers], [params(i) for i in numbers], use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].others["entropies"].tolist()) for one in outputs]


def test_entropies_are_the_same_in_a_batch_alone_in_chunks_and_with_drafts() -> None:
    options: dict[str, Any] = {"max_logprobs": -1, "dtype": "bfloat16"}
    with LLM("demo", **options) as llm:
        alone = [outcome(llm, range(i, i + 1))[0] for i in range(4)]
        assert outcome(llm, range(4)) == alone
        choice = llm.generate([PROMPTS[1]], [params(1)], use_tqdm=False)[0].outputs[0]
        assert choice.logprobs is not None
        top = choice.logprobs.top_logprobs.astype(np.float64)
        assert alone[1][1] == pytest.approx((-np.exp(top) * top).sum(1).tolist(), rel=1e-4)
    options |= {"max_num_batched_tokens": 16, "max_num_seqs": 2, "spec_method": "ngram", "spec_tokens": 4}
    with LLM("demo", **options) as llm:
        assert outcome(llm, range(4)) == alone


def test_routes_return_the_same_entropies(server: Served) -> None:
    sampling = OUTPUT | {"temperature": 0.8, "seed": 3}
    body = {"token_ids": PROMPTS[1], "sampling_params": sampling}
    choice = good(server.post(GENERATE, body))["choices"][0]
    expected = choice["entropies"]
    assert len(expected) == len(choice["token_ids"]) == 24 and min(expected) >= 0
    packed = good(server.post(GENERATE, body | {"logprobs_format": "base64"}))["choices"][0]["entropies"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == np.array(expected, np.float32).tolist()
    drafts = {"draft_token_ids": choice["token_ids"], "spec_decode_metrics": "summary"}
    drafted = good(server.post(GENERATE, body | drafts))
    assert drafted["choices"][0]["entropies"] == expected
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 8
    text = {"prompt": PROMPTS[1], "return_token_ids": True} | sampling
    assert good(server.post(COMPLETIONS, text))["choices"][0]["entropies"] == expected
    for path, streamed in ((GENERATE, body), (COMPLETIONS, text)):
        events = parse_events(server.post(path, streamed | {"stream": True}).text)
        values = [value for event in events for one in event["choices"] for value in one.get("entropies", [])]
        assert values == expected
    messages = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True} | sampling
    [chat] = good(server.post(CHAT, messages | {"return_meta_info": True}))["choices"]
    assert len(chat["entropies"]) == 24
    sglang = {"max_new_tokens": 24, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True}
    details = good(
        server.post("/generate", {"input_ids": PROMPTS[1], "sampling_params": sglang, "return_entropy": True})
    )
    assert details["meta_info"]["output_token_entropy"] == expected
    plain = good(server.post("/generate", {"input_ids": PROMPTS[1], "sampling_params": sglang}))
    assert "output_token_entropy" not in plain["meta_info"]


def test_routes_without_a_field_for_it_refuse_it(server: Served) -> None:
    for path, body in (
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ):
        answer = server.post(path, body | {"return_entropy": True})
        assert answer.status_code == 400 and "return_entropy" in answer.text
