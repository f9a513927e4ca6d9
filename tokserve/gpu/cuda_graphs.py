"""Captured steps on a GPU: a graph for each of a few sizes, in one pool of memory.  A start captures the sizes in
`FIRST` and the largest; the others are captured while the engine is idle.

A step with one token a row runs in the smallest graph that has as many rows, a small one with a prompt or a chunk in it
in the smallest that has as many tokens; the rest is padding, whose results are not read.  Rows do not touch each other,
so a graph's rows have the bits that a step of their own would give them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokserve import ops
from tokserve.gpu.device_slots import DecodeRows, DeviceSlots
from tokserve.layers.batch import ForwardBatch, Pages
from tokserve.models.decoder import Decoder
from tokserve.protocol.plan import StepPlan
from tokserve.runner.device import Accelerator
from tokserve.runner.replay import Step, is_decode

Shape = tuple[int, int]  # tokens, rows

PROMPT_SIZES = (16, 32, *range(64, 513, 64), *range(768, 2049, 256))  # tokens of graphs with prompts among them
FIRST = frozenset((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048))  # sizes that a start captures
LEAST_PROMPT_TOKENS = 512  # up to which there are graphs for any model
LAUNCH_SECONDS = 0.4e-3  # of the host, for the kernels of a layer (measured: 0.47 ms beside an H200)
FLOPS = 4e14  # operations a second of the device in products of that size


def decode_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to capture, ascending: powers of two up to 8, then by 8, from 256 on by 32."""
    sizes = {1, 2, 4, *range(8, min(max_rows, 256) + 1, 8), *range(256, max_rows + 1, 32), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


def prompt_sizes(max_tokens: int, weights: float) -> list[int]:
    """Numbers of tokens up to `max_tokens` to capture with prompts among them, ascending: those for which the host
    takes longer to launch a layer of so many weights than the device to compute it."""
    most = max(LEAST_PROMPT_TOKENS, LAUNCH_SECONDS * FLOPS / max(1.0, 2 * weights))
    return [size for size in PROMPT_SIZES if size <= min(max_tokens, most)]


def layer_weights(model: Decoder) -> float:
    """Weights that a token meets in the projections of a layer."""
    linears = model.named_linears().values()
    return sum(linear.outputs * linear.inputs for linear in linears) / max(1, len(model.blocks))


def prompt_rows(tokens: int, max_rows: int) -> int:
    """Rows of a graph of so many tokens: `max_rows` and padding, or as many as leave one row several tokens."""
    return min(tokens - 1, max_rows + 1)


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A captured step of `batch`, whose tensors are filled in before each replay, or by it for the `rows` of decode.
    `tables`: what its kernels read besides."""

    batch: ForwardBatch
    run: Callable[[], Tensor]  # [T, ...] of all tokens, good until the next run of any graph
    tables: list[Tensor]
    rows: DecodeRows | None = None


class CudaGraphs(ABC):
    """`Replay` of `step` for these shapes, captured with the largest first: the others fit into its memory.

    All graphs return the same memory.  `first`: the sizes to capture at once, beside the largest, or None for all; each
    call of `capture_next` captures one more.  A step of a size that is not captured yet runs in a larger graph.
    `adapters`: as many again for steps in which a row has an adapter, so that the others do not pay for it.  `ahead`:
    as of a `Draft`.
    """

    decodes = False

    def __init__(
        self,
        device: Accelerator,
        slots: DeviceSlots,
        kv: Pages,
        step: Step,
        shapes: list[Shape],
        *,
        pool: Any,
        adapters: bool,
        ahead: int = 0,
        first: Collection[int] | None,
    ) -> None:
        self._device, self._kv, self._step, self._pool = device, kv, step, pool
        self._adapters, self._ahead = adapters, ahead
        self._slots = slots
        self.sizes: list[int] = []  # ascending: those that are captured, with and without adapters
        self._rows = dict(shapes)  # by size
        self.captured: dict[tuple[int, int, bool], CudaGraph] = {}  # by tokens, rows, and whether a row has an adapter
        self._out: Tensor | None = None
        self.pending = [tokens for tokens, _ in shapes]  # ascending: sizes that are not captured
        at_once = [size for size in self.pending if first is None or size in first or size == self.pending[-1]]
        for size in reversed(at_once):
            self.pending.remove(size)
            self._record(size)

    def capture_next(self) -> None:
        """Capture the largest of the sizes that are missing."""
        self._record(self.pending.pop())

    def forget(self, tokens: int) -> None:
        """Do not use the graphs of this size, which another rank could not capture."""
        self.sizes = [size for size in self.sizes if size != tokens]

    def _record(self, tokens: int) -> None:
        rows = self._rows[tokens]
        for adapted in (True, False) if self._adapters else (False,):
            batch, decoded = self._blank(tokens, rows, adapted=adapted)
            if self._out is None:
                self._out = torch.empty_like(self._step(batch))
            with ops.kept_tables() as tables:
                out = self._out[:tokens]
                run = self._device.capture(partial(_run, self._step, batch, self._slots, decoded, out), self._pool)
            self.captured[tokens, rows, adapted] = CudaGraph(batch, run, tables, decoded)
        insort(self.sizes, tokens)

    def _blank(self, tokens: int, rows: int, *, adapted: bool) -> tuple[ForwardBatch, DecodeRows | None]:
        """What a graph reads, with padding in it."""
        if self.decodes:
            decoded = self._slots.decode_rows(rows, self._kv, adapters=adapted, ahead=self._ahead)
            return decoded.batch, decoded
        return self._slots.empty_batch(rows, self._kv, tokens=tokens, adapters=adapted), None

    @abstractmethod
    def fits(self, plan: StepPlan) -> bool: ...

    def replay(self, plan: StepPlan) -> Tensor:
        count = self._count(plan)
        tokens = self.sizes[bisect_left(self.sizes, count)]
        graph = self.captured[tokens, self._rows[tokens], self._adapters and self._slots.has_adapters(plan)]
        if graph.rows is None:
            self._slots.build(plan, graph.batch.kv, graph.batch)
        else:
            self._slots.resume(plan, graph.rows)
        return graph.run()[:count]

    def invalidate(self) -> None:
        self.sizes, self.pending = [], []
        self.captured.clear()

    def _count(self, plan: StepPlan) -> int:
        return int(plan.num_tokens.sum())


class DecodeGraphs(CudaGraphs):
    """Steps of one token a row, which go on by themselves; they return logits [R, V]."""

    decodes = True

    def fits(self, plan: StepPlan) -> bool:
        fits = bool(self.sizes) and len(plan.slots) <= self.sizes[-1] and is_decode(plan)
        return fits and self._slots.fits_graphs(plan)

    def _count(self, plan: StepPlan) -> int:
        return len(plan.slots)


class PromptGraphs(CudaGraphs):
    """Steps in which a row has several tokens and all are few; they return hidden states [T, H]."""

    def fits(self, plan: StepPlan) -> bool:
        fits = bool(self.sizes) and len(plan.slots) < self._count(plan) <= self.sizes[-1]
        return fits and self._slots.fits_graphs(plan)


def _run(step: Step, batch: ForwardBatch, slots: DeviceSlots, rows: DecodeRows | None, out: Tensor) -> Tensor:
    if rows is not None:
        slots.advance(rows)
    return out.copy_(step(batch))
