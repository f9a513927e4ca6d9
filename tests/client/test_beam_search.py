"""Beam search: transformers' beams; the same alone and together; what it refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiers import slow_cases
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, BeamSearchParams
from tokserve.base.errors import RequestError
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.inputs import GenerateRequest
from tokserve.features.beams.beam_search import BeamRun
from tokserve.protocol.params import RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, pack_ids

pytestmark = pytest.mark.usefixtures("engine_threads")

EOS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("beams"), tiny_config("llama", vocab_size=48, eos_token_id=EOS))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", tokens_only=True, max_model_len=256) as llm:
        yield llm


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 48, rng.integers(1, 40)).tolist() for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "penalty", "length"),
    slow_cases([(1, 1.0, 8), (3, 1.0, 12), (4, 0.0, 10), (5, -0.5, 6), (2, 2.0, 9)], (4, 0.0, 10), (5, -0.5, 6)),
)
def test_beams_are_those_of_transformers(llm: LLM, model: Path, width: int, penalty: float, length: int) -> None:
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    params = BeamSearchParams(
        beam_width=width, max_tokens=length, length_penalty=penalty, include_stop_str_in_output=True
    )
    several = prompts(10, seed=length)  # other ones for each of the settings
    outputs = llm.beam_search([{"prompt_token_ids": ids} for ids in several], params)
    num_ended = 0
    for ids, output in zip(several, outputs, strict=True):
        expected = oracle.generate(
            torch.tensor([ids]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=length,
            do_sample=False,
            length_penalty=penalty,
            early_stopping="never" if width > 1 else False,
            eos_token_id=EOS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for row, (sequence, actual) in enumerate(zip(expected.sequences.tolist(), output.sequences, strict=True)):
            unpadded = sequence[: len(actual.tokens)]
            assert actual.tokens == unpadded and set(sequence[len(actual.tokens) :]) <= {0, EOS}  # padding
            num_ended += actual.finish_reason == "stop"
            if width > 1:
                generated = len(actual.tokens) - len(ids)
                score = actual.cum_logprob / generated**penalty
                assert abs(score - float(expected.sequences_scores[row])) < 1e-3
    assert num_ended > 0 or width < 3


def test_a_search_is_the_same_alone_and_beside_others(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, logprobs=2)
    several = prompts(4)
    together = llm.beam_search([{"prompt_token_ids": ids} for ids in several], params)
    llm.reset_prefix_cache()
    alone = [llm.beam_search({"prompt_token_ids": ids}, params)[0] for ids in several]
    limited = llm.beam_search([{"prompt_token_ids": ids} for ids in several], params, concurrency_limit=2)
    for one, other, third in zip(together, alone, limited, strict=True):
        for left, right, last in zip(one.sequences, other.sequences, third.sequences, strict=True):
            assert (
                (left.tokens, left.cum_logprob) == (right.tokens, right.cum_logprob) == (last.tokens, last.cum_logprob)
            )
            assert left.logprobs is not None and left.logprobs.top_ids.shape == (len(left.logprobs), 2)
            assert abs(float(left.logprobs.token_logprobs.sum(dtype=np.float64)) - left.cum_logprob) < 1e-9


def test_an_eos_that_is_ignored_and_tokens_that_are_allowed(llm: LLM) -> None:
    [ignoring] = llm.beam_search([[9, 10]], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    assert {len(actual.tokens) for actual in ignoring.sequences} == {8}
    allowed = [11, 12, 13, EOS]
    params = BeamSearchParams(beam_width=3, max_tokens=5, allowed_token_ids=allowed)
    [output] = llm.beam_search([[9, 10]], params)
    assert all(set(actual.tokens[2:]) <= set(allowed) for actual in output.sequences)
    assert all(EOS not in actual.tokens for actual in output.sequences)  # it is left out of those that it ended


def test_the_context_ends_a_search(llm: LLM) -> None:
    [output] = llm.beam_search([[9] * 253], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
    assert {len(actual.tokens) for actual in output.sequences} == {256}
    assert {actual.finish_reason for actual in output.sequences} == {"length"}


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([9], {"beam_width": 0}, "beam_width"),
        ([9], {"beam_width": 20}, "beam_width"),
        ([9], {"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ([9], {"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ([9], {"beam_width": 3, "allowed_token_ids": [9, 10]}, "beam_width"),
        ([99], {"beam_width": 2}, "token_ids"),
        ([9] * 256, {"beam_width": 2}, "token_ids"),
        ([], {"beam_width": 2}, None),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, prompt: list[int], params: dict[str, Any], field: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(**params))
    assert field is None or caught.value.field == field


def test_without_alternatives_there_are_no_beams(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2)
    with pytest.raises(RequestError, match=r"beam_width cannot be honoured: .* needs 3 .*, and there are 0"):
        params.validate(llm._llm.ready, 0)
    with pytest.raises(RequestError, match=r"beam_width must be at most 1: .* needs 3 .*, and there are 2"):
        params.validate(llm._llm.ready, 2)


ABORTS: list[Callable[[AsyncLLM], Awaitable[dict[str, str]]]] = [
    lambda llm: llm.abort("cmpl-beams"),
    lambda llm: llm.abort_group("g"),
    lambda llm: llm.abort_all(),
    lambda llm: llm.abort_own(),
]


def test_an_abort_between_two_steps_ends_the_search(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, between, go_on = 0, threading.Event(), threading.Event()
    prepared = BeamRun._prepared

    def slow(run: BeamRun, live: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            between.set()
            assert go_on.wait(60)
        return prepared(run, live)

    async def check() -> None:
        nonlocal steps
        async with AsyncLLM(str(model), dtype="float32", tokens_only=True, max_model_len=256) as llm:
            other = AsyncLLM.from_config(llm.config)
            await other.connect(llm.engine[0])
            for abort, caller in [(abort, llm) for abort in ABORTS] + [(abort, other) for abort in ABORTS[:-1]]:
                steps = 0
                between.clear()
                go_on.clear()
                request = GenerateRequest(
                    request_id="beams",
                    prompt=TokenPrompt(pack_ids([9])),
                    task=SamplingParams(),
                    options=RequestOptions(group_id="g"),
                )
                params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
                run = BeamRun(llm, request, [request.prompt], params)
                searching = asyncio.ensure_future(run.run(lambda: None, lambda: None))
                await asyncio.to_thread(between.wait, 60)
                results = await abort(caller)
                assert list(results.values()) == ["aborted"]
                go_on.set()
                await searching
                outputs = run.outputs(0, None)
                assert [(one.finish_reason, one.stop_detail, len(one.token_ids)) for one in outputs] == [
                    ("abort", "abort_user", 3)
                ] * 2
                assert steps == 4
            assert await other.abort("beams") == {"beams": "finished"}
            await other.shutdown()

    monkeypatch.setattr(BeamRun, "_prepared", slow)
    asyncio.run(check())
