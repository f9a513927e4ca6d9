"""Seeds of a trainer's rollouts: other ones in every call, and the same ones in the next run."""

from __future__ import annotations

import numpy as np

SEEDS = 1 << 62  # a choice's seed is its prompt's and its index, and has to fit in 64 bits


class StepSeeds:
    """Draws seeds from the run's seed, the optimizer step, and the number of the call within the step.

    A run that is resumed from a checkpoint goes on with the seeds that it would have had: calls are counted anew in
    each step, and those of an evaluation by themselves.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._calls = {True: 0, False: 0}  # of the step, by `training`

    def draw(self, count: int, *, run_seed: int, step: int, training: bool = True, process: int = 0) -> list[int]:
        """A seed for each of `count` prompts.  `process`: the number of the one that calls, of a distributed run."""
        if step != self._step:
            self._step, self._calls = step, {True: 0, False: 0}
        call = self._calls[training]
        self._calls[training] += 1
        key = [run_seed % (1 << 64), step, call, int(not training), process]
        return np.random.default_rng(key).integers(0, SEEDS, count).tolist()
