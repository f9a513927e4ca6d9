"""Steps recorded once and repeated: a graph for each of a few sizes, in one pool of memory.

A step with one token a row runs in the smallest graph that has as many rows, a small one with a prompt or a chunk in it
in the smallest that has as many tokens; the rest is padding, whose results nobody reads.  Rows do not touch each other,
so a graph's rows have the bits that a step of their own would give them.  Knows nothing of sampling: what is recorded
ends with the logits, or, where not every token draws, with the hidden states.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve.device import Device
from tokserve.layers.batch import ForwardBatch, Pages
from tokserve.plan import StepPlan
from tokserve.runner.staging import StagedSlots

Step = Callable[[ForwardBatch], Tensor]

MOST_TOKENS = 512  # of more, the device works longer than the host needs to launch


def buckets(most: int) -> list[int]:
    """Numbers of rows to record up to `most`, ascending: powers of two up to 8, then by 8, from 256 on by 32."""
    sizes = {1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(256, most + 1, 32), most}
    return sorted(size for size in sizes if size <= most)


def prompt_buckets(most: int) -> list[int]:
    """Numbers of tokens up to `most` to record with prompts among them, ascending."""
    return [size for size in (16, 32, *range(64, MOST_TOKENS + 1, 64)) if size <= most]


def prompt_rows(tokens: int, most: int) -> int:
    """Rows of a graph of so many tokens: `most` and padding, or as many as leave one row several tokens."""
    return min(tokens - 1, most + 1)


def decodes(plan: StepPlan) -> bool:
    """Whether each row computes one token and draws one."""
    return bool(plan.samples.all() and (plan.num_tokens == 1).all())


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded step of `batch`, whose tensors are filled in before each run."""

    slots: StagedSlots
    batch: ForwardBatch
    replay: Callable[[], Tensor]  # of all tokens [T, ...], good until the next run of any graph

    def run(self, plan: StepPlan) -> Tensor:
        """What the step found for the plan's tokens, in order."""
        self.slots.build(plan, self.batch.kv, self.batch)
        return self.replay()[: int(plan.num_tokens.sum())]


class Graphs:
    """One graph per bucket, recorded at start-up, the largest first: the others fit into its memory.

    `decode` is recorded for up to `most` rows of one token, `prompts` for up to `most_tokens` tokens of as many rows.
    What a run finds is overwritten by the next one: decode steps share a place for it, steps with prompts another.
    `adapters`: as many again for steps in which a row has an adapter, so that the others do not pay for it.
    """

    def __init__(
        self, device: Device, slots: StagedSlots, kv: Pages, *, most: int, most_tokens: int, decode: Step,
        prompts: Step, adapters: bool = False,
    ) -> None:  # fmt: skip
        self.sizes, self.prompt_sizes = buckets(most), prompt_buckets(most_tokens)
        self._slots = slots
        self._graphs: dict[tuple[int, int, bool], Graph] = {}  # by tokens, rows, and whether a row has an adapter
        self._most = most
        pool = device.pool()
        for step, shapes in (
            (decode, [(size, size) for size in self.sizes]),
            (prompts, [(size, prompt_rows(size, most)) for size in self.prompt_sizes]),
        ):
            found: Tensor | None = None
            for tokens, rows in reversed(shapes):
                for adapted in (True, False) if adapters else (False,):
                    batch = slots.blank(rows, kv, tokens=tokens, adapters=adapted)
                    found = torch.empty_like(step(batch)) if found is None else found
                    replay = device.capture(_bound(step, batch, found[:tokens]), pool)
                    self._graphs[tokens, rows, adapted] = Graph(slots, batch, replay)

    def fitting(self, plan: StepPlan) -> Graph | None:
        """The graph for this plan, if it is a decode step of all its rows; it finds logits [R, V]."""
        rows = len(plan.slots)
        if rows > self.sizes[-1] or not decodes(plan):
            return None
        size = self.sizes[bisect_left(self.sizes, rows)]
        return self._graphs[size, size, self._slots.has_adapters(plan)]

    def fitting_prompts(self, plan: StepPlan) -> Graph | None:
        """The graph for this plan, if a row of it has several tokens and all are few; it finds hidden states [T, H]."""
        tokens = int(plan.num_tokens.sum())
        at = bisect_left(self.prompt_sizes, tokens)
        if tokens == len(plan.slots) or at == len(self.prompt_sizes):
            return None
        size = self.prompt_sizes[at]
        return self._graphs[size, prompt_rows(size, self._most), self._slots.has_adapters(plan)]


def _bound(step: Step, batch: ForwardBatch, found: Tensor) -> Callable[[], Tensor]:
    return lambda: found.copy_(step(batch))
