"""A miniature engine for the runner's tests: makes step plans by hand and keeps what comes back."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokserve.config import Config
from tokserve.params import SamplingParams
from tokserve.plan import DeviceFacts, LogprobRows, NewRow, StepPlan
from tokserve.runner.runner import Runner

Row = tuple[float, int, list[int], list[float]]  # logprob, rank, top ids, top logprobs


def make_runner(directory: Path, hf: dict[str, Any], **options: Any) -> tuple[Runner, DeviceFacts]:
    """A loaded runner with dummy weights for config.json `hf`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    defaults = {
        "model": str(directory), "load_format": "dummy", "max_model_len": 128, "max_num_seqs": 24, "device": "cpu",
        "block_size": 16, "cpu_threads": 1, "dtype": "float32", "max_logprobs": -1,
    }  # fmt: skip
    config = Config.make(**(defaults | options))
    runner = Runner(config.model, config.cache, config.scheduler, config.runtime, config.weights, config.lora)
    return runner, runner.load()


@dataclass
class Job:
    """A request, and what came of it."""

    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    adapter: int = -1
    output: list[int] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    prompt_rows: dict[int, Row] = field(default_factory=dict)  # by index of the token
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    def fresh(self) -> Job:
        """The same request, not run."""
        return Job(self.prompt, self.params, self.seed, self.stop_ids, self.adapter)

    def finished(self) -> bool:
        return len(self.output) >= (self.params.max_tokens or 1)

    def came_of_it(self) -> tuple[Any, ...]:
        return self.output, self.finite, self.rows, self.prompt_rows


class Driver:
    """Runs jobs to their ends; `rng` shuffles slots, blocks and the order of rows."""

    def __init__(self, runner: Runner, facts: DeviceFacts, max_num_seqs: int = 24, seed: int | None = None) -> None:
        self.runner = runner
        self.block_size = facts.layout.block_size
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
        counts, computed, samples = [], [], []
        for job in active:
            tokens = job.prompt + job.output
            if job.slot is None:
                job.slot = self.slots.pop(0)
                array = np.array(tokens, np.int32)
                new.append(
                    NewRow(job.slot, "", array, len(job.prompt), job.params, job.seed, job.stop_ids, job.adapter)
                )
            count = min(chunk, len(tokens) - job.computed)
            missing = -(-(job.computed + count) // self.block_size) - len(job.blocks)
            if missing > 0:
                taken, self.blocks = self.blocks[:missing], self.blocks[missing:]
                assert len(taken) == missing, "the test needs more blocks"
                blocks.append((job.slot, len(job.blocks), taken))
                job.blocks += taken
            counts.append(count)
            computed.append(job.computed)
            samples.append(job.computed + count == len(tokens))
        plan = StepPlan(
            self.steps, np.array([job.slot for job in active], np.int32), np.array(counts, np.int32),
            np.array(computed, np.int32), np.array(samples), new, blocks, self.done,
        )  # fmt: skip
        self.steps += 1
        self.done = []
        self._collect(active, plan)

    def _collect(self, active: list[Job], plan: StepPlan) -> None:
        result = self.runner.execute(plan)
        assert result.step == plan.step
        for i, rows in result.prompt_logprobs.items():
            job = active[i]
            first = max(job.params.prompt_logprobs_start, 1, int(plan.num_computed[i]) + 1)
            width = rows.top_ids.shape[1]
            found = {first + n: row(rows, n, width) for n in range(len(rows.ranks))}
            for index, known in job.prompt_rows.items():
                assert found.get(index, known) == known, "a prompt token scored again after preemption"
            job.prompt_rows |= found
        for job, count in zip(active, plan.num_tokens.tolist(), strict=True):
            job.computed += count
        for n, i in enumerate(np.flatnonzero(plan.samples).tolist()):
            job = active[i]
            job.output.append(int(result.token_ids[n]))
            job.finite.append(bool(result.finite[n]))
            if job.params.logprobs is not None or job.params.logprob_token_ids:
                assert result.logprobs is not None
                width = (job.params.logprobs or 0) + len(job.params.logprob_token_ids or [])
                job.rows.append(row(result.logprobs, n, width))


def row(rows: LogprobRows, n: int, width: int) -> Row:
    """Row n as plain values."""
    return (
        float(rows.token_logprobs[n]), int(rows.ranks[n]),
        rows.top_ids[n, :width].tolist(), rows.top_logprobs[n, :width].tolist(),
    )  # fmt: skip
