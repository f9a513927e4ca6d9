"""The exactness contract through real engines: tokens and logprobs do not depend on other requests.  Only `==`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("engine_threads")

Case = tuple[list[int], SamplingParams]


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    drawn: list[Case] = []
    shared = rng.integers(3, 200, 70).tolist()
    for i in range(17):
        suffix = rng.integers(3, 200, [3, 20, 45, 90][i % 4]).tolist()
        prompt = shared[: 64 if i % 3 == 0 else 0] + suffix
        params: dict[str, Any] = {"max_tokens": 12 + i, "ignore_eos": True, "logprobs": i % 4, "seed": i}
        params["temperature"] = [0.0, 1.0, 0.6][i % 3]
        if i % 5 == 1:
            params |= {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
        if i % 5 == 2:
            params |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
        params["logprobs_mode"] = ["raw", "temperature", "processed"][i % 3]
        drawn.append((prompt, SamplingParams(**params)))
    return drawn


def result(output: Any) -> tuple[Any, ...]:
    choice = output.outputs[0]
    return (choice.token_ids, columns(choice.logprobs))


def columns(logprobs: Any) -> tuple[Any, ...]:
    actual = logprobs
    return tuple(c.tolist() for c in (actual.token_logprobs, actual.ranks, actual.top_ids, actual.top_logprobs))


def together(llm: LLM, count: int | None = None) -> list[tuple[Any, ...]]:
    requests = cases()[:count]
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    return [result(output) for output in outputs]


def alone(llm: LLM, count: int | None = None) -> list[tuple[Any, ...]]:
    return [result(llm.generate([prompt], [params], use_tqdm=False)[0]) for prompt, params in cases()[:count]]


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(f"tiny-{request.param}")
    write_checkpoint(directory, tiny_config("qwen3", dtype=request.param), seed=1)
    return directory


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> tuple[list[tuple[Any, ...]], int]:
    """Each request alone, no prefix cache, whole prompts, one thread, depth 1; and the KV cache's bytes per token."""
    with LLM(checkpoint, tokens_only=True, enable_prefix_caching=False, cpu_threads=1) as llm:
        per_token = llm.ready.facts["kv_bytes"] // (llm.ready.num_blocks * llm.ready.block_size)
        return alone(llm), per_token


@pytest.fixture(scope="module")
def expected(solo: tuple[list[tuple[Any, ...]], int]) -> list[tuple[Any, ...]]:
    return solo[0]


@pytest.fixture(scope="module")
def short_steps(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, tokens_only=True, max_num_batched_tokens=48) as llm:
        yield llm


def test_outputs_of_the_cases_differ(expected: list[tuple[Any, ...]]) -> None:
    """Different requests have different, varied tokens: equality below means something."""
    assert len({tuple(tokens) for tokens, _ in expected}) == len(expected)
    assert sum(len(set(tokens)) for tokens, _ in expected) > 0.5 * sum(len(tokens) for tokens, _ in expected)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"depth": 2, "cpu_threads": 2}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 7}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 64, "max_chunk": 16, "depth": 2, "enable_prefix_caching": False},
        {"max_model_len": 256, "kv_cache_memory_bytes": "preempt", "block_size": 8},
    ],
    ids=["batched", "overlapped", "chunks of 7", "chunks of 16", "preempted"],
)
def test_batched_requests_have_the_bits_of_single_ones(
    checkpoint: Path, solo: tuple[list[tuple[Any, ...]], int], options: dict[str, Any]
) -> None:
    expected, per_token = solo
    if options.get("kv_cache_memory_bytes") == "preempt":  # room for little more than one full context
        options = options | {"kv_cache_memory_bytes": per_token * 264}
    with LLM(checkpoint, tokens_only=True, **options) as llm:
        assert together(llm) == expected
        assert together(llm) == expected, "second time, from the prefix cache"
        assert alone(llm) == expected
        if "kv_cache_memory_bytes" in options:
            assert llm.stats.preemptions > 0
        llm.call("check")


@pytest.mark.slow
def test_same_bits_on_the_torch_references(checkpoint: Path) -> None:
    """The bits may differ from those of the C++ extension, but do not depend on other requests."""
    torch_ops: dict[str, Any] = {"ops": {"*": "torch"}, "tokens_only": True}
    with LLM(checkpoint, enable_prefix_caching=False, cpu_threads=1, **torch_ops) as llm:
        assert set(llm.ready.facts["ops"].values()) == {"torch"}
        expected = alone(llm, 6)
    with LLM(checkpoint, cpu_threads=2, max_num_batched_tokens=23, **torch_ops) as llm:
        assert together(llm, 6) == expected
        assert together(llm, 6) == expected, "second time, from the prefix cache"


@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_decode_logprobs_equal_rescored_prompt_logprobs(short_steps: LLM, mode: str) -> None:
    llm = short_steps
    llm.call("reset_prefix_cache")
    prompt = list(range(5, 40))
    params: dict[str, Any] = {"temperature": 0.7, "seed": 3, "logprobs_mode": mode, "ignore_eos": True}
    if mode == "processed":
        params |= {"top_k": 50, "top_p": 0.95}
    decoded = llm.generate([prompt], [SamplingParams(max_tokens=100, logprobs=3, **params)], use_tqdm=False)[0]
    tokens = list(decoded.outputs[0].token_ids)
    rescore = SamplingParams(max_tokens=1, prompt_logprobs=3, prompt_logprobs_start=len(prompt), **params)
    for _ in range(2):  # cold, then with a warm cache
        scored = llm.generate([prompt + tokens], [rescore], use_tqdm=False)[0]
        assert columns(scored.prompt_logprobs) == columns(decoded.outputs[0].logprobs)
