"""A device with its own memory, simulated on the CPU: values reach it as copies, leave it late, and steps are recorded.

It lays arrays out, stages and replays as the real one does, and makes mistakes visible: a staging buffer is overwritten
as soon as it was read, and a replayed step writes into the memory of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.runner.device import fill, pack, views

POISON = 0x7F


@dataclass
class Leaving:
    """Values as they were when asked for."""

    device: FakeDevice
    values: list[NDArray[Any]]
    waited: bool = False

    def arrays(self) -> list[NDArray[Any]]:
        if not self.waited:
            self.device.waits += 1
            self.waited = True
        return self.values


class FakeDevice:
    """Counts what a real device would be made to wait for."""

    torch_device = torch.device("cpu")
    has_float8 = True

    def __init__(self) -> None:
        self.copies = 0  # to the device
        self.waits = 0  # for values that left it
        self.captured = 0
        self.replayed = 0
        self.given_back = 0
        self.pinned = 0  # bytes of the host's
        self.side: list[str] = []  # what was done beside the steps, and when they were joined

    def require_float8(self, option: str) -> None:
        pass

    def give_back_memory(self) -> None:
        self.given_back += 1

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.side.append("begin")
        yield
        self.side.append("end")

    def join(self) -> None:
        self.side.append("join")

    def wait(self) -> None:
        self.side.append("wait")

    def pin(self, memory: NDArray[Any]) -> None:
        self.pinned = memory.nbytes

    def free_memory(self) -> int:
        return 1 << 26

    def peak(self, run: Callable[[], object]) -> int:
        run()
        return 1 << 20

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        self.copies += 1
        places, size = pack(arrays)
        buffer = torch.full((size,), POISON, dtype=torch.uint8)
        fill(buffer, arrays, places)
        copy = buffer.clone()
        buffer.fill_(POISON)
        return views(copy, arrays, places)

    def fetch(self, tensors: Sequence[Tensor]) -> Leaving:
        return Leaving(self, [tensor.clone().numpy() for tensor in tensors])

    def pool(self) -> object:
        return object()

    def capture(self, run: Callable[[], Tensor], pool: object) -> Callable[[], Tensor]:
        self.captured += 1
        result = run().clone()

        def replay() -> Tensor:
            self.replayed += 1
            return result.copy_(run())

        return replay


def same_bytes(arrays: Sequence[NDArray[Any]], tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are the arrays."""
    return all(
        np.array_equal(array, tensor.numpy()) and array.dtype == tensor.numpy().dtype
        for array, tensor in zip(arrays, tensors, strict=True)
    )
