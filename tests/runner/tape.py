"""The fake device with steps recorded as a GPU records them: a replay runs the launches again, and no line of Python.

It serves kernels in Triton's interpreter.  A number that Python computed while a step was recorded stays as it was, and
memory that a step fills in is overwritten before each replay, so a test fails if a step depends on either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from triton.runtime.interpreter import GridExecutor

from tests.runner.fake_device import POISON, FakeDevice

HOST_READS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")


class Tape(TorchDispatchMode):
    """What is launched while the mode is on, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], object]] = []
        self.outputs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def call() -> Any:
            return func(*args, **(kwargs or {}))

        def again() -> None:
            for old, new in zip(outputs, tensors(call()), strict=True):
                old.copy_(new)

        actual = call()
        outputs, inputs = tensors(actual), {place(tensor) for tensor in tensors((args, kwargs))}
        if outputs and inputs.isdisjoint(map(place, outputs)):
            self.outputs += outputs
            if not func.__name__.startswith(("empty", "new_empty")):
                self.launches.append(again)
        elif not func.is_view:
            self.launches.append(call)
        return actual

    def repeat(self) -> None:
        for tensor in self.outputs:
            tensor.untyped_storage().fill_(POISON)
        for launch in self.launches:
            launch()


@contextmanager
def recording() -> Iterator[Tape]:
    """Whatever is launched meanwhile is on the tape; to read a tensor on the host is an error."""
    tape, launch = Tape(), GridExecutor.__call__
    with pytest.MonkeyPatch.context() as patch:

        def note(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
            tape.launches.append(lambda: launch(self, *args, **kwargs))
            with pytest.MonkeyPatch.context() as inner, _disable_current_modes():
                for name, function in reads.items():
                    inner.setattr(Tensor, name, function)
                launch(self, *args, **kwargs)

        reads = {name: getattr(Tensor, name) for name in HOST_READS}
        for name in HOST_READS:
            patch.setattr(Tensor, name, refuse)
        patch.setattr(GridExecutor, "__call__", note)
        with tape:
            yield tape


def tensors(actual: object) -> list[Tensor]:
    return [leaf for leaf in tree_iter(actual) if isinstance(leaf, Tensor)]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def refuse(*_: object) -> object:
    raise AssertionError("a step that is recorded reads a tensor on the host")


class TapeDevice(FakeDevice):
    """A `FakeDevice` whose replay repeats the launches of the recorded step."""

    def capture(self, run: Callable[[], Tensor], pool: object) -> Callable[[], Tensor]:
        self.captured += 1
        with recording() as tape:
            result = run()

        def replay() -> Tensor:
            self.replayed += 1
            tape.repeat()
            return result

        return replay
