"""What the engine counts: tokens, steps and preemptions since its start, and how old the weights behind tokens were."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import msgspec

from tokserve.engine.request import Request
from tokserve.protocol.messages import AGES, PREEMPTIONS, STEP_TOKENS

EPOCHS_KEPT = 1000


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
    tokens_by_step: Tally = msgspec.field(default_factory=lambda: Tally(STEP_TOKENS))
    preemptions_by_request: Tally = msgspec.field(default_factory=lambda: Tally(PREEMPTIONS))

    def values(self) -> dict[str, Any]:
        """A copy, by the names of `StepStats`."""
        values = msgspec.structs.asdict(self) | {"tokens_by_age": self.tokens_by_age.copy()}
        for name in ("tokens_by_step", "preemptions_by_request"):
            values[name] = values[name].values.copy()
        return values


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
