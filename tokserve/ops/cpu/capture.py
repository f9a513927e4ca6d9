"""Capture of a function of ops, replayed without the interpreter: what a CUDA graph is, on a CPU.

The compiled ops record their calls and the memory they work on.  Torch's own ops do not, so a captured function may use
torch only to make tensors and to view them; anything else raises NotCapturable.
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

from tokserve.ops.cpu.arena import aligned

MAKERS = {"empty", "new_empty", "empty_like"}
VIEWS = {"__get__", "view", "to"}  # attributes, or the same elements; `to` of another dtype makes a new tensor


class NotCapturable(Exception):
    """The function cannot be captured; the message says why."""


class CaptureMemory:
    """Memory of the tensors that captured functions make: one buffer for all of them, since no two run at once.

    The result of one is valid until another runs.  Of the `size` bytes, those touched are allocated.
    """

    def __init__(self, size: int) -> None:
        self.buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class _CaptureMode(TorchFunctionMode):
    """Allocates torch's new tensors in a buffer, whose space is reused when a tensor is freed."""

    def __init__(self, memory: CaptureMemory) -> None:
        super().__init__()
        self._buffer = memory.buffer
        self._used = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # offsets by size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name not in MAKERS | VIEWS:
            raise NotCapturable(f"it calls torch's {name}")
        result = func(*args, **(kwargs or {}))
        if name in MAKERS:
            return self._allocate(result.shape, result.dtype)
        if isinstance(result, Tensor) and result is not args[0]:
            if result.data_ptr() != args[0].data_ptr():
                raise NotCapturable(f"it calls torch's {name}")
            result.viewed = args[0]  # type: ignore[attr-defined]  # keeps the memory allocated as long as the view
        return result

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        num_bytes = shape.numel() * dtype.itemsize
        size = aligned(num_bytes)
        if self._free[size]:
            offset = self._free[size].pop()
        else:
            offset, self._used = self._used, self._used + size
            if self._used > len(self._buffer):
                raise NotCapturable(f"it takes more than {len(self._buffer)} bytes")
        tensor = self._buffer[offset : offset + num_bytes].view(dtype).view(shape)
        weakref.finalize(tensor, self._free[size].append, offset)
        return tensor


def capture(function: Callable[[], Tensor], memory: CaptureMemory) -> tuple[Tensor, Callable[[], None]]:
    """Call the function; returns its result, and `replay`, which computes it again from its inputs' new contents.

    The input tensors must stay at their addresses.  Raises NotCapturable after a part of the function has run.
    """
    extension = sys.modules.get("tokserve._C")
    if extension is None:
        raise NotCapturable("there are no compiled ops")
    graph = extension.Graph()
    graph.begin_capture()
    try:
        with _CaptureMode(memory):
            result = function()
    except ValueError as error:
        raise NotCapturable(str(error)) from error
    finally:
        graph.end_capture()
    return result, graph.replay
