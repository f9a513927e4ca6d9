"""The backend of a device with memory of its own: a step may begin before the host knows the tokens of the last one."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Collection
from functools import partial
from subprocess import SubprocessError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokserve import ops
from tokserve.base import cgroups
from tokserve.base.errors import StartError
from tokserve.config import DEFAULT_BLOCK_SIZE, Config
from tokserve.gpu import candidates, compile_ahead, trial
from tokserve.gpu.cuda_graphs import (
    FIRST,
    CudaGraphs,
    DecodeGraphs,
    PromptGraphs,
    decode_sizes,
    layer_weights,
    prompt_rows,
    prompt_sizes,
)
from tokserve.gpu.device_slots import DeviceSlots
from tokserve.gpu.options import GpuOptions
from tokserve.layers.batch import ForwardBatch, Pages, StateRows
from tokserve.models.decoder import Decoder
from tokserve.protocol.kv_spec import KVLayout, LayerSpec, StateLayout, StateSpec
from tokserve.protocol.plan import Int32, StepPlan
from tokserve.runner import exactness, kvcache
from tokserve.runner.backend import WARM_UPS, Draft, FeatureRows, HiddenStates, decode_step
from tokserve.runner.device import Accelerator
from tokserve.runner.logits import LogitRows
from tokserve.runner.ranks import ONE, Ranks
from tokserve.runner.steps import PendingResult
from tokserve.runner.tables.routed import RoutedTable
from tokserve.runner.tables.slots import Int64, SamplingColumns
from tokserve.runner.tables.states import StateTable

logger = logging.getLogger(__name__)


MAX_COMPILERS = 16  # threads that compile kernels at the start
MOST_IMAGE_TOKENS = 16384  # of one image, for which there is memory: the processors' default limit
SCORING_COPIES = 3  # of logits of prompt tokens: the model's, divided, and without what is forbidden


class CudaBackend:
    """Backend protocol, see `backend`.  The KV cache has one page more, for padding."""

    warm_ups = WARM_UPS
    prompt_logits_bytes = 256 << 20  # less, and the head's weights are read too often
    routed: RoutedTable | None = None

    def __init__(
        self,
        device: Accelerator,
        specs: tuple[LayerSpec, ...],
        config: Config,
        max_model_len: int,
        model: Decoder,
        draft: Draft | None = None,
        ranks: Ranks = ONE,
    ) -> None:
        self.device: Accelerator = device
        self.draft = draft
        candidates.use(candidates.selected(config.options_of(GpuOptions).gpu_candidates, gpu_name()))
        self._max_rows = config.scheduler.rows
        self._max_model_len = max_model_len
        self._budget = config.scheduler.token_budget
        self._max_tokens = min(self._budget, max_model_len)  # of one prompt in a step
        self._is_alone, self._agree = ranks.size == 1, ranks.minimum
        has_states = any(isinstance(spec, StateSpec) for spec in specs)
        if draft is not None and has_states and not draft.ahead:
            raise StartError(
                "speculative_config: a draft model is not supported with recurrent states, in either model"
            )
        # prompts that are read both ways do not come again
        self._eager = config.runtime.enforce_eager or not ranks.can_be_recorded or model.reads_both_ways
        sizes = prompt_sizes(self._max_tokens, layer_weights(model))
        self._prompt_sizes = sizes[: ranks.minimum(len(sizes))]  # stages pad their steps alike
        self._exact, self._most_drafts = config.runtime.exact, config.speculation.resolved().num_drafts
        self._adapters = config.lora.enable_lora
        block_size = config.cache.block_size or DEFAULT_BLOCK_SIZE
        self._compile_ahead(model, specs, block_size)
        activations = self.activation_bytes(model, specs, block_size)
        if model.tower is not None:
            activations += model.tower.activation_bytes(min(max_model_len, MOST_IMAGE_TOKENS))
        if draft is not None:
            activations += self._draft_bytes(draft, specs[draft.first_layer :], block_size)
        self.layout = kvcache.layout(
            specs,
            config.cache,
            max_num_seqs=self._max_rows,
            max_model_len=max_model_len,
            free_bytes=max(0, device.free_memory() - activations),
            bounded=False,
            most_drafts=self._most_drafts,
            agree=ranks.minimum,
        )
        self.slots = DeviceSlots(
            device, self._max_rows, max_model_len, self.layout.block_size, padding_block=self.layout.num_blocks
        )
        self.kv: Pages = []
        self.states: StateTable | None = None
        if self.layout.states is not None:
            self.states = self.slots.states = StateTable(self.layout, self.layout.states, self.kv)
        self.allocate_kv()
        self.decode_graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self._draft_graphs: DecodeGraphs | None = None
        self._first_sizes: Collection[int] | None = FIRST  # that the next capture takes at once; None: all
        self._max_in_flight = config.scheduler.steps_in_flight - 1
        self._in_flight: deque[tuple[PendingResult, Int64]] = deque()  # with the generations of their rows' slots

    def _compile_ahead(self, model: Decoder, specs: tuple[LayerSpec, ...], block_size: int) -> None:
        """Compile most kernels in parallel, before anything runs."""
        compiling = ops.compile_ahead(min(MAX_COMPILERS, cgroups.usable_cpus()))
        if compiling is None:
            return
        began = time.perf_counter()
        kv, width = self._pages_of_one_block(specs, block_size), -(-self._max_model_len // block_size)
        batches = [
            _batch_in_one_page(tokens, rows, width, kv)
            for rows in compile_ahead.row_counts(self._max_rows)
            for tokens in (rows, rows + 1)
        ]
        if model.spec.has_experts:
            counts = compile_ahead.token_counts(self._budget)
            batches += [_batch_in_one_page(tokens, -(-tokens // self._max_tokens), width, kv) for tokens in counts]
        failures: tuple[type[Exception], ...] = (RuntimeError, OSError, SubprocessError, *kernel_errors())
        try:
            with torch.inference_mode(), compiling:
                compile_ahead.launch_all(model, kv, batches)
        except failures as error:
            trial.use_none(error)
            logger.warning("kernels are compiled one by one: %s", error)
            self._check_kernels(model, kv)
            return
        logger.info("most kernels are compiled, in %.1f s", time.perf_counter() - began)

    def _check_kernels(self, model: Decoder, kv: Pages) -> None:
        """Raises StartError that names the layers whose kernels this device cannot run."""
        with torch.inference_mode():
            unsupported = exactness.unsupported(model, kv, kernel_errors())
        if unsupported:
            raise StartError(
                f"this GPU cannot run kernels that the model needs (docs/gpus.md): {'; '.join(unsupported)}"
            )

    def _pages_of_one_block(self, specs: tuple[LayerSpec, ...], block_size: int) -> Pages:
        one_state = StateLayout(1, 0, 0, self._most_drafts + 1)
        return kvcache.allocate_on(self.device.torch_device, KVLayout(specs, 1, block_size, one_state))

    def activation_bytes(self, model: Decoder, specs: tuple[LayerSpec, ...], block_size: int) -> int:
        """Bytes that the largest steps take beside weights and cache: of all tokens in a prompt and a token a row.
        What graphs take is theirs alone and counts again, and so does what they leave for the sampler."""
        rows, tokens, step = self._max_rows, self._max_tokens, decode_step(model)
        width = -(-self._max_model_len // block_size)
        kv = self._pages_of_one_block(specs, block_size)
        prompt, decode = _batch_in_one_page(tokens, 1, width, kv), _batch_in_one_page(rows, rows, width, kv)
        last = decode.input_ids
        peak = torch.inference_mode()(self.device.peak)
        prompt_bytes = peak(lambda: model.logits(model.forward(prompt).index_select(0, last)) * 1.0)
        scored = 4 * min(tokens * model.spec.vocab, self.prompt_logits_bytes // 4)
        prompt_bytes += SCORING_COPIES * scored
        decode_bytes = peak(lambda: step(decode) * 1.0)
        if self._eager:
            return prompt_bytes + decode_bytes
        sizes = self._prompt_sizes[-1:]
        batches = [_batch_in_one_page(size, prompt_rows(size, rows), width, kv) for size in sizes]
        graphs = max([decode_bytes, *(peak(partial(model.forward, batch)) for batch in batches)])
        logits, hidden = 4 * rows * model.spec.vocab, sum(sizes) * model.spec.hidden * model.dtype.itemsize
        return prompt_bytes + decode_bytes + graphs + logits + hidden

    def _draft_bytes(self, draft: Draft, specs: tuple[LayerSpec, ...], block_size: int) -> int:
        """The same of what draws drafts; a head has a token a row, but for a few steps."""
        if isinstance(draft.model, Decoder):
            return self.activation_bytes(draft.model, specs, block_size)
        width, kv = -(-self._max_model_len // block_size), self._pages_of_one_block(specs, block_size)
        batch, step = _batch_in_one_page(self._max_rows, self._max_rows, width, kv), decode_step(draft.model)
        return 2 * torch.inference_mode()(self.device.peak)(lambda: step(batch) * 1.0)

    @property
    def keeps_memory(self) -> bool:
        return not self._eager

    def begin(self, plan: StepPlan, *, needs_history: bool) -> StepPlan:
        drafts_in_flight = any(len(result.plan.draft_token_ids) for result, _ in self._in_flight)
        self.record_finished(wait=needs_history or drafts_in_flight)
        plan = self.slots.corrected(plan)
        if self.states is not None:
            self.states.begin(plan)
        return plan

    def record_finished(self, *, wait: bool) -> None:
        """Write sampled tokens into the host's tables; those of steps that may still run only with `wait`."""
        while len(self._in_flight) > (0 if wait else self._max_in_flight):
            result, generation = self._in_flight.popleft()
            slots, lengths, token_ids = result.new_tokens()
            same = self.slots.generation(result.rows.slots) == generation
            if result.kept is not None:
                same = same[result.kept]
            self.slots.tokens[slots[same], lengths[same]] = token_ids[same]
            if len(result.plan.draft_token_ids):
                self.slots.limit_computed(*result.computed_after_drafts())

    def replay(self, plan: StepPlan) -> Tensor | None:
        graphs = self.decode_graphs
        return graphs.replay(plan) if graphs is not None and graphs.fits(plan) else None

    def forward(self, model: Decoder, plan: StepPlan, needed: Int32, features: FeatureRows | None) -> HiddenStates:
        graphs = self.prompt_graphs
        if graphs is not None and features is None and graphs.fits(plan):
            states = graphs.replay(plan)
        else:
            batch = self.slots.build(plan, self.kv)
            if features is not None:
                features.put_into(batch)
            if needed is plan.num_logits:  # no other hidden states are read
                batch.logits_rows = self.slots.logits_rows(plan, batch)
            states = model.forward(batch)
            if batch.logits_rows is not None:
                return HiddenStates(states, np.cumsum(needed, dtype=np.int64), None)
        every = np.add.reduce(plan.num_logits) == len(states)
        ends = np.cumsum(plan.num_tokens, dtype=np.int64)
        return HiddenStates(states, ends, None if every else self.slots.logits_indices)

    def draft_logits(self, plan: StepPlan) -> Tensor:
        draft, graphs = self.draft, self._draft_graphs
        assert draft is not None
        if graphs is not None and graphs.fits(plan):
            return graphs.replay(plan)
        batch = self.slots.build(plan, self.kv[draft.first_layer :], ahead=draft.ahead)
        states = draft.model.forward(batch)
        assert self.slots.logits_indices is not None
        return draft.model.logits(states.index_select(0, self.slots.logits_indices))

    def columns(self, rows: LogitRows) -> SamplingColumns:
        return self.slots.columns()

    def finish(self, result: PendingResult, columns: SamplingColumns, token_ids: Tensor) -> None:
        self.slots.write_sampled(columns, token_ids)
        self._in_flight.append((result, self.slots.generation(result.rows.slots)))

    def is_batch_invariant(self, model: Decoder) -> bool:
        if not self._exact:
            return False
        began = time.perf_counter()
        accepted = exactness.accept_libraries(model)
        logger.info("products of many rows that a library computes, with the same bits: %s", accepted or "none")
        unequal = trial.without_unequal(
            lambda: exactness.unequal_products(model) + exactness.unequal_attention(model, self.kv),
            (RuntimeError, *kernel_errors()),
        )
        logger.info("bits of rows alone and beside others are compared, in %.1f s", time.perf_counter() - began)
        if unequal:
            logger.error("rows of these depend on the batch, so answers do too: %s", ", ".join(unequal))
        return not unequal

    def capture(self, model: Decoder) -> None:
        if self._eager:
            if self._is_alone:  # what ranks do together, steps alone begin
                self._compile_row_counts(model)
            return
        self.invalidate()
        began = time.perf_counter()
        first, self._first_sizes = self._first_sizes, None
        try:
            self._capture_sizes(model, first)
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"no memory is left to record graphs of up to {self._max_rows} rows; lower --gpu-memory-utilization "
                "or --max-num-seqs, or give --enforce-eager"
            ) from error
        recorded = sum(len(graphs.sizes) for graphs in self._graphs())
        pending = sum(len(graphs.pending) for graphs in self._graphs())
        logger.info(
            "%d sizes of steps are recorded, in %.1f s; %d others are left for when the engine is idle",
            recorded,
            time.perf_counter() - began,
            pending,
        )

    def _capture_sizes(self, model: Decoder, first: Collection[int] | None) -> None:
        decode = [(size, size) for size in decode_sizes(self._max_rows)]
        prompts = [(size, prompt_rows(size, self._max_rows)) for size in self._prompt_sizes]
        pool = self.device.pool()
        options: dict[str, Any] = {"pool": pool, "adapters": self._adapters, "first": first}
        step, forward = decode_step(model), model.forward
        self.decode_graphs = DecodeGraphs(self.device, self.slots, self.kv, step, decode, **options)
        self.prompt_graphs = PromptGraphs(self.device, self.slots, self.kv, forward, prompts, **options)
        if self.draft is not None:
            step, kv, ahead = decode_step(self.draft.model), self.kv[self.draft.first_layer :], self.draft.ahead
            options |= {"adapters": self._adapters and not ahead, "ahead": ahead}
            self._draft_graphs = DecodeGraphs(self.device, self.slots, kv, step, decode, **options)

    def capture_next(self) -> int:
        """Capture one of the sizes of steps that the start has left; returns how many are still missing.  If memory
        runs out, no rank captures more: those steps go on in larger graphs."""
        missing = [graphs for graphs in self._graphs() if graphs.pending]
        if not missing:
            return 0
        size, succeeded = missing[0].pending[-1], 1
        try:
            with torch.inference_mode():
                missing[0].capture_next()
        except torch.OutOfMemoryError as error:
            logger.warning("no memory is left to record steps of more sizes: %s", error)
            succeeded = 0
        if not self._agree(succeeded):
            missing[0].forget(size)
            for graphs in missing:
                graphs.pending.clear()
        return sum(len(graphs.pending) for graphs in missing)

    def _graphs(self) -> list[CudaGraphs]:
        """The captured steps, the model's first."""
        kinds = (self.decode_graphs, self.prompt_graphs, self._draft_graphs)
        return [graphs for graphs in kinds if graphs is not None]

    def _compile_row_counts(self, model: Decoder) -> None:
        """Steps of padding rows, of tokens and of prompts, for each power of two from 16 on: kernels are compiled for
        these, and no request is to wait for that."""
        device = self.device.torch_device
        for rows in compile_ahead.row_counts(self._max_rows)[:-1]:
            for tokens in (rows, rows + 1):
                batch = self.slots.empty_batch(rows, self.kv, tokens=tokens)
                columns = torch.zeros(rows, dtype=torch.int32, device=device)
                saves = torch.zeros(0, 3, dtype=torch.int32, device=device)
                batch.states = StateRows(columns.long() - 1, columns, columns, saves)
                model.forward(batch)

    def invalidate(self) -> None:
        for graphs in self._graphs():
            graphs.invalidate()
        self.decode_graphs = self.prompt_graphs = self._draft_graphs = None

    def on_foreign_code(self, model: Decoder) -> None:
        """Does nothing: capture takes seconds here, so foreign code has to copy into the tensors."""

    def allocate_kv(self) -> None:
        self._set_kv(kvcache.allocate_on(self.device.torch_device, self.layout, spare=1))

    def release_kv(self) -> None:
        self._set_kv([])

    def _set_kv(self, kv: Pages) -> None:
        self.kv = kv
        if self.states is not None:
            self.states.kv = kv


def gpu_name() -> str:
    """The GPU's name; "" where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def kernel_errors() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that cannot be compiled, or does not fit; nothing before it is imported."""
    errors = sys.modules.get("triton.errors")
    return () if errors is None else (errors.TritonError,)


def _batch_in_one_page(tokens: int, rows: int, width: int, kv: Pages) -> ForwardBatch:
    """A batch for measuring memory: a token a row, the last row has the rest, all keys in page 0, one row a state."""
    device = kv[0][0].device
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    query_start = torch.arange(rows + 1, device=device).int()
    query_start[-1] = tokens
    tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
    lengths = query_start.diff()
    with_state = torch.arange(rows, device=device) - rows + 1  # that of the last row is number 0, the others have none
    saves = torch.zeros(0, 3, dtype=torch.int32, device=device)
    states = StateRows(with_state, torch.zeros_like(lengths), lengths, saves)
    return ForwardBatch(zeros, zeros, query_start, lengths, tables, zeros, kv, states=states)
