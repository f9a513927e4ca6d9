"""A function of ops, recorded once and repeated without the interpreter in between: what a CUDA graph is, on a CPU.

The compiled ops take note of their calls and of the memory they were given.  Torch's own ops take none, so a recorded
function may do nothing with torch but make tensors and view them; anything else is found out while recording.  This
file must not know what is computed.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokserve.ops.arena import aligned

MAKERS = {"empty", "new_empty", "empty_like"}
LOOKS = {"__get__", "view", "to"}  # at attributes, or at the same elements; a conversion makes new ones


class Unrecordable(Exception):
    """The function does what cannot be recorded; the message says what."""


class Memory:
    """Where recorded functions keep what they make: the same place for all, since no two run at once.

    So what one of them returned is good until one runs again.  `size` bytes are taken as they are touched.
    """

    def __init__(self, size: int) -> None:
        self.buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class _Tensors(TorchFunctionMode):
    """Gives torch's new tensors places in a buffer, and the places to others once their tensors are gone."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._buffer = memory.buffer
        self._used = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # by size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name not in MAKERS | LOOKS:
            raise Unrecordable(f"it calls torch's {name}")
        found = func(*args, **(kwargs or {}))
        if name in MAKERS:
            return self._place(found.shape, found.dtype)
        if isinstance(found, Tensor) and found is not args[0]:
            if found.data_ptr() != args[0].data_ptr():
                raise Unrecordable(f"it calls torch's {name}")
            found.looks_at = args[0]  # type: ignore[attr-defined]  # whose place must not be given away before
        return found

    def _place(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        bytes_ = shape.numel() * dtype.itemsize
        size = aligned(bytes_)
        if self._free[size]:
            at = self._free[size].pop()
        else:
            at, self._used = self._used, self._used + size
            if self._used > len(self._buffer):
                raise Unrecordable(f"it takes more than {len(self._buffer)} bytes")
        found = self._buffer[at : at + bytes_].view(dtype).view(shape)
        weakref.finalize(found, self._free[size].append, at)
        return found


def record(function: Callable[[], Tensor], memory: Memory) -> tuple[Tensor, Callable[[], None]]:
    """Call the function; returns what it returned, and how to fill that again from what its inputs then hold.

    The tensors that the function reads must stay where they are.  Raises Unrecordable, having called a part of it.
    """
    extension = sys.modules.get("tokserve._C")
    if extension is None:
        raise Unrecordable("there are no compiled ops")
    calls = extension.Graph()
    calls.begin_capture()
    try:
        with _Tensors(memory):
            result = function()
    except ValueError as error:
        raise Unrecordable(str(error)) from error
    finally:
        calls.end_capture()
    return result, calls.replay
