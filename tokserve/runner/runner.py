"""One device at work: loads the model, keeps its tables, and turns each `StepPlan` into a `StepResult`.

Runs what it is told and decides nothing: who runs, who is preempted and when a request ends are the
engine's.  Knows no text, no messages and no HTTP.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokserve import checkpoint, device, ops
from tokserve.config import CacheConfig, ModelConfig, RuntimeConfig, SchedulerConfig
from tokserve.errors import NotFound
from tokserve.models import load
from tokserve.params import SamplingParams
from tokserve.plan import DeviceFacts, LogprobRows, NewRow, StepPlan, StepResult
from tokserve.runner import kvcache
from tokserve.runner.logits import Rows
from tokserve.runner.sampler import Drawn, Sampler, join
from tokserve.runner.slots import Slots

PROMPT_LOGITS_BYTES = 32 << 20  # logits of prompt tokens are made in chunks of about this size


class Runner:
    """Call `load` once, then `execute` for every plan, in order, from one thread."""

    def __init__(
        self, model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, runtime: RuntimeConfig
    ) -> None:
        self._config = model
        self._cache_config = cache
        self._scheduler_config = scheduler
        self._runtime_config = runtime
        self._weight_version = "0"
        self._no_autograd = torch.inference_mode()

    def load(self) -> DeviceFacts:
        """Bind ops, load the weights, reserve the KV cache and run once.  Raises StartError."""
        config, runtime = self._config, self._runtime_config
        began = time.perf_counter()
        threads = device.set_threads(runtime.cpu_threads)
        bound = ops.bind(runtime.device, runtime.ops, threads)
        if "torch" not in bound.values():
            device.set_threads(1)  # the compiled ops have their own threads; torch's would fight them for the cores
        directory = checkpoint.locate(config.model, weights=config.load_format != "dummy")
        hf = checkpoint.hf_config(directory) | (config.hf_overrides or {})
        self._model = load.load(
            directory, hf, dtype=config.dtype, head_dtype=config.head_dtype,
            load_format=config.load_format, seed=config.seed, max_model_len=config.max_model_len,
            quantization=config.quantization, quantize_lm_head=config.quantize_lm_head,
        )  # fmt: skip
        loaded = time.perf_counter()
        self._allocate()
        with self._no_autograd:
            self._warm_up()
        device.give_back_memory()  # loading and warming up leave holes
        facts = {
            "ops": bound,
            "threads": threads,
            "dtype": config.dtype,
            "quantization": config.quantization,
            "load_seconds": round(loaded - began, 3),
            "warm_up_seconds": round(time.perf_counter() - loaded, 3),
            **self._memory(),
        }
        return DeviceFacts(self._layout, self._vocab_size, self._weight_version, facts)

    def _allocate(self) -> None:
        max_num_seqs, max_model_len = self._scheduler_config.max_num_seqs, self._config.max_model_len
        assert max_model_len is not None, "the configuration is not resolved"
        self._layout = kvcache.layout(
            self._model.kv_specs(), self._cache_config,
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, free_bytes=device.free_memory(),
        )  # fmt: skip
        self._vocab_size = self._model.spec.vocab
        self._kv = kvcache.allocate(self._layout)
        self._slots = Slots(max_num_seqs, max_model_len, self._layout.block_size)
        self._sampler = Sampler(self._slots, self._vocab_size, self._config.logprobs_mode)
        self._chunk = max(16, min(256, PROMPT_LOGITS_BYTES // (4 * self._vocab_size)))

    def _warm_up(self) -> None:
        """A prompt and a token through every path, so that the first request is not slower than others."""
        layout = self._layout
        length = max(1, min(layout.block_size + 1, len(self._slots.tokens[0]) - 2))
        params = SamplingParams(
            temperature=0.5, top_p=0.9, top_k=5, min_p=0.01, repetition_penalty=1.1, logprobs=1, prompt_logprobs=1
        )
        row = NewRow(0, "warm-up", np.zeros(length, np.int32), length, params, 0, ())
        blocks = list(range(-(-(length + 1) // layout.block_size)))[: layout.num_blocks]
        column = np.ones(1, np.int32)
        sample = np.ones(1, np.bool_)
        self._step(StepPlan(0, 0 * column, length * column, 0 * column, sample, [row], [(0, 0, blocks)]))
        if length + 1 < len(self._slots.tokens[0]):
            self._step(StepPlan(0, 0 * column, column, length * column, sample))
        self._sampler.leave(row.slot)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        with self._no_autograd:
            return self._step(plan)

    def _step(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._update(plan)
        if len(plan.slots) == 0:
            return StepResult(plan.step, np.zeros(0, np.int32), np.zeros(0, np.bool_))
        hidden = self._model.forward(self._slots.build(plan, self._kv))  # [T, H]
        prompt_logprobs = self._score(plan, hidden) if self._sampler.scoring else {}
        drawn = self._draw(plan, hidden)
        seconds = time.perf_counter() - began
        return StepResult(plan.step, drawn.token_ids, drawn.finite, drawn.logprobs, prompt_logprobs, seconds)

    def _update(self, plan: StepPlan) -> None:
        """Bring the tables up to date.  What a request leaves in its slot, the next one overwrites."""
        for slot in plan.done:
            self._sampler.leave(slot)
        for row in plan.new:
            self._slots.enter(row)
            self._sampler.enter(row)
        for slot, first, blocks in plan.blocks:
            self._slots.extend(slot, first, blocks)

    def _draw(self, plan: StepPlan, hidden: Tensor) -> Drawn:
        """Tokens for the rows that end their request's known tokens; they go into the slots' tables too."""
        slots, lengths = plan.slots, np.add(plan.num_computed, plan.num_tokens, dtype=np.int64)
        count = np.count_nonzero(plan.samples)
        if count == 0:
            return Drawn(np.zeros(0, np.int32), np.zeros(0, np.bool_), None)
        if count < len(slots):
            slots, lengths = slots[plan.samples], lengths[plan.samples]
        if count < hidden.shape[0]:
            last = np.cumsum(plan.num_tokens)[plan.samples] - 1
            hidden = hidden.index_select(0, torch.from_numpy(last))
        rows = Rows(slots, lengths, self._slots.prompt_lens[slots])
        drawn = self._sampler.draw(self._model.logits(hidden), rows)
        self._slots.tokens[slots, lengths] = drawn.token_ids
        return drawn

    def _score(self, plan: StepPlan, hidden: Tensor) -> dict[int, LogprobRows]:
        """Plan row -> logprobs of the prompt tokens that its positions predict, as far as they are asked for."""
        found = {}
        ends = np.cumsum(plan.num_tokens)
        for row in self._sampler.scored_rows(plan.slots).tolist():
            slot, start, count = int(plan.slots[row]), int(plan.num_computed[row]), int(plan.num_tokens[row])
            first, last = self._sampler.scored_range(slot, start, start + count)
            if first >= last:
                continue
            shift = int(ends[row]) - count - start - 1  # prompt token j is predicted by hidden row j + shift
            parts = []
            for j in range(first, last, self._chunk):
                logits = self._model.logits(hidden[j + shift : min(j + self._chunk, last) + shift])
                parts.append(self._sampler.score(logits, slot, j))
            found[row] = join(parts)
        return found

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """An admin question by name."""
        if method == "weight_version":
            return self._weight_version
        if method == "memory":
            return self._memory()
        raise NotFound(f"the runner has no method {method!r}")

    def _memory(self) -> dict[str, int]:
        """Bytes by use."""
        kept = self._model.parameters_by_name().values()
        weights = sum(math.prod(parameter.shape) * parameter.dtype.itemsize for parameter in kept)
        return {"weight_bytes": weights, "kv_bytes": self._layout.bytes()}
