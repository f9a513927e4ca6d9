"""A sequence that fills the context is scored on every route that scores (rl-faults F7), and a prompt while an output
is sampled at a temperature (peer-suites-3 c)."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import Served
from tests.replies import good
from tests.server.site import parse_events
from tests.threads import ServerThread
from tokserve import LLM
from tokserve.base.errors import RequestError
from tokserve.rl import Client, PromptsFailed

CONTEXT = 48
PROMPT = [5, 6, 7, 8]
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A context that a rollout fills."""
    with ServerThread("demo", "--max-model-len", str(CONTEXT), "--sglang-api", "--dtype", "float32") as one:
        yield one


@pytest.fixture(scope="module")
def full(server: Served) -> tuple[list[int], np.ndarray]:
    """A rollout that ended with the context: all ids, and the logprobs of the output."""
    with Client(server.url) as client:
        [rollout] = client.generate([PROMPT], seeds=[3], ignore_eos=True)
    ids = [*PROMPT, *rollout.token_ids.tolist()]
    assert len(ids) == CONTEXT and rollout.finish_reason == "length"
    return ids, rollout.logprobs


def by_client(server: Served, ids: list[int]) -> list[float]:
    with Client(server.url) as client:
        return client.score([ids, ids[:9], ids[:1]])[0].tolist()


def npy(packed: str) -> list[Any]:
    values: list[Any] = np.load(io.BytesIO(base64.b64decode(packed))).tolist()
    return values


def test_candidates_behind_a_cached_prefix_are_those_of_the_whole_row(
    server: Served, full: tuple[list[int], np.ndarray]
) -> None:
    ids, start = full[0], len(PROMPT) - 1
    sets = [[token, (7 * place) % 60, 1] for place, token in enumerate(ids[start + 1 :])]
    named = {"max_tokens": 0, "prompt_logprob_token_ids": sets, "prompt_logprob_start": start}
    replies = [good(server.post(GENERATE, {"token_ids": ids, "sampling_params": named})) for _ in range(2)]
    rows = [npy(reply["prompt_token_id_logprobs"]) for reply in replies]
    with Client(server.url) as client:
        scored = client.score([ids], [start + 1])[0].tolist()
    assert rows[0] == rows[1] and [row[0] for row in rows[0]] == scored == npy(replies[0]["prompt_token_logprobs"])


def test_scores_of_labels_are_the_same_alone_and_together(server: Served, full: tuple[list[int], np.ndarray]) -> None:
    """They are those of candidates at the end of the prompt, too."""
    query, labels = full[0][:20], [5, 9, 7]
    items = [full[0][20:end] for end in (20, 21, 30, 40)]
    body: dict[str, Any] = {"query": query, "label_token_ids": labels}
    together = good(server.post("/v1/score", body | {"items": items}))["scores"]
    alone = [good(server.post("/v1/score", body | {"items": [item]}))["scores"][0] for item in items]
    assert together == alone
    first = good(server.post("/generative_scoring", body | {"items": items, "apply_softmax": False}))["data"]
    assert [one["score"] for one in first] == [row[0] for row in alone]
    for item, row in zip(items, alone, strict=True):
        ids = [*query, *item]
        named = {"max_tokens": 0, "prompt_logprob_token_ids": labels, "prompt_logprob_start": len(ids) - 1}
        reply = good(server.post(GENERATE, {"token_ids": [*ids, 1], "sampling_params": named}))
        assert row == np.exp(np.array(npy(reply["prompt_token_id_logprobs"])[0], np.float64)).tolist()


def test_the_clients_score_candidates(server: Served, full: tuple[list[int], np.ndarray]) -> None:
    ids, start = full[0], len(PROMPT)
    array = np.array([[token, 3, 5] for token in ids[start:]])
    ragged = [[token] * (place % 2) for place, token in enumerate(ids[1:9])]
    with Client(server.url) as client:
        scored = client.score([ids])[0]
        first, second, last = client.score_candidates([ids, ids[:9], ids], [array, ragged, []], [start, 1, len(ids)])
    assert first.logprobs[:, 0].tolist() == first.token_logprobs.tolist() == scored[start - 1 :].tolist()
    total = np.logaddexp(np.logaddexp.reduce(first.logprobs, axis=1), first.rest)
    assert first.ids.tolist() == array.tolist() and np.abs(total).max() < 1e-5
    assert second.logprobs.shape == (8, 1) and second.rest[0] == 0.0 and second.logprobs[0] == -np.inf
    assert second.logprobs[1::2, 0].tolist() == scored[1:8:2].tolist()
    assert last.logprobs.size == last.rest.size == 0


def test_the_client_checks_candidates(server: Served) -> None:
    with Client(server.url) as client:
        for rows in ([[1]], [[1], [2], [-2]], np.ones((3, 2)), [1, 2, 3]):
            with pytest.raises((ValueError, TypeError)):
                client.score_candidates([PROMPT], [rows])
        with pytest.raises(ValueError, match="candidates for 0"):
            client.score_candidates([PROMPT], [])


def test_a_forced_output_has_the_logprobs_of_its_sampling(server: Served, full: tuple[list[int], np.ndarray]) -> None:
    ids, logprobs = full
    output = ids[len(PROMPT) :]
    with Client(server.url) as client:
        forced, shorter = client.generate([PROMPT], trace_decode_token_ids=output, seeds=[4]) + client.generate(
            [PROMPT], trace_decode_token_ids=output, max_tokens=3
        )
    assert forced.token_ids.tolist() == output and forced.logprobs.tolist() == logprobs.tolist()
    assert forced.finish_reason == shorter.finish_reason == "length"
    assert shorter.token_ids.tolist() == output[:3]


def by_tokens(server: Served, ids: list[int]) -> list[float]:
    params = {"max_tokens": 0, "prompt_logprobs": 0}
    sent = {"token_ids": ids, "sampling_params": params, "logprobs_format": "arrays"}
    reply = good(server.post(GENERATE, sent))
    [choice] = reply["choices"]
    assert choice["token_ids"] == [] and choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]
    assert choice["stop_detail"] == {"kind": "max_tokens"} and reply["usage"]["completion_tokens"] == 0
    scores: list[float] = reply["prompt_logprobs"]["token_logprobs"]
    return scores


def by_completions(server: Served, ids: list[int]) -> list[float]:
    sent = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0, "return_weight_versions": True}
    [choice] = good(server.post(COMPLETIONS, sent))["choices"]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]
    logprobs: list[float] = choice["logprobs"]["token_logprobs"]
    return logprobs[1:]


def by_prompt_logprobs(server: Served, ids: list[int]) -> list[float]:
    sent = {"prompt": ids, "max_tokens": 0, "prompt_logprobs": 0}
    [choice] = good(server.post(COMPLETIONS, sent))["choices"]
    return [choice["prompt_logprobs"][at][str(ids[at])]["logprob"] for at in range(1, len(ids))]


def by_sglang(server: Served, ids: list[int]) -> list[float]:
    sent = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    info = good(server.post("/generate", sent))["meta_info"]
    assert info["completion_tokens"] == 0 and info["weight_versions"][0]["version"] == "0"
    return [entry[0] for entry in info["input_token_logprobs"][1:]]


@pytest.mark.parametrize("score", [by_client, by_tokens, by_completions, by_prompt_logprobs, by_sglang])
def test_a_sequence_that_fills_the_context_is_scored(
    server: Served, full: tuple[list[int], np.ndarray], score: Any
) -> None:
    ids, logprobs = full
    scores = np.array(score(server, ids), np.float32)
    assert len(scores) == CONTEXT - 1
    assert np.array_equal(scores[len(PROMPT) - 1 :], logprobs)


def test_a_stream_scores_the_same(server: Served, full: tuple[list[int], np.ndarray]) -> None:
    ids, _ = full
    sent = {"token_ids": ids, "sampling_params": {"max_tokens": 0, "prompt_logprobs": 0}, "logprobs_format": "arrays"}
    events = parse_events(server.post(GENERATE, sent | {"stream": True}).text)
    [event] = [event for event in events if event.get("prompt_logprobs")]
    assert event["prompt_logprobs"]["token_logprobs"] == by_tokens(server, ids)
    assert event["choices"][0]["finish_reason"] == "length" and event["choices"][0]["token_ids"] == []


def test_sequences_of_one_token_and_longer_ones_are_scored_alike(
    engine_threads: None, server: Served, full: tuple[list[int], np.ndarray]
) -> None:
    ids, _ = full
    with LLM("demo", max_model_len=CONTEXT, dtype="float32") as llm:
        scores = llm.score([ids, ids[:9], ids[:1], ids], [1, 5, 1, CONTEXT])
        assert [len(one) for one in scores] == [CONTEXT - 1, 4, 0, 0]
        with Client(server.url) as client:
            others = client.score([ids, ids[:9], ids[:1], ids], [1, 5, 1, CONTEXT])
        assert all(map(np.array_equal, scores, others))
        with pytest.raises(RequestError, match=r"prompts\[1\].*maximum context length") as caught:
            llm.score([ids, [*ids, 5]])
        assert caught.value.field == "prompts[1]"


def test_the_sequence_that_is_too_long_is_named(server: Served, full: tuple[list[int], np.ndarray]) -> None:
    ids, _ = full
    with Client(server.url) as client, pytest.raises(PromptsFailed, match=r"prompts\[2\].*maximum context") as caught:
        client.score([ids, ids[:9], [*ids, 5]])
    assert list(caught.value.failures) == [2] and caught.value.code == "context_length_exceeded"
    assert [None if row is None else len(row) for row in caught.value.results] == [CONTEXT - 1, 8, None]
    refused = server.post(COMPLETIONS, {"prompt": [ids, [*ids, 5]], "max_tokens": 0, "echo": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt[1]"


def test_there_is_no_room_for_an_output_token_in_a_full_context(
    server: Served, full: tuple[list[int], np.ndarray]
) -> None:
    for params in ({"max_tokens": 1}, {"max_tokens": 1, "prompt_logprobs": 0}, {}):
        refused = server.post(GENERATE, {"token_ids": full[0], "sampling_params": params})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_sglang_scores_a_prompt_while_it_samples_at_a_temperature(server: Served) -> None:
    params = {"max_new_tokens": 5, "temperature": 0.7, "sampling_seed": 1, "ignore_eos": True}
    sent = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    reply = good(server.post("/generate", sent))
    info = reply["meta_info"]
    with Client(server.url) as client:
        [raw] = client.score([PROMPT], logprobs_mode="raw")
        [divided] = client.score([[*PROMPT, *reply["output_ids"]]], [4], logprobs_mode="temperature", temperature=0.7)
    assert [entry[0] for entry in info["input_token_logprobs"][1:]] == raw.tolist()
    assert [entry[0] for entry in info["output_token_logprobs"]] == divided.tolist()
