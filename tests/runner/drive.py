"""A miniature engine for the runner's tests: makes step plans by hand and keeps what comes back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from torch import Tensor

from tests.runner.fake_device import FakeDevice
from tests.tiny_models import tiny_config
from tokserve.config import Config
from tokserve.features.masks.columns import NAME as MASKS
from tokserve.features.masks.columns import Masks
from tokserve.protocol.column_table import asked_columns
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS, ColumnRows
from tokserve.protocol.logprobs import Logprobs
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import (
    OK,
    DeviceFacts,
    NewRow,
    StepPlan,
    StepResult,
)
from tokserve.protocol.prompt import Feature
from tokserve.runner import device
from tokserve.runner.device import Accelerator
from tokserve.runner.runner import Runner
from tokserve.runner.startup import load_runner

F = TypeVar("F")
Row = tuple[float, int, list[int], list[float]]  # logprob, rank, top ids, top logprobs
Mask = tuple[int, list[int], float, float]  # count, ids, logprob, kept logprob


def make_runner(
    directory: Path, hf: dict[str, Any], target: Accelerator | None = None, **options: Any
) -> tuple[Runner, DeviceFacts]:
    """A loaded runner with dummy weights for config.json `hf`, on `target` or this process's device."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    defaults = {
        "model": str(directory),
        "load_format": "dummy",
        "max_model_len": 128,
        "max_num_seqs": 24,
        "device": "cpu",
        "block_size": 16,
        "cpu_threads": 1,
        "dtype": "float32",
        "max_logprobs": -1,
    }
    return load_runner(Config.make(**(defaults | options)), target=target)


def feature(runner: Runner, kind: type[F]) -> F:
    """A runner's feature of this class."""
    (one,) = (feature for feature in runner.hooks.features if isinstance(feature, kind))
    return one


def on_either_device(kind: str, directory: Path, **options: Any) -> tuple[Runner, DeviceFacts]:
    """A loaded tiny qwen3 in bfloat16 on the "host", or on a fake of a device with memory of its own ("cuda")."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "cuda":
            patch.setattr(device, "use", lambda name: FakeDevice())
        return make_runner(directory, tiny_config("qwen3"), dtype="bfloat16", **options)


def update(runner: Runner, way: Callable[[Runner, dict[str, Tensor]], None], tensors: dict[str, Tensor]) -> None:
    """Send new weights by `way`; they serve after a commit."""
    runner.background("begin_update", {"have_weights": True})
    way(runner, tensors)
    runner.background("finish_update", {})


def plan_of(
    rows: list[tuple[int, int, int, int]], step: int = 0, drafts: list[list[int]] | None = None, **more: Any
) -> StepPlan:
    """A plan of rows (slot, num_computed, num_tokens, num_logits), each with its drafts."""
    slots, computed, counts, num_logits = (np.array([row[i] for row in rows], np.int32) for i in range(4))
    drafts = drafts or [[] for _ in rows]
    num_drafts = np.array([len(ids) for ids in drafts], np.int32)
    flat = np.array([token for ids in drafts for token in ids], np.int32)
    return StepPlan(step, slots, counts, computed, num_drafts, num_logits, flat, **more)


@dataclass
class Job:
    """A request, and what came of it."""

    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    adapter: int = -1
    features: tuple[Feature, ...] = ()
    output: list[int] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)  # whether there was a token to sample
    status: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    prompt_rows: dict[int, Row] = field(default_factory=dict)  # by index of the token
    masks: list[Mask] = field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    def fresh(self) -> Job:
        """The same request, not run."""
        return Job(self.prompt, self.params, self.seed, self.stop_ids, self.adapter, self.features)

    def finished(self) -> bool:
        return len(self.output) >= (self.params.max_tokens or 1)

    def outcome(self) -> tuple[Any, ...]:
        return self.output, self.finite, self.rows, self.prompt_rows, self.masks


Drafter = Callable[[Job], list[int]]  # drafts of the tokens after a job's output


class Driver:
    """Runs jobs to their ends; `rng` shuffles slots, blocks and the order of rows."""

    def __init__(
        self,
        runner: Runner,
        facts: DeviceFacts,
        max_num_seqs: int = 24,
        seed: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.accepted = 0  # drafts
        self.rejected = 0
        self.block_size = facts.layout.block_size
        self.joins_images = facts.images is not None and facts.images.bidirectional
        self.rng = None if seed is None else random.Random(seed)
        self.blocks = list(range(facts.layout.num_blocks))
        self.slots = list(range(max_num_seqs))
        if self.rng:
            self.rng.shuffle(self.blocks)
            self.rng.shuffle(self.slots)
        self.done: list[int] = []
        self.steps = 0

    def run(self, jobs: list[Job], *, chunk: int = 1 << 30, preempt_after: dict[int, int] | None = None) -> list[Job]:
        """All jobs to their ends, `chunk` tokens of each at most in a step.  `preempt_after`: job number ->
        outputs after which it loses its slot and blocks once.
        """
        preempt = dict(preempt_after or {})
        while active := [job for job in jobs if not job.finished()]:
            if self.rng:
                self.rng.shuffle(active)
            self._step(active, chunk)
            for number, job in enumerate(jobs):
                if job.finished() or len(job.output) == preempt.get(number):
                    preempt.pop(number, None)
                    self._release(job)
        return jobs

    def _release(self, job: Job) -> None:
        if job.slot is not None:
            self.done.append(job.slot)
            self.slots.insert(0, job.slot)
            self.blocks = job.blocks + self.blocks  # used again as soon as possible
        job.slot, job.blocks, job.computed = None, [], 0

    def _step(self, active: list[Job], chunk: int) -> None:
        new: list[NewRow] = []
        blocks: list[tuple[int, int, list[int]]] = []
        rows, drafts = [], []
        for job in active:
            tokens = job.prompt + job.output
            if job.slot is None:
                job.slot = self.slots.pop(0)
                array = np.array(tokens, np.int32)
                new.append(
                    NewRow(
                        job.slot,
                        "",
                        array,
                        len(job.prompt),
                        job.params,
                        job.seed,
                        job.stop_ids,
                        job.adapter,
                        job.features,
                        columns=tuple(asked_columns(job.params)),
                    )
                )
            count = min(chunk, len(tokens) - job.computed)
            if self.joins_images:  # no step ends in an image
                end = job.computed + count
                inside = [f for f in job.features if f.start < end < f.start + f.length]
                count += inside[0].start + inside[0].length - end if inside else 0
            ends = job.computed + count == len(tokens)
            room = (job.params.max_tokens or 1) - len(job.output) - 1
            drafts.append(self.drafter(job)[:room] if self.drafter and ends else [])
            count += len(drafts[-1])
            missing = -(-(job.computed + count) // self.block_size) - len(job.blocks)
            if missing > 0:
                taken, self.blocks = self.blocks[:missing], self.blocks[missing:]
                assert len(taken) == missing, "the test needs more blocks"
                blocks.append((job.slot, len(job.blocks), taken))
                job.blocks += taken
            rows.append((job.slot, job.computed, count, len(drafts[-1]) + 1 if ends else 0))
        plan = plan_of(rows, self.steps, drafts, new=new, blocks=blocks, freed=self.done)
        self.steps += 1
        self.done = []
        self._collect(active, plan)

    def _collect(self, active: list[Job], plan: StepPlan) -> None:
        self._take(active, plan, self.runner.execute(plan))

    def _take(self, active: list[Job], plan: StepPlan, result: StepResult) -> None:
        assert result.step == plan.step
        for i, records in result.values.get(PROMPT_LOGPROBS, {}).items():
            job, rows = active[i], Logprobs(records)
            first = max(job.params.prompt_logprobs_start, 1, int(plan.num_computed[i]) + 1)
            width = rows.top_ids.shape[1]
            actual = {first + n: row(rows, n, width) for n in range(len(rows.ranks))}
            for index, known in job.prompt_rows.items():
                assert actual.get(index, known) == known, "a prompt token scored again after preemption"
            job.prompt_rows |= actual
        at = 0
        assert len(result.token_ids) == result.counts.sum()
        for i, (job, count) in enumerate(zip(active, result.counts.tolist(), strict=True)):
            if plan.num_logits[i] == 0:
                job.computed += int(plan.num_tokens[i])
            elif result.status[i] != OK:
                assert count == 0
                job.output.append(0)
                job.status.append(int(result.status[i]))
                job.finite.append(False)
                job.computed += int(plan.num_tokens[i] - plan.num_drafts[i])
            else:
                assert count >= 1
                self._extend(job, result, slice(at, at + count))
                job.computed += int(plan.num_tokens[i] - plan.num_logits[i]) + count
                self.accepted += count - 1
                self.rejected += int(plan.num_logits[i]) - count
            at += count

    @staticmethod
    def _extend(job: Job, result: StepResult, new: slice) -> None:
        job.output += result.token_ids[new].tolist()
        job.status += [OK] * (new.stop - new.start)
        job.finite += [True] * (new.stop - new.start)
        if job.params.logprobs is not None or job.params.logprob_token_ids:
            logprobs = logprobs_of(result.columns)
            assert logprobs is not None
            width = (job.params.logprobs or 0) + len(job.params.logprob_token_ids or [])
            job.rows += [row(logprobs, n, width) for n in range(new.start, new.stop)]
        if job.params.return_sampling_mask:
            job.masks += masks_of(result.columns[MASKS])[new]


def logprobs_of(columns: Mapping[str, ColumnRows]) -> Logprobs | None:
    """The logprobs of a step's tokens; None if no row asked for any."""
    return Logprobs(columns[LOGPROBS].records) if LOGPROBS in columns else None


def row(rows: Logprobs, n: int, width: int) -> Row:
    """Row n as plain values."""
    return (
        float(rows.token_logprobs[n]),
        int(rows.ranks[n]),
        rows.top_ids[n, :width].tolist(),
        rows.top_logprobs[n, :width].tolist(),
    )


def masks_of(rows: ColumnRows) -> list[Mask]:
    """The rows as plain values."""
    masks = Masks(rows)
    assert len(masks.ids) == np.maximum(masks.counts, 0).sum()
    columns = (masks.counts.tolist(), masks.each(), masks.logprobs.tolist(), masks.kept_logprobs.tolist())
    return [
        (count, [] if ids is None else ids.tolist(), logprob, kept)
        for count, ids, logprob, kept in zip(*columns, strict=True)
    ]
