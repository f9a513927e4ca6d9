"""Gluon kernels run without a GPU: their functions in Python, over torch's tensors, with a thread for each role.

Gluon has no interpreter.  Layouts mean nothing here, barriers are real ones: a role that waits for what no other does
hangs, and a tile that is taken too early, or given back too early, shows in the result.  Products are those of torch.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

PATIENCE = 10.0  # seconds for which a role may wait


class Forever(Exception):
    """A role waits for what no other does."""


class Pointer:
    """An address, or a tensor of them, in a flat tensor."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, past: Any) -> Pointer:
        return Pointer(self.memory, self.at + past)


class Shared:
    """Shared memory."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.shape = memory, memory.shape

    def index(self, number: int) -> Shared:
        return Shared(self.memory[number])

    def slice(self, first: int, size: int, axis: int) -> Shared:
        return Shared(self.memory.narrow(axis, first, size))

    def permute(self, axes: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(axes))

    def load(self, layout: object) -> Tensor:
        return self.memory.clone()

    def store(self, values: Tensor) -> None:
        self.memory.copy_(values)


class Barrier:
    """A phase ends when `count` have arrived; one waits for the end of a phase by its parity."""

    def __init__(self) -> None:
        self.phase, self.count, self.missing, self.changed = 0, 0, 0, threading.Condition()
        self.bytes = 0  # that are on their way

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, expected: int = 0) -> None:
        self._come(1, expected)

    def receive(self, size: int) -> None:
        self._come(0, -size)

    def _come(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.missing, self.bytes = self.missing - arrivals, self.bytes + size
            if self.missing == 0 and self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE):
                raise Forever


class Barriers(list[Barrier]):
    """An array of them in shared memory."""

    def index(self, number: Any) -> Barrier:  # type: ignore[override]
        return self[number]


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0, cache_modifier: str = "") -> Tensor:
    at = torch.as_tensor(pointer.at)
    if mask is None:
        return pointer.memory[at]
    return pointer.memory[at.where(mask, 0)].where(mask, other)


def store(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
    where = mask.expand(pointer.at.shape)
    pointer.memory[pointer.at[where]] = values[where]


def product(left: Any, right: Shared, sums: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    left = left.memory if isinstance(left, Shared) else left
    products = left.float() @ right.memory.float()
    return sums + products if use_acc else products


def specialize(roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *sizes: object) -> None:
    """Run the roles side by side."""
    with ThreadPoolExecutor(len(roles)) as threads:
        playing = [threads.submit(role, *arguments) for role, arguments in roles]
    failures = [one.exception() for one in playing if one.exception() is not None]
    for failure in sorted(failures, key=lambda one: isinstance(one, Forever)):  # who waits is not to blame
        raise failure


def is_last_of(count: Pointer, amount: int, total: int) -> bool:
    """`launch.is_last_of`, of programs that come one after the other."""
    count.memory[count.at] += amount
    is_last = bool(count.memory[count.at] == total)
    if is_last:
        count.memory[count.at] = 0
    return is_last


def extreme(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda one, other: choose(torch.as_tensor(one), torch.as_tensor(other))


def added(x: Tensor, axis: int) -> Tensor:
    """The sums along an axis: of two floats, one addition; of integers any number."""
    assert x.shape[axis] <= 2 or not x.dtype.is_floating_point
    return x.sum(axis)


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.reshape(*shape)


LANGUAGE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "arange": lambda first, end, layout: torch.arange(first, end),
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "zeros_like": torch.zeros_like,
    "load": load,
    "store": store,
    "sum": added,
    "max": lambda x, axis: x.amax(axis),
    "reshape": reshaped,
    "minimum": extreme(torch.minimum),
    "maximum": extreme(torch.maximum),
    "where": torch.where,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expand_dims": torch.unsqueeze,
    "convert_layout": lambda x, layout: x,
    "static_range": range,
    "constexpr": lambda value: value,
    "allocate_shared_memory": lambda dtype, shape, layout: (
        Barriers(Barrier() for _ in range(shape[0]))
        if dtype == torch.int64
        else Shared(torch.full(shape, torch.nan, dtype=dtype))  # as memory may hold
    ),
    "warp_specialize": specialize,
    **dict.fromkeys(
        ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"), lambda *sizes: None
    ),
}
BARRIERS = SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: barrier.init(count),
    expect=lambda barrier, size: barrier.arrive(size),
    wait=lambda barrier, parity: barrier.wait(int(parity)),
    arrive=lambda barrier, count: barrier.arrive(),
)


def fetch(blocks: Any, at: Sequence[Any], barrier: Barrier, into: Shared) -> None:
    """A block of a described matrix, complete when the barrier's phase ends; zeros past the matrix's edge."""
    (rows, columns), into.memory[:] = blocks.block_shape, 0
    block = blocks.base[at[0] : at[0] + rows, at[1] : at[1] + columns]
    into.memory[: len(block), : block.shape[1]] = block
    barrier.receive(blocks.block_type.nbytes)


class Emulated:
    """Stands for a kernel: launched the same way, it runs here, one program after the other."""

    def __init__(self, kernel: KernelInterface[Any]) -> None:
        self.runs = 0
        self._program, self._grid = (0,), (1,)  # the one that runs, and how many there are
        names = {
            "program_id": lambda axis: self._program[axis],
            "num_programs": lambda axis: self._grid[axis],
        }
        self._language = SimpleNamespace(**LANGUAGE | names)
        self._call = self._emulated(kernel)

    def _emulated(self, kernel: KernelInterface[Any]) -> FunctionType:
        """The kernel's function, and those that it calls, in surroundings that are this module's."""
        surroundings: dict[str, Any] = {}
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, KernelInterface) and name in kernel.fn.__code__.co_names:
                surroundings[name] = self._emulated(value)
            elif type(value).__name__ == "constexpr":
                surroundings[name] = value.value
        surroundings |= {
            "gl": self._language,
            "tl": self._language,
            "range": range,
            "mbarrier": BARRIERS,
            "fetch": fetch,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": product,
            "warpgroup_mma_wait": lambda outstanding, deps: deps[0],
            "mma_v2": lambda left, right, sums: sums + left.float() @ right.float(),
            "wait_for_inputs": lambda dependent: None,
            "launch_dependents": lambda dependent: None,
            "is_last_of": is_last_of,
        }
        # functions name those that they call as arguments, too: all roles of a kernel
        return FunctionType(kernel.fn.__code__, surroundings, closure=kernel.fn.__closure__)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: object) -> None:
            self.runs, self._grid = self.runs + 1, grid
            for number in itertools.product(*map(range, grid)):
                self._program = number
                self._call(*map(of_device, arguments))

        return launch


def of_device(argument: Any) -> Any:
    """What the kernel sees of an argument."""
    if isinstance(argument, Tensor):
        memory = argument.as_strided((argument.untyped_storage().size() // argument.element_size(),), (1,), 0)
        return Pointer(memory, argument.storage_offset())
    if hasattr(argument, "block_shape"):
        block = SimpleNamespace(nbytes=math.prod(argument.block_shape) * argument.base.element_size())
        return SimpleNamespace(
            base=argument.base,
            block_shape=argument.block_shape,
            block_type=block,
            dtype=argument.base.dtype,
            layout=None,
        )
    return argument
