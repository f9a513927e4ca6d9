"""The runner on a tiny model: one request's tokens and logprobs do not depend on other requests.  Only `==`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runner.drive import Driver, Job, make_runner, plan_of
from tests.tiny_models import tiny_config
from tokserve.base.errors import NotFound, StartError
from tokserve.models.dummy import values as dummy_values
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import NO_LEGAL_TOKEN, NOT_FINITE, DeviceFacts
from tokserve.runner import kvcache
from tokserve.runner.host import HostBackend
from tokserve.runner.runner import Runner

VOCAB = 320
Loaded = tuple[Runner, DeviceFacts]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Runners by dtype, each made once.  qwen3 is tied and norms queries; mistral has a window of 24 tokens."""
    requests: dict[str, Loaded] = {}

    def get(dtype: str, family: str = "qwen3") -> Loaded:
        if dtype + family not in requests:
            requests[dtype + family] = make_runner(tmp_path_factory.mktemp("model"), tiny_config(family), dtype=dtype)
        return requests[dtype + family]

    return get


def prompt(length: int, seed: int) -> list[int]:
    actual: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return actual


def jobs() -> list[Job]:
    """Seventeen requests of all sorts."""
    few = list(range(30, 40))
    requested: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"logprobs": 0},
        {
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.01,
            "logprobs": 5,
            "logprobs_mode": "processed",
            "prompt_logprobs": 4,
        },
        {
            "temperature": 1.3,
            "logprobs": 2,
            "logprob_token_ids": [5, 9],
            "logprobs_mode": "temperature",
            "prompt_logprobs": 0,
            "prompt_logprobs_start": 7,
        },
        {
            "temperature": 0.9,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.2,
            "logprobs": 3,
            "logprobs_mode": "processed",
            "prompt_logprobs": 1,
        },
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 1},
        {
            "allowed_token_ids": few,
            "bad_token_sequences": [[30, 31], [32, 33, 34], [35]],
            "min_tokens": 6,
            "logit_bias": {31: 1.0},
            "logprobs": 4,
            "logprobs_mode": "processed",
        },
        {"logprob_token_ids": [1, 2, 3]},
        {},
        {"top_p": 0.5, "logprobs": 1},
        {"prompt_logprobs": 2},
        {"temperature": 0.01, "prompt_logprobs": 2, "logprobs_mode": "temperature", "logprobs": 2},
        {"bad_token_ids": list(range(100)), "logprobs": 2, "top_k": 20},
        {"temperature": 2.0, "min_p": 0.05},
        {"frequency_penalty": 2.0, "logprobs": 1, "logprobs_mode": "temperature"},
        {"temperature": 0.0},
        {"temperature": 0.5, "prompt_logprobs": 1, "prompt_logprobs_start": 30, "logprobs": 1},
    ]
    for i, options in enumerate(requested):
        if i % 3:
            options["return_sampling_mask"] = True
    return [
        Job(prompt([1, 40, 37, 16, 50, 33, 8][i % 7], i), SamplingParams(max_tokens=8 + i % 6, **options), i, (31, 33))
        for i, options in enumerate(requested)
    ]


def outcomes(requests: list[Job]) -> list[tuple[Any, ...]]:
    return [job.outcome() for job in requests]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "dtype, family", [("float32", "qwen3"), ("bfloat16", "qwen3"), ("float16", "qwen3"), ("bfloat16", "mistral")]
)
def test_batching_chunks_slots_and_preemption_change_no_bit(
    loaded: Callable[..., Loaded], dtype: str, family: str
) -> None:
    runner, facts = loaded(dtype, family)
    alone = outcomes([Driver(runner, facts).run([job])[0] for job in jobs()])
    for output, finite, rows, prompt_rows, masks in alone:
        assert len(masks) in (0, len(output)) and all(logprob <= 0 >= kept for *_, logprob, kept in masks)
        assert all(finite) and len(output) == len(finite)
        assert all(logprob <= 0 for logprob, *_ in [*rows, *prompt_rows.values()])
    assert len({token for output, *_ in alone for token in output}) > 60, "too dull a model to show a difference"
    for chunk, seed in ((1 << 30, 0), (16, None), (7, 1)):
        assert outcomes(Driver(runner, facts, seed=seed).run(jobs(), chunk=chunk)) == alone
    preempt = {i: 1 + i % 7 for i in range(0, 17, 2)}
    assert outcomes(Driver(runner, facts, seed=2).run(jobs(), chunk=7, preempt_after=preempt)) == alone
    assert outcomes(Driver(runner, facts, seed=3).run(jobs(), preempt_after=preempt)) == alone


@pytest.mark.some(3)
@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scoring_gives_the_logprobs_of_decoding(loaded: Callable[..., Loaded], dtype: str, mode: Any) -> None:
    runner, facts = loaded(dtype)
    for options in (
        {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.005, "logit_bias": {9: 1.0}, "bad_token_ids": [4]},
        {"temperature": 0.0},
        {"temperature": 1.2, "allowed_token_ids": [7, 8, 9], "bad_token_sequences": [[7, 8], [8, 9, 8], [9, 9]]},
    ):
        params = SamplingParams(max_tokens=40, logprobs=3, logprobs_mode=mode, **options)  # type: ignore[arg-type]
        requests = Driver(runner, facts).run([Job(prompt(21, 5), params, 3)])[0]
        sequence = requests.prompt + requests.output
        scoring = SamplingParams(
            max_tokens=1,
            prompt_logprobs=3,
            prompt_logprobs_start=21,
            logprobs_mode=mode,
            **options,  # type: ignore[arg-type]
        )
        scored = Driver(runner, facts, seed=1).run([Job(sequence, scoring)], chunk=17)[0].prompt_rows
        assert [scored[21 + i] for i in range(40)] == requests.rows
        assert len(scored) == 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forced_tokens_have_the_logprobs_of_scoring(loaded: Callable[..., Loaded], dtype: str) -> None:
    runner, facts = loaded(dtype)
    ids = prompt(45, 5)
    for options in ({"temperature": 0.0}, {"temperature": 1.3, "top_k": 2, "bad_token_ids": ids[30:40]}):
        shared = {"logprobs_mode": "temperature"} | options
        trace = SamplingParams(trace_decode_token_ids=ids[21:], logprobs=3, stop_token_ids=ids[21:], **shared)
        jobs_of_all = [Job(ids[:21], trace.for_engine(), 3), *jobs()]
        forced, *others = Driver(runner, facts).run(jobs_of_all)
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=3, prompt_logprobs_start=21, **shared)
        scored = Driver(runner, facts, seed=1).run([Job(ids, scoring)], chunk=17)[0].prompt_rows
        assert forced.output == ids[21:] and forced.rows == [scored[21 + i] for i in range(24)]
        assert outcomes(others) == outcomes(Driver(runner, facts).run(jobs()))


def test_prompt_logprobs_of_a_chunked_prompt_are_those_of_the_whole(loaded: Callable[..., Loaded]) -> None:
    runner, facts = loaded("bfloat16")
    for options in ({}, {"repetition_penalty": 1.5, "logprobs_mode": "processed"}, {"prompt_logprobs_start": 31}):
        params = SamplingParams(max_tokens=1, temperature=0.7, prompt_logprobs=2, **options)  # type: ignore[arg-type]
        results = []
        for chunk in (1 << 30, 16, 5, 1):
            job = Driver(runner, facts).run([Job(prompt(60, 8), params)], chunk=chunk)[0]
            assert sorted(job.prompt_rows) == list(range(max(params.prompt_logprobs_start, 1), 60))
            results.append(job.prompt_rows)
        assert results.count(results[0]) == 4


@pytest.fixture
def rows_of_logits(loaded: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows in each call for logits of the float32 model, which runs its steps op by op from here on."""
    runner, _ = loaded("float32")
    model = runner.model
    monkeypatch.setattr(runner.backend, "_graphs", None)
    calls: list[int] = []
    logits = model.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(model, "logits", counted)
    return calls


@pytest.fixture
def last_layer(loaded: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each call of the last layer's MLP computes, of the float32 model run op by op."""
    runner, _ = loaded("float32")
    block = runner.model.blocks[-1]
    monkeypatch.setattr(runner.backend, "_graphs", None)
    calls: list[int] = []

    class Counted:
        def __call__(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            calls.append(len(x))
            return mlp(x, *rest)

    mlp = block.mlp
    monkeypatch.setattr(block, "mlp", Counted())
    return calls


def test_prompt_logprobs_of_one_request_cost_the_others_nothing(
    loaded: Callable[..., Loaded], last_layer: list[int]
) -> None:
    runner, facts = loaded("float32")

    def requests() -> list[Job]:
        scoring = SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=2, prompt_logprobs_start=30)
        plain = SamplingParams(max_tokens=3, temperature=0.7, logprobs=1)
        return [Job(prompt(40, 1), scoring, 1), Job(prompt(50, 2), plain, 2), Job(prompt(33, 3), plain, 3)]

    alone = outcomes([Driver(runner, facts).run([job])[0] for job in requests()])
    last_layer.clear()
    assert outcomes(Driver(runner, facts).run(requests())) == alone
    assert last_layer == [11 + 1 + 1, 3, 3]  # prompt tokens 30 .. 39 are predicted by positions 29 .. 38
    last_layer.clear()
    assert outcomes(Driver(runner, facts, seed=3).run(requests(), chunk=20)) == alone
    assert last_layer == [0, 11 + 1, 3, 3, 1]


def test_logits_are_made_for_the_rows_that_need_them_only(
    loaded: Callable[..., Loaded], rows_of_logits: list[int]
) -> None:
    job = Job(prompt(60, 1), SamplingParams(max_tokens=3))
    Driver(*loaded("float32")).run([job, job.fresh()], chunk=16)
    assert rows_of_logits == [2, 2, 2]


def test_logits_of_prompt_tokens_are_made_in_small_pieces(
    loaded: Callable[..., Loaded], rows_of_logits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, facts = loaded("float32")
    params = SamplingParams(max_tokens=1, prompt_logprobs=3)
    expected = Driver(runner, facts).run([Job(prompt(100, 1), params)])[0]
    assert rows_of_logits == [99, 1]
    monkeypatch.setattr(runner, "_score_chunk", 16)
    pieces = Driver(runner, facts).run([Job(prompt(100, 1), params)])[0]
    assert rows_of_logits[2:] == [16] * 6 + [3, 1]
    assert pieces.outcome() == expected.outcome()


def test_pieces_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBackend, "prompt_logits_bytes", 40 * VOCAB * 4)
    assert make_runner(tmp_path, tiny_config("llama"))[0]._score_chunk == 40


def test_stale_values_in_a_block_have_no_effect(
    tmp_path: Path, loaded: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = kvcache.allocate

    def full_of_nan(layout: Any) -> Any:
        caches = allocate(layout)
        for k, v in caches:
            k.fill_(float("nan"))
            v.fill_(float("inf"))
        return caches

    monkeypatch.setattr(kvcache, "allocate", full_of_nan)
    for family in ("qwen3", "mistral"):
        runner, facts = make_runner(tmp_path / family, tiny_config(family), dtype="bfloat16")
        clean = outcomes(Driver(*loaded("bfloat16", family), seed=1).run(jobs()[:8], chunk=9))
        assert outcomes(Driver(runner, facts, seed=1).run(jobs()[:8], chunk=9)) == clean


def test_a_request_with_nan_is_flagged_and_changes_no_other(tmp_path: Path) -> None:
    runner, facts = make_runner(tmp_path, tiny_config("llama"))
    name = "model.embed_tokens.weight"
    poison = dummy_values(name, (VOCAB, 64), 0, tied=False)
    poison[7] = float("nan")
    runner.model.parameters_by_name()[name].load(poison)
    requests = [job for job in jobs() if 7 not in job.prompt]
    clean = outcomes(Driver(runner, facts).run([job.fresh() for job in requests]))
    sick = [Job([*prompt(20, 3), 7, 9], SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1)) for _ in range(3)]
    driver = Driver(runner, facts, seed=4)
    driver.run(sick + requests, chunk=11)
    assert all(job.finite == [False] * 5 and set(job.status) == {NOT_FINITE} for job in sick)
    assert outcomes(requests) == clean
    assert outcomes(driver.run([job.fresh() for job in requests])) == clean, "blocks and slots of the broken requests"


def test_a_row_with_nothing_to_draw_is_flagged_alone(loaded: Callable[..., Loaded]) -> None:
    runner, facts = loaded("float32")
    stuck = Job(prompt(9, 1), SamplingParams(max_tokens=4, allowed_token_ids=[5], bad_token_ids=[5]))
    requests = Driver(runner, facts).run([*jobs()[:5], stuck])
    assert stuck.status == [NO_LEGAL_TOKEN] * 4
    assert outcomes(requests[:5]) == outcomes(Driver(runner, facts).run(jobs()[:5]))


def test_a_slot_keeps_no_state_of_its_last_request(loaded: Callable[..., Loaded]) -> None:
    runner, facts = loaded("float32")
    driver = Driver(runner, facts)
    first = [driver.run([Job(prompt(5, 1), SamplingParams(max_tokens=6, logprobs=1))])[0]]
    for job in jobs():
        driver.run([job])
        again = driver.run([first[0].fresh()])[0]
        assert again.outcome() == first[0].outcome()


def test_min_tokens_and_bad_sequences_hold_to_the_end(loaded: Callable[..., Loaded]) -> None:
    params = SamplingParams(
        max_tokens=60, min_tokens=30, allowed_token_ids=[1, 2, 3, 4], bad_token_sequences=[[1, 2], [2, 2, 3], [9, 1]]
    )
    driver = Driver(*loaded("float32"))
    actual = [job.output for job in driver.run([Job([9], params, seed, (4,)) for seed in range(8)])]
    for output in actual:
        text = [9, *output]
        assert 4 not in output[:30]
        assert all(text[i : i + 2] not in ([1, 2], [9, 1]) for i in range(60))
        assert all(text[i : i + 3] != [2, 2, 3] for i in range(59))
    assert any(4 in output[30:] for output in actual)
    assert all({1, 2, 3} <= set(output) for output in actual)


def test_steps_without_samples_or_rows(loaded: Callable[..., Loaded]) -> None:
    runner, facts = loaded("float32")
    result = runner.execute(plan_of([], 41, freed=[3]))
    assert (result.step, result.token_ids.tolist(), result.columns, result.values) == (41, [], {}, {})
    assert result.counts.tolist() == result.status.tolist() == []
    driver = Driver(runner, facts)
    driver._step([job := Job(prompt(20, 1), SamplingParams(logprobs=1))], chunk=4)
    assert job.computed == 4 and job.output == [] and job.rows == []


def test_facts_and_calls(loaded: Callable[..., Loaded]) -> None:
    runner, facts = loaded("bfloat16")
    assert facts.vocab_size == VOCAB
    assert facts.layout.num_blocks == 24 * 8 and len(facts.layout.specs) == 3
    assert facts.facts["dtype"] == "bfloat16" and facts.facts["threads"] == 1
    assert facts.facts["ops"]["linear"] in ("torch", "cpp")
    assert facts.facts["kv_bytes"] == facts.layout.bytes() == 24 * 8 * 16 * 3 * 2 * 2 * 16 * 2
    assert facts.facts["load_seconds"] >= 0 and facts.facts["warm_up_seconds"] >= 0
    memory = runner.call("memory", {})
    assert memory["kv_bytes"] == facts.layout.bytes()
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160 + 2 * 64 + 2 * 16
    assert memory["weight_bytes"] == 2 * (3 * layer + VOCAB * 64 + 64)
    assert facts.weight_version == "0"
    with pytest.raises(NotFound, match="no_such"):
        runner.call("no_such", {})


@pytest.mark.parametrize("length, block", [(1, 1), (2, 16), (3, 2), (17, 16), (32, 16)])
def test_any_context_length_starts_and_fills(tmp_path: Path, length: int, block: int) -> None:
    runner, facts = make_runner(tmp_path, tiny_config("llama"), max_model_len=length, block_size=block, max_num_seqs=1)
    job = Job(prompt(max(length - 1, 1), 1), SamplingParams(max_tokens=1 if length < 3 else 2))
    Driver(runner, facts, max_num_seqs=1).run([job])
    assert len(job.output) == job.params.max_tokens


def test_too_small_a_cache_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--kv-cache-memory-bytes"):
        make_runner(tmp_path, tiny_config("llama"), kv_cache_memory_bytes=1000)


def test_ops_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match="no_such"):
        make_runner(tmp_path, tiny_config("llama"), ops={"*": "no_such"})
