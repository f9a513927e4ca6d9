"""What the engine counts: tokens, steps and preemptions since its start, and how old the weights behind tokens were."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import msgspec

from tokserve.engine.request import Request
from tokserve.protocol.messages import AGES, PREEMPTIONS, STEP_TOKENS

EPOCHS_KEPT = 1000


class DraftCounters:
    """Steps of requests with drafts, drafts, accepted drafts by their position in the row, and by source both."""

    __slots__ = ("accepted_at", "by_source", "num_drafts", "num_steps")

    def __init__(self) -> None:
        self.num_steps = self.num_drafts = 0
        self.accepted_at: list[int] = []
        self.by_source: dict[str, tuple[int, int]] = {}

    def record(self, source: str, drafts: int, accepted: int) -> None:
        """A row had drafts, of which so many were accepted."""
        self.num_steps += 1
        self.num_drafts += drafts
        before = self.by_source.get(source, (0, 0))
        self.by_source[source] = before[0] + drafts, before[1] + accepted
        at = self.accepted_at
        if accepted > len(at):
            at += [0] * (accepted - len(at))
        for index in range(accepted):
            at[index] += 1


class Tally:
    """How many values lie in each bucket, and their sum.  `bounds`: the upper bounds of all buckets but the last."""

    __slots__ = ("_bounds", "values")

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self.values = [0] * (len(bounds) + 2)  # counts, and the sum

    def add(self, value: int) -> None:
        self.values[bisect_left(self._bounds, value)] += 1
        self.values[-1] += value


class Counters(msgspec.Struct):
    """Since the engine's start; tokens unless said otherwise."""

    steps: int = 0  # steps
    preemptions: int = 0  # preemptions
    displaced: int = 0  # preemptions
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    nan_requests: int = 0  # requests
    tokens_by_age: list[int] = msgspec.field(default_factory=lambda: [0] * AGES)
    drafts: DraftCounters = msgspec.field(default_factory=DraftCounters)
    tokens_by_step: Tally = msgspec.field(default_factory=lambda: Tally(STEP_TOKENS))
    preemptions_by_request: Tally = msgspec.field(default_factory=lambda: Tally(PREEMPTIONS))

    def values(self) -> dict[str, Any]:
        """A copy, by the names of `StepStats`."""
        values = msgspec.structs.asdict(self) | {"tokens_by_age": self.tokens_by_age.copy()}
        drafts = values.pop("drafts")
        for name in ("tokens_by_step", "preemptions_by_request"):
            values[name] = values[name].values.copy()
        return values | {
            "draft_steps": drafts.num_steps,
            "draft_tokens": drafts.num_drafts,
            "accepted_by_position": drafts.accepted_at.copy(),
            "drafts_by_source": drafts.by_source.copy(),
        }


class WeightEpochs:
    """The version of the weights that plans run with, and the epochs of the latest versions."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.epoch = 0
        self._epochs = {version: 0}

    def use(self, version: str, epoch: int) -> None:
        """Plans made from now on run with these weights."""
        self.version, self.epoch = version, epoch
        self._epochs.pop(version, None)
        self._epochs[version] = epoch
        if len(self._epochs) > EPOCHS_KEPT:
            del self._epochs[next(iter(self._epochs))]

    def count_ages(self, request: Request, tokens_by_age: list[int]) -> None:
        """Add an ended request's tokens, by how many epochs ago the weights that made them were replaced."""
        for version, _, start, end in request.spans:
            age = self.epoch - self._epochs.get(version, 0)
            tokens_by_age[min(age, AGES - 1)] += end - start
