"""Which run of TRL a client generates for: its seed, its step, and whether it trains or evaluates.

TRL's client of a server is told none of this.  transformers gives each trainer its default callbacks, and tells them of
the arguments and the state before TRL makes the client.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import transformers.trainer
from transformers import TrainerCallback

from .step_seeds import StepSeeds


class TrainerRun(TrainerCallback):
    """The run of one trainer.  `latest`: that of the trainer that was made last."""

    latest: ClassVar[TrainerRun | None] = None

    def __init__(self) -> None:
        self._seeds = StepSeeds()

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """The trainer's base class is complete."""
        self._args, self._state = args, state
        self._model = weakref.ref(model)
        TrainerRun.latest = self

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The state is another object now, perhaps a checkpoint's."""
        self._args, self._state = args, state

    def seeds(self, count: int) -> list[int]:
        """The seeds of the next call that generates, one for each of `count` prompts."""
        model = self._model()
        training = model is None or bool(model.training)
        return self._seeds.draw(
            count, run_seed=int(self._args.seed), step=int(self._state.global_step), training=training
        )


def follow_trainers() -> None:
    """Let trainers that are made from now on have a `TrainerRun`."""
    callbacks: list[type[TrainerCallback]] = vars(transformers.trainer)["DEFAULT_CALLBACKS"]
    if TrainerRun not in callbacks:
        callbacks.append(TrainerRun)
