"""The runner on a device with memory of its own: the same bits, one copy a step, and nothing waited for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.test_float8 import QWEN, quantize
from tests.runner.drive import MASKS, Driver, Job, logprobs_of, make_runner, masks_of, plan_of
from tests.runner.drive import row as plain_row
from tests.runner.fake_device import FakeDevice, same_bytes
from tests.runner.test_runner import jobs, outcomes, prompt
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import ops
from tokserve.gpu import device_slots
from tokserve.gpu.cuda import CudaBackend
from tokserve.gpu.cuda_graphs import decode_sizes, prompt_rows, prompt_sizes
from tokserve.gpu.device_slots import DeviceSlots
from tokserve.protocol.params import SamplingParams, ThinkingMarkers
from tokserve.protocol.plan import OK, DeviceFacts, NewRow, StepPlan
from tokserve.runner import device
from tokserve.runner.runner import Runner
from tokserve.runner.steps import PendingResult
from tokserve.runner.tables.host_slots import HostSlots
from tokserve.runner.tables.slots import logit_lengths

Loaded = tuple[Runner, DeviceFacts, FakeDevice]


def make(path: Path, hf: dict[str, Any] | None = None, **options: Any) -> Loaded:
    fake = FakeDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "use", lambda kind: fake)
        runner, facts = make_runner(path, hf or tiny_config("qwen3"), **{"max_num_batched_tokens": 64} | options)
    return runner, facts, fake


@pytest.fixture(scope="module")
def staged() -> Iterator[Loaded]:
    with tempfile.TemporaryDirectory() as path:
        yield make(Path(path), depth=2)


@pytest.fixture(scope="module")
def alone() -> list[tuple[object, ...]]:
    """The result of each job alone on the CPU."""
    with tempfile.TemporaryDirectory() as path:
        runner, facts = make_runner(Path(path), tiny_config("qwen3"))
        return [outcomes([Driver(runner, facts).run([job])[0]])[0] for job in jobs()]


class LateDriver(Driver):
    """Asks for a step's result when the next one has begun."""

    waiting: list[tuple[list[Job], StepPlan, PendingResult]] = []

    def _collect(self, active: list[Job], plan: StepPlan) -> None:
        pending = self.runner.sample(self.runner.forward(plan), None)
        self.waiting = [*self.waiting, (active, plan, pending)]
        for job, count in zip(active, plan.num_tokens.tolist(), strict=True):
            job.computed += count
        for i in np.flatnonzero(plan.num_logits).tolist():
            active[i].output.append(-len(self.waiting))  # known later
        while len(self.waiting) > 1 or (all(job.finished() for job in active) and self.waiting):
            self.land()

    def land(self) -> None:
        (active, plan, pending), *self.waiting = self.waiting
        result = pending.result()
        assert result.step == plan.step
        for n, i in enumerate(np.flatnonzero(plan.num_logits).tolist()):
            job = active[i]
            assert result.counts[i] == 1
            job.output[next(at for at, token in enumerate(job.output) if token < 0)] = int(result.token_ids[n])
            job.finite.append(result.status[i] == OK)
            if job.params.logprobs is not None:
                logprobs = logprobs_of(result.columns)
                assert logprobs is not None
                width = job.params.logprobs + len(job.params.logprob_token_ids or [])
                job.rows.append(plain_row(logprobs, n, width))
            if job.params.return_sampling_mask:
                job.masks.append(masks_of(result.columns[MASKS])[n])


def cuda(runner: Runner) -> CudaBackend:
    assert isinstance(runner.backend, CudaBackend)
    return runner.backend


def test_bits_are_those_of_the_cpu(staged: Loaded, alone: list[tuple[object, ...]]) -> None:
    runner, facts, fake = staged
    assert outcomes(Driver(runner, facts, seed=1).run(jobs(), chunk=16)) == alone
    preempt = {i: 1 + i % 7 for i in range(0, 17, 2)}
    assert outcomes(Driver(runner, facts, seed=2).run(jobs(), chunk=7, preempt_after=preempt)) == alone
    assert fake.replayed > 0


SCORED = 3 * 4 * 64 * 320  # logits of the longest prompt in a step, and what is made of them


def test_the_memory_of_graphs_is_reserved(staged: Loaded) -> None:
    runner, facts, _ = staged
    step = 1 << 20  # what the fake device reports for each run
    logits, hidden = 4 * 320 * 24, 4 * 64 * 64  # one place for all decode steps, one for all prompts
    assert cuda(runner).activation_bytes(runner.model, facts.layout.specs, 16) == 3 * step + SCORED + logits + hidden


def test_bits_without_graphs_are_the_same(tmp_path: Path, alone: list[tuple[object, ...]]) -> None:
    runner, facts, fake = make(tmp_path, enforce_eager=True)
    assert cuda(runner).activation_bytes(runner.model, facts.layout.specs, 16) == (2 << 20) + SCORED
    assert outcomes(Driver(runner, facts, seed=3).run(jobs())) == alone
    assert fake.captured == fake.replayed == 0


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "qwen3_next", "mixtral"])
def test_the_last_layer_computes_the_tokens_that_are_sampled_from(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that no graph has takes one row of it, not one for each token, with the bits of a step of all tokens."""
    runner, facts, _ = make(tmp_path, tiny_config(family), enforce_eager=True, max_num_batched_tokens=256)
    rows: list[int] = []
    last = runner.model.blocks[-1]
    monkeypatch.setattr(last, "mlp", Counted(last.mlp, rows))
    prompts = [Job(prompt(40 + 7 * i, i), SamplingParams(max_tokens=2, logprobs=1), i) for i in range(3)]
    few = outcomes(Driver(runner, facts).run([job.fresh() for job in prompts]))
    assert max(rows) == 3
    assert outcomes(Driver(runner, facts).run([job.fresh() for job in prompts], chunk=32)) == few
    monkeypatch.setattr(device_slots, "FEWER", 1 << 30)
    assert outcomes(Driver(runner, facts).run([job.fresh() for job in prompts])) == few
    assert max(rows) == sum(len(job.prompt) for job in prompts)


class Counted:
    """A layer that notes its numbers of rows."""

    def __init__(self, layer: Any, rows: list[int]) -> None:
        self._layer, self._rows = layer, rows

    def __call__(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        self._rows.append(len(x))
        return self._layer(x, *rest)


@pytest.mark.slow
def test_batching_changes_no_bit_of_a_float8_cache_of_half_the_memory(
    tmp_path: Path, references: dict[str, str]
) -> None:
    options = {"ops": references, "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 20}
    runner, facts, _ = make(tmp_path, kv_cache_dtype="fp8", **options)
    assert runner.backend.kv[0][0].dtype == torch.float8_e4m3fn
    plain = make(tmp_path, **options)[1]
    assert facts.layout.num_blocks // 2 == plain.layout.num_blocks
    alone = [outcomes([Driver(runner, facts).run([job])[0]])[0] for job in jobs()[:2]]
    assert outcomes(Driver(runner, facts, seed=1).run(jobs()[:2], chunk=7)) == alone


@pytest.mark.slow
def test_a_float8_checkpoint_stays_float8(tmp_path: Path, references: dict[str, str]) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3", hidden_size=96))  # two groups
    quantize(tmp_path, QWEN, "block", "_scale_inv", torch.float32)
    hf = json.loads((tmp_path / "config.json").read_text())
    runner, facts, _ = make(tmp_path, hf, ops=references, dtype="bfloat16", load_format="auto")
    assert facts.facts["quantization"] == "fp8" and facts.facts["exact"] is True
    alone = [outcomes([Driver(runner, facts).run([job])[0]])[0] for job in jobs()[:2]]
    assert outcomes(Driver(runner, facts, seed=1).run(jobs()[:2], chunk=7)) == alone


@pytest.mark.slow
def test_a_float8_checkpoint_can_be_served_in_the_models_dtype(tmp_path: Path, references: dict[str, str]) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3"))
    quantize(tmp_path, QWEN, "block", "_scale_inv", torch.float32)
    hf = json.loads((tmp_path / "config.json").read_text())
    options = {"ops": references, "load_format": "auto", "quantization": "none"}
    runner, facts, _ = make(tmp_path, hf, **options)
    assert facts.facts["quantization"] is None
    cpu, layout = make_runner(tmp_path, hf, **options)
    assert outcomes(Driver(runner, facts).run(jobs()[:2])) == outcomes(Driver(cpu, layout).run(jobs()[:2]))


def test_a_sleeping_runner_gives_the_devices_memory_back(tmp_path: Path, alone: list[tuple[object, ...]]) -> None:
    runner, facts, fake = make(tmp_path)
    given_back, captured = fake.given_back, fake.captured
    runner.call("release", {"tags": ["kv_cache"]})
    assert (fake.given_back, runner.backend.kv, cuda(runner).decode_graphs) == (given_back + 1, [], None)
    runner.call("restore", {"tags": ["kv_cache"]})
    assert fake.captured == 2 * captured
    assert outcomes(Driver(runner, facts).run(jobs()[:2])) == alone[:2]


def test_a_step_begins_before_the_tokens_of_the_last_are_known(staged: Loaded) -> None:
    runner, facts, _ = staged
    requests = [
        Job(prompt(9 + 5 * i, i), SamplingParams(max_tokens=12 + i, temperature=0.8 * (i % 2), **options), i)
        for i, options in enumerate([{"logprobs": 2}, {}, {"repetition_penalty": 1.4}, {"top_k": 7}, {"logprobs": 0}])
    ]
    expected = [job.outcome() for job in Driver(runner, facts).run([job.fresh() for job in requests])]
    driver = LateDriver(runner, facts)
    assert [job.outcome() for job in driver.run(requests)] == expected
    assert not driver.waiting


@pytest.mark.parametrize(("length", "expected"), [(5, 2), (14, 3)])
def test_steps_of_the_same_rows_copy_nothing_but_blocks_and_wait_for_nothing(
    staged: Loaded, length: int, expected: int
) -> None:
    """A copy for the prompts, one for the first step of decode, one for the blocks that come at position 16."""
    runner, facts, fake = staged
    requests = [Job(prompt(length, i), SamplingParams(max_tokens=6, temperature=0.5), i) for i in range(3)]
    driver = LateDriver(runner, facts)
    cuda(runner).record_finished(wait=True)  # of steps before these, if only the start's, no result is outstanding
    steps, copies, waits = driver.steps, fake.copies, fake.waits
    driver.run(requests)
    steps = driver.steps - steps
    assert fake.copies - copies == expected and fake.waits - waits == steps == 6


def test_rows_go_on_by_themselves_until_a_plan_has_others() -> None:
    fake = FakeDevice()
    slots = DeviceSlots(fake, 6, 50, 4, padding_block=999)
    for slot in (2, 4):
        params = SamplingParams(temperature=0.1 * slot)
        slots.assign(NewRow(slot, "", np.arange(50, dtype=np.int32) + 100 * slot, 10, params, slot, ()))
        slots.extend(slot, 0, [10 * slot, 10 * slot + 1])
    rows = slots.decode_rows(4, [], adapters=False)

    def step(*plan: tuple[int, int]) -> list[list[int]]:
        slots.resume(plan_of([(slot, computed, 1, 1) for slot, computed in plan]), rows)
        slots.advance(rows)
        batch, columns = rows.batch, slots.columns()
        assert columns.lengths.tolist() == [computed + 1 for _, computed in plan]
        assert columns.slots is not None and columns.slots.tolist() == [slot for slot, _ in plan]
        assert columns.seeds.tolist() == [slots.seeds[slot] for slot, _ in plan]
        assert batch.positions.tolist() == (batch.seq_lens - 1).tolist()
        return [batch.input_ids.tolist(), batch.seq_lens.tolist(), batch.slot_mapping.tolist()]

    nobody = 999 * 4
    assert step((2, 6), (4, 3)) == [[206, 403, 0, 0], [7, 4, 1, 1], [21 * 4 + 2, 40 * 4 + 3, nobody, nobody]]
    assert fake.copies == 1
    slots.write_sampled(slots.columns(), torch.tensor([77, 88]))
    assert step((2, 7), (4, 4)) == [[77, 88, 0, 0], [8, 5, 1, 1], [21 * 4 + 3, 41 * 4, nobody, nobody]]
    assert fake.copies == 1
    slots.extend(2, 2, [22])
    assert step((2, 8), (4, 5)) == [[208, 405, 0, 0], [9, 6, 1, 1], [22 * 4, 41 * 4 + 1, nobody, nobody]]
    assert fake.copies == 2
    for others in (((4, 6), (2, 9)), ((4, 8), (2, 11)), ((4, 8), (2, 11)), ((4, 9),)):  # order, gap, again, fewer
        copies = fake.copies
        ids = [100 * slot + at for slot, at in others] + [0] * (4 - len(others))
        assert step(*others)[:1] == [ids] and fake.copies == copies + 1
    slots.assign(NewRow(4, "", np.arange(50, dtype=np.int32), 10, SamplingParams(temperature=0.0), 7, ()))
    copies = fake.copies
    assert step((4, 10))[0] == [10, 0, 0, 0] and fake.copies == copies + 1
    assert slots.columns().greedy.tolist() == [True]


SAMPLED: dict[str, dict[str, Any]] = {
    "chat": {"top_k": 20, "top_p": 0.95, "logprobs": 2},
    "min_p": {"min_p": 0.05, "logprobs": 1, "logprobs_mode": "processed"},
    "bias": {"logit_bias": {3: 2.0, 5: -1.0}, "top_p": 0.9},
    "ids": {"bad_token_ids": [1, 2], "logprobs": 3, "logprobs_mode": "temperature"},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [7], "logprobs": 1},
    "named": {"logprob_token_ids": [4, 9], "logprobs": 0, "top_k": 5},
    "extreme": {"temperature": 1e-4, "top_k": 9},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 1},
    "sequences": {"bad_token_sequences": [[1, 2], [4, 5], [3], [2, 9, 7]], "no_repeat_ngram_size": 2},
    "thinking": {
        "thinking_token_budget": 1,
        "thinking_markers": ThinkingMarkers(opens=[3], closes=[4, 5], inside=True),
    },
    "mask": {"return_sampling_mask": True, "top_k": 20, "logprobs": 0},
}


@pytest.mark.parametrize("name", [*SAMPLED, "all together"])
def test_no_sampling_parameter_makes_a_step_wait(staged: Loaded, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, facts, fake = staged
    variants = [SAMPLED[name]] * 2 if name in SAMPLED else list(SAMPLED.values())
    requests = [
        Job(prompt(5, i), SamplingParams(**{"max_tokens": 4, "temperature": 0.7} | options), i)
        for i, options in enumerate(variants)
    ]
    expected = [Driver(runner, facts).run([job.fresh()])[0].outcome() for job in requests]
    driver, sample = LateDriver(runner, facts), runner.sample
    cuda(runner).record_finished(wait=True)

    def without_reads(*arguments: Any) -> PendingResult:
        with pytest.MonkeyPatch.context() as patch:
            for read in ("item", "tolist", "cpu", "__bool__", "nonzero"):
                patch.setattr(torch.Tensor, read, refuse)
            return sample(*arguments)

    monkeypatch.setattr(runner, "sample", without_reads)
    steps, waits = driver.steps, fake.waits
    assert [job.outcome() for job in driver.run(requests)] == expected
    assert fake.waits - waits == driver.steps - steps


def test_few_ids_are_drawn_by_one_op_with_the_bits_of_its_parts(
    staged: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, facts, _ = staged
    variants: list[dict[str, Any]] = [SAMPLED["chat"], {"temperature": 0.0, "logprobs": 2}, {"top_k": 3, "logprobs": 2}]
    requests = [
        Job(prompt(5, i), SamplingParams(**{"max_tokens": 4, "temperature": 0.7} | options), i)
        for i, options in enumerate(variants)
    ]
    expected = [job.outcome() for job in Driver(runner, facts).run([job.fresh() for job in requests])]
    calls = []

    def sample_few(logits: Any, seeds: Any, positions: Any, greedy: Any, temperature: Any, *rest: Any) -> Any:
        calls.append(len(logits))
        *limits, scaled, k = rest
        cut = ops.filter_logits(logits / temperature[:, None], *limits, True)
        ids = ops.sample(cut, seeds, positions, greedy)
        divisor = temperature if scaled else None
        return ids, logits.amax(1).isfinite(), *ops.logprobs(logits, ids, k, None, divisor)

    monkeypatch.setattr(ops, "is_sampling_of_few_fused", lambda: True)
    monkeypatch.setattr(ops, "sample_few", sample_few)
    assert [job.outcome() for job in Driver(runner, facts).run(requests)] == expected
    assert 3 in calls
    calls.clear()
    Driver(runner, facts).run([Job(prompt(5, 1), SamplingParams(max_tokens=2, top_p=0.9), 0)])
    assert not calls  # a top-p alone may leave many


def refuse(*_: object) -> object:
    raise AssertionError("a step reads a tensor on the host")


def test_a_reused_slot_does_not_take_the_last_requests_tokens(staged: Loaded) -> None:
    runner, _, _ = staged
    params = SamplingParams(temperature=0.0, max_tokens=4)
    first = NewRow(3, "a", np.arange(5, dtype=np.int32), 5, params, 0, ())
    second = NewRow(3, "b", np.arange(9, dtype=np.int32) + 50, 9, params, 0, ())
    step = runner.forward(plan_of([(3, 0, 5, 1)], new=[first], blocks=[(3, 0, [1])]))
    runner.sample(step, None)
    runner.execute(plan_of([(3, 0, 9, 1)], 1, new=[second], blocks=[(3, 0, [2])], freed=[3]))
    for number in range(2, 5):
        runner.execute(plan_of([], number, freed=[3] if number == 2 else []))
    cuda(runner).record_finished(wait=True)
    assert runner.backend.slots.tokens[3, :9].tolist() == list(range(50, 59))


def test_batches_are_those_of_the_hosts_tables() -> None:
    host, fake = HostSlots(6, 50, 4), FakeDevice()
    staged = DeviceSlots(fake, 6, 50, 4, padding_block=999)
    for slots in (host, staged):
        for slot in range(6):
            tokens = np.arange(50, dtype=np.int32) + 100 * slot
            slots.assign(NewRow(slot, "", tokens, 10, SamplingParams(temperature=0.1 * slot), slot, ()))
            slots.extend(slot, 0, [1000 * slot + 7 * i for i in range(5)])
            slots.extend(slot, 5, [1000 * slot + 7 * i for i in range(5, 13)])
    for steps in ([(1, 3, 6), (0, 8, 1), (5, 0, 17)], [(4, 0, 50)], [(2, 49, 1), (3, 0, 1)]):
        plan = plan_of([(*row, 1) for row in steps])
        one, other = host.build(plan, []), staged.build(plan, [])
        for name in ("input_ids", "positions", "query_start", "seq_lens", "block_tables", "slot_mapping"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        rows = logit_lengths(plan)
        for name in ("seeds", "lengths", "greedy", "temperature"):
            assert torch.equal(getattr(host.columns(*rows), name), getattr(staged.columns(), name))


def test_a_batch_is_padded_with_a_row_of_the_padding_block() -> None:
    staged = DeviceSlots(FakeDevice(), 6, 50, 4, padding_block=999)
    staged.assign(NewRow(2, "", np.arange(50, dtype=np.int32), 10, SamplingParams(), 0, ()))
    staged.extend(2, 0, [5, 6])
    into = staged.empty_batch(4, [])
    batch = staged.build(plan_of([(2, 7, 1, 1)]), [], into)
    assert batch is into and batch.query_start.tolist() == [0, 1, 2, 3, 4]
    assert batch.input_ids.tolist() == [7, 0, 0, 0] and batch.seq_lens.tolist() == [8, 1, 1, 1]
    assert batch.slot_mapping.tolist() == [6 * 4 + 3, 999 * 4, 999 * 4, 999 * 4]
    assert batch.block_tables[:, :2].tolist() == [[5, 6], [999, 999], [999, 999], [999, 999]]
    assert staged._columns is not None
    staged.write_sampled(staged._columns, torch.tensor([77]))
    batch = staged.build(plan_of([(2, 8, 1, 1)]), [], into)
    assert batch.input_ids.tolist() == [77, 0, 0, 0]


def test_a_prompt_is_padded_with_tokens_of_the_padding_block() -> None:
    staged = DeviceSlots(FakeDevice(), 6, 50, 4, padding_block=999)
    for slot, tokens in ((2, 10), (4, 20)):
        staged.assign(NewRow(slot, "", np.arange(50, dtype=np.int32) + slot, tokens, SamplingParams(), 0, ()))
        staged.extend(slot, 0, [slot * 10, slot * 10 + 1])
    into = staged.empty_batch(5, [], tokens=12)
    assert into.query_start.tolist() == [0, 1, 2, 3, 4, 12] and into.seq_lens.tolist() == [1, 1, 1, 1, 8]

    def build(*rows: tuple[int, int, int]) -> None:
        assert staged.build(plan_of([(*row, int(row[2] > 1)) for row in rows]), [], into) is into

    build((4, 3, 4), (2, 6, 1))
    assert into.query_start.tolist() == [0, 4, 5, 5, 5, 12] and into.seq_lens.tolist() == [7, 7, 0, 0, 7]
    assert into.input_ids.tolist() == [7, 8, 9, 10, 8] + [0] * 7
    assert into.positions.tolist() == [3, 4, 5, 6, 6, *range(7)]
    assert into.slot_mapping.tolist() == [163, 164, 165, 166, 86] + [999 * 4 + i % 4 for i in range(7)]
    assert into.block_tables[:, :2].tolist() == [[40, 41], [20, 21], [999, 999], [999, 999], [999, 999]]
    build((2, 0, 8), (4, 7, 1), (2, 0, 1), (2, 0, 1), (2, 0, 1))  # nothing is missing
    assert into.query_start.tolist() == [0, 8, 9, 10, 11, 12] and into.seq_lens.tolist() == [8, 8, 1, 1, 1]


def test_a_step_with_few_tokens_in_a_prompt_is_repeated(staged: Loaded) -> None:
    runner, facts, fake = staged
    for length, repeated in ((2, 1), (64, 1), (65, 0)):  # the last is above what was recorded
        before = fake.replayed
        Driver(runner, facts).run([Job(prompt(length, 1), SamplingParams(max_tokens=1, prompt_logprobs=0))])
        assert fake.replayed - before == repeated


def test_longer_prompts_of_a_small_model_are_repeated_too(tmp_path: Path) -> None:
    options = {"max_model_len": 800, "max_num_batched_tokens": 800, "max_num_seqs": 2}
    runner, facts, fake = make(tmp_path / "device", **options)
    host, host_facts = make_runner(tmp_path / "host", tiny_config("qwen3"), **options)
    for length, repeated in ((513, 1), (768, 1), (769, 0)):
        job, before = Job(prompt(length, 1), SamplingParams(max_tokens=1, prompt_logprobs=0)), fake.replayed
        expected = outcomes(Driver(host, host_facts).run([job.fresh()]))
        assert outcomes(Driver(runner, facts).run([job])) == expected
        assert fake.replayed - before == repeated


@pytest.mark.parametrize("most", [1, 2, 15, 31, 200, 600])
def test_steps_with_few_tokens_fit_their_graph(most: int) -> None:
    sizes = prompt_sizes(512, 1e6)
    assert sizes[0] == 16 and sizes[-1] == 512
    assert prompt_sizes(100, 1e6) == [16, 32, 64] and prompt_sizes(15, 1e6) == []
    largest = [prompt_sizes(8192, weights)[-1] for weights in (0, 15.7e6, 50e6, 100e6, 193e6)]  # 0.6B, 1.7B, 4B, 8B
    assert largest == [2048, 2048, 1536, 768, 512]
    for tokens in range(2, 513):
        size = next(size for size in sizes if size >= tokens)
        rows = prompt_rows(size, most)
        needed = min(tokens - 1, most) + (size > tokens)
        assert needed <= rows < size


@pytest.mark.parametrize("most", [1, 2, 3, 8, 24, 100, 256, 300, 4096])
def test_the_largest_bucket_is_the_maximum(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
    assert all(size <= most for size in sizes)
    assert all(b <= max(2 * a, a + 32) for a, b in pairwise(sizes))


def test_arrays_of_all_kinds_share_one_copy() -> None:
    fake = FakeDevice()
    arrays = [
        np.arange(5, dtype=np.int32),
        np.zeros((0, 4), np.int32),
        np.array([True, False, True]),
        np.arange(7, dtype=np.int64)[::2],
        np.array([[1.5, -2.5]], np.float32),
        np.zeros(0, np.int64),
    ]
    assert same_bytes(arrays, fake.put(arrays)) and fake.copies == 1
    assert same_bytes([], fake.put([]))
