"""Steps with drafts give the tokens, logprobs and ranks of steps of one token.  Only `==`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.runner.drive import Driver, Job, make_runner, plan_of
from tests.runner.fake_device import FakeDevice
from tests.runner.test_runner import jobs, outcomes, prompt
from tests.tiny_models import tiny_config
from tokserve.protocol.columns import LOGPROBS
from tokserve.protocol.params import SamplingParams, StructuredOutputs
from tokserve.protocol.plan import (
    NO_LEGAL_TOKEN,
    NOT_FINITE,
    OK,
    WITHHELD,
    DeviceFacts,
    GrammarBitmask,
    NewRow,
    StepResult,
)
from tokserve.runner import device
from tokserve.runner.runner import Runner
from tokserve.runner.sampler import SampledTokens
from tokserve.runner.steps import verify

VOCAB = 320
Loaded = tuple[Runner, DeviceFacts]
BACKENDS = pytest.mark.parametrize("backend", ["host", "cuda"])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    """Runners by backend and dtype, each made once."""
    requests: dict[str, Loaded] = {}

    def get(backend: str, dtype: str = "float32") -> Loaded:
        if backend + dtype not in requests:
            with pytest.MonkeyPatch.context() as patch:
                if backend == "cuda":
                    patch.setattr(device, "use", lambda kind: FakeDevice())
                directory = tmp_path_factory.mktemp("model")
                requests[backend + dtype] = make_runner(directory, tiny_config("qwen3"), dtype=dtype, depth=2)
        return requests[backend + dtype]

    return get


class SomeRight:
    """Drafts from the outputs that are known to come, each wrong with a chance of `wrong`."""

    def __init__(self, known: list[Job], wrong: float, seed: int) -> None:
        self._outputs = {job.seed: job.output for job in known}
        self._wrong = wrong
        self._rng = random.Random(seed)

    def __call__(self, job: Job) -> list[int]:
        at = len(job.output)
        drafts = self._outputs[job.seed][at : at + self._rng.randrange(6)]
        return [self._rng.randrange(VOCAB) if self._rng.random() < self._wrong else token for token in drafts]


@pytest.mark.some(1)
@pytest.mark.parametrize("backend, dtype", [("host", "float32"), ("host", "bfloat16"), ("cuda", "float32")])
def test_drafts_change_no_bit(loaded: Callable[..., Loaded], backend: str, dtype: str) -> None:
    runner, facts = loaded(backend, dtype)
    alone = [Driver(runner, facts).run([job])[0] for job in jobs()]
    preempt = {i: 1 + i % 7 for i in range(0, 17, 2)}
    for wrong, chunk, options in (
        (0.0, 1 << 30, {}),
        (1.0, 16, {}),
        (0.3, 7, {}),
        (0.3, 9, {"preempt_after": preempt}),
    ):
        driver = Driver(runner, facts, seed=chunk % 5, drafter=SomeRight(alone, wrong, chunk))
        assert outcomes(driver.run(jobs(), chunk=chunk, **options)) == outcomes(alone)  # type: ignore[arg-type]
        assert (driver.accepted > 40) == (wrong < 1.0) and (driver.rejected > 20) == (wrong > 0.0)


@BACKENDS
def test_drafts_of_one_request_change_no_other(loaded: Callable[..., Loaded], backend: str) -> None:
    runner, facts = loaded(backend)
    alone = [Driver(runner, facts).run([job])[0] for job in jobs()]
    some_right = SomeRight(alone, 0.3, 1)
    driver = Driver(runner, facts, drafter=lambda job: some_right(job) if job.seed % 4 == 0 else [])
    assert outcomes(driver.run(jobs())) == outcomes(alone)


def admit(runner: Runner, job: Job, slot: int = 2) -> int:
    """Compute a prompt in a slot; returns the first token."""
    row = NewRow(slot, "", np.array(job.prompt, np.int32), len(job.prompt), job.params, job.seed, (5,))
    blocks = [(slot, 0, list(range(8 * slot, 8 * slot + 8)))]
    result = runner.execute(plan_of([(slot, 0, len(job.prompt), 1)], new=[row], blocks=blocks))
    return int(result.token_ids[0])


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"min_tokens": 9, "logprobs": 2},
]


@pytest.mark.parametrize("options", PARAMS, ids=str)
@BACKENDS
def test_a_plan_made_while_drafts_are_in_flight_continues_after_the_accepted_ones(
    loaded: Callable[..., Loaded], backend: str, options: dict[str, Any]
) -> None:
    runner, facts = loaded(backend)
    job = Job(prompt(9, 3), SamplingParams(max_tokens=20, **options), 7, (5,))
    output = Driver(runner, facts).run([job.fresh()])[0].output
    for right in range(4):
        assert admit(runner, job) == output[0]
        wrong = [(token + 1) % VOCAB for token in output]
        drafts = [output[1:4][i] if i < right else wrong[1:4][i] for i in range(3)]
        first = runner.sample(runner.forward(plan_of([(2, 9, 4, 4)], 1, [drafts])), None)
        # planned before the result of `first` is known: four positions are counted
        good = output[right + 2 : right + 4]
        second = runner.sample(runner.forward(plan_of([(2, 13, 3, 3)], 2, [[good[0], wrong[right + 3]]])), None)
        third = runner.sample(runner.forward(plan_of([(2, 16, 1, 1)], 3)), None)
        tokens = [output[0]]
        for result, count in ((first.result(), right + 1), (second.result(), 2), (third.result(), 1)):
            assert result.counts.tolist() == [count] and result.status.tolist() == [OK]
            tokens += result.token_ids.tolist()
        assert tokens == output[: right + 5]
        settled = runner.execute(plan_of([(2, 9 + right + 4, 1, 1)], 4, freed=[]))  # all results are known here
        assert settled.token_ids.tolist() == [output[right + 5]]
        runner.execute(plan_of([], freed=[2]))


def bitmask(masks: list[tuple[int, set[int]]], withheld: list[int]) -> GrammarBitmask:
    bits = np.zeros((len(masks), -(-VOCAB // 32)), np.uint32)
    for row, (_, allowed) in enumerate(masks):
        for token in allowed:
            bits[row, token // 32] |= np.uint32(1 << token % 32)
    return GrammarBitmask(np.array([slot for slot, _ in masks], np.int32), bits, np.array(withheld, np.int32))


@BACKENDS
def test_a_withheld_row_gets_no_token_and_is_computed_again(loaded: Callable[..., Loaded], backend: str) -> None:
    runner, facts = loaded(backend)
    grammar = {"structured_outputs": StructuredOutputs(regex="x")}
    requests = [
        Job(prompt(9, 1), SamplingParams(logprobs=1), 1),
        Job(prompt(9, 2), SamplingParams(**grammar), 2),
        Job(prompt(9, 3), SamplingParams(logprobs=2), 3),
    ]
    expected = [
        Driver(runner, facts).run([Job(job.prompt, SamplingParams(max_tokens=4), job.seed)])[0] for job in requests
    ]
    firsts = [expected[slot].output[0] for slot in range(3)]
    rows = [
        NewRow(slot, "", np.array(job.prompt, np.int32), 9, job.params, job.seed, ())
        for slot, job in enumerate(requests)
    ]
    blocks = [(slot, 0, list(range(8 * slot, 8 * slot + 8))) for slot in range(3)]
    plan = plan_of([(2, 0, 9, 1), (1, 0, 9, 1), (0, 0, 9, 1)], new=rows, blocks=blocks)
    result = runner.sample(runner.forward(plan), bitmask([(1, {firsts[1]})], [2])).result()
    assert (result.counts.tolist(), result.status.tolist()) == ([0, 1, 1], [WITHHELD, OK, OK])
    assert result.token_ids.tolist() == [firsts[1], firsts[0]]
    assert len(result.columns[LOGPROBS].records) == 2
    # slot 2 has its last position computed again, slot 0 goes on with drafts, slot 1 has no token left by its mask
    drafts = [[], [expected[0].output[1], 0, 0], []]
    plan = plan_of([(2, 8, 1, 1), (0, 9, 4, 4), (1, 9, 1, 1)], 1, drafts)
    result = runner.sample(runner.forward(plan), bitmask([(1, set())], [])).result()
    assert result.status.tolist() == [OK, OK, NO_LEGAL_TOKEN]
    assert result.token_ids.tolist() == [firsts[2], *expected[0].output[1 : 1 + result.counts[1]]]
    assert result.counts[1] >= 2
    length = 9 + int(result.counts[1])
    plan = plan_of([(0, length, 1, 1), (2, 9, 3, 3)], 2, [[], [7, 8]])
    result = runner.sample(runner.forward(plan), bitmask([], [0, 2, 1])).result()
    assert (result.counts.tolist(), result.token_ids.tolist()) == ([0, 0], [])
    assert result.status.tolist() == [WITHHELD] * 2 and not result.columns
    runner.execute(plan_of([], freed=[0, 1, 2]))


@BACKENDS
def test_each_draft_has_the_mask_of_its_position(loaded: Callable[..., Loaded], backend: str) -> None:
    runner, _ = loaded(backend)
    job = Job(prompt(9, 3), SamplingParams(structured_outputs=StructuredOutputs(regex="x"), temperature=0.0))
    row = NewRow(2, "", np.array(job.prompt, np.int32), 9, job.params, 0, ())
    plan = plan_of([(2, 0, 9, 1)], new=[row], blocks=[(2, 0, [16, 17])])
    result = runner.sample(runner.forward(plan), bitmask([(2, {40})], [])).result()
    assert result.token_ids.tolist() == [40]
    plan = plan_of([(2, 9, 4, 4)], 1, [[41, 42, 43]])
    result = runner.sample(runner.forward(plan), bitmask([(2, {41}), (2, {42}), (2, {7}), (2, {9})], [])).result()
    assert (result.counts.tolist(), result.token_ids.tolist()) == ([3], [41, 42, 7])
    runner.execute(plan_of([], freed=[2]))


def verified(
    drafts: list[list[int]], tokens: list[int], status: list[int] | None = None, withheld: list[bool] | None = None
) -> tuple[list[int], list[int], list[bool]]:
    """The result of `verify` for rows that each sample one token more than they have drafts."""
    plan = plan_of([(i, 0, len(ids) + 1, len(ids) + 1) for i, ids in enumerate(drafts)], 0, drafts)
    sampled = SampledTokens(np.array(tokens, np.int32), None if status is None else np.array(status, np.uint8))
    counts, row_status, kept = verify(plan, sampled, None if withheld is None else np.array(withheld))
    return counts.tolist(), row_status.tolist(), kept.tolist()


def test_the_accepted_prefix_and_one_token_count() -> None:
    counts, status, kept = verified([[1, 2], [], [3, 4, 5], [6]], [1, 2, 9, 8, 3, 0, 5, 7, 0, 6])
    assert (counts, status) == ([3, 1, 2, 1], [OK] * 4)
    assert kept == [True] * 3 + [True] + [True, True, False, False] + [True, False]


def test_a_token_that_is_not_ok_ends_its_row() -> None:
    counts, status, kept = verified([[1, 2], [], [3, 4]], [1, 2, 9, 8, 3, 4, 5], [0, 1, 0, 2, 1, 0, 0])
    assert (counts, status) == ([1, 0, 0], [OK, NO_LEGAL_TOKEN, NOT_FINITE])
    assert kept == [True] + [False] * 6


def test_a_withheld_row_has_no_tokens() -> None:
    counts, status, kept = verified([[1, 2], [4]], [4, 5], None, [True, False])
    assert (counts, status, kept) == ([0, 2], [WITHHELD, OK], [True, True])


def test_results_of_a_step_without_drafts_are_its_tokens(loaded: Callable[..., Loaded]) -> None:
    runner, _ = loaded("host")
    job = Job(prompt(9, 3), SamplingParams(logprobs=1))
    admit(runner, job)
    chunk = NewRow(4, "", np.array(prompt(20, 1), np.int32), 20, job.params, 0, ())
    plan = plan_of([(4, 0, 8, 0), (2, 9, 1, 1)], 3, new=[chunk], blocks=[(4, 0, [40, 41])])
    result: StepResult = runner.execute(plan)
    assert (result.step, result.counts.tolist(), result.status.tolist()) == (3, [0, 1], [OK, OK])
    assert len(result.token_ids) == 1 and len(result.columns[LOGPROBS].records) == 1
    runner.execute(plan_of([], freed=[2, 4]))
