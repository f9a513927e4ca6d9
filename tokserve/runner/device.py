"""The device under the ops: its name, its threads, its memory, and how values get there and back."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.base import cgroups
from tokserve.base.cpu_list import cpu_list, cpus_by_node
from tokserve.base.errors import StartError
from tokserve.base.memory import give_back

logger = logging.getLogger(__name__)

CPUS = Path("/proc/cpuinfo")
NUM_BUFFERS = 64  # copies to a GPU that may be under way at once: two steps, with as many processors as there are
MIN_CAPABILITY = (8, 0)  # of a GPU: bfloat16 in the matrix unit
FLOAT8_CAPABILITY = (8, 9)
ALIGN = 16  # bytes


def name() -> str:
    """The processor's name."""
    lines = CPUS.read_text(encoding="utf-8").splitlines() if CPUS.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def set_threads(count: int | None) -> int:
    """Let torch compute with `count` threads, by default as many as can run at once; returns the number."""
    threads = count or cgroups.usable_cpus()
    torch.set_num_threads(threads)
    return threads


def bound_cpus(option: str, threads: int) -> list[int]:
    """CPUs for the threads of the kernels, one each, node by node; empty: the threads are not bound.

    `option` is `cpu_bind`: with `auto` threads are bound where there are several memory nodes and a thread for each CPU
    this process may use, so that memory which a thread touched first stays near it.
    """
    if option == "none":
        return []
    if option != "auto":
        return cpu_list(option)
    nodes = cpus_by_node()
    if len(nodes) < 2 or threads != len(os.sched_getaffinity(0)):
        return []
    return [cpu for node in nodes for cpu in node]


def free_memory() -> int:
    """Bytes this process can still take: what the machine has available, within the container's limit."""
    return max(0, min([psutil.virtual_memory().available, *(limit.free for limit in cgroups.memory_limits())]))


class MemoryBound(NamedTuple):
    """Bytes that the host's processes can still take, swapping included, of how many, whose bound that is, and what to
    do about it."""

    free: int
    limit: int
    owner: str
    remedy: str


def memory_bound() -> MemoryBound:
    """The tightest one for this process."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    machine = MemoryBound(
        memory.available + swap.free, memory.total + swap.total, "this machine's memory", "more memory"
    )
    owner, remedy = "the container's limit (cgroup)", "a larger limit"
    groups = [MemoryBound(max(0, free), limit, owner, remedy) for limit, free in cgroups.memory_limits()]
    return min([machine, *groups])


class Fetched(Protocol):
    """Tensors on their way to the host."""

    def arrays(self) -> list[NDArray[Any]]:
        """Their values; waits until they are there.  Any thread may call it, and again."""


class Device(Protocol):
    """Where the runner's tensors are.  `has_float8`: it multiplies float8 (e4m3) by instructions of its own."""

    torch_device: torch.device
    has_float8: bool

    def free_memory(self) -> int:
        """Bytes that can still be taken.  From any thread."""

    def give_back_memory(self) -> None:
        """Return memory that is held but not used, here and on the host.  From any thread."""

    def require_float8(self, option: str) -> None:
        """Raise StartError, naming the option, if kernels cannot compute with float8 (e4m3) here."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Begin to copy out what the tensors hold once all work so far is done."""


@runtime_checkable
class Accelerator(Device, Protocol):
    """A device with memory of its own, where work is done some time after the call."""

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes at most while it runs, beyond what is taken now."""

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The arrays as tensors, in one copy.  They are the caller's again at once."""

    def beside(self) -> AbstractContextManager[None]:
        """What this thread, not that of the steps, does meanwhile is done beside the steps, after those begun."""

    def join(self) -> None:
        """Let later steps wait for what was done beside them, and what is done there later for the steps so far."""

    def wait(self) -> None:
        """Wait for what was done beside the steps."""

    def pin(self, memory: NDArray[Any]) -> None:
        """Let copies reach the host's memory without the detour through a buffer, while the process lives."""

    def pool(self) -> Any:
        """Memory for captures of which one at a time is replayed."""

    def capture(self, run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
        """`run` to be replayed at little cost: each call computes anew, from and into the same memory of a `pool`."""


@dataclass(frozen=True, slots=True)
class _OnHost:
    values: list[NDArray[Any]]

    def arrays(self) -> list[NDArray[Any]]:
        return self.values


class Host:
    """The CPU: a tensor is an array, work is done when the call returns."""

    torch_device = torch.device("cpu")
    has_float8 = False

    def free_memory(self) -> int:
        return free_memory()

    def give_back_memory(self) -> None:
        give_back()

    def require_float8(self, option: str) -> None:
        pass  # what has no instructions for it converts

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        return _OnHost([tensor.numpy() for tensor in tensors])


@dataclass(slots=True)
class PinnedBuffer:
    """Host memory that a GPU copies from, and the end of its last copy."""

    memory: Tensor  # [bytes] uint8
    copied: torch.cuda.Event


class Cuda:
    """The current NVIDIA GPU.  Plans run on one stream; what is fetched leaves on another, so nothing waits for it."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise StartError("option device: no GPU is usable here (torch.cuda.is_available() is false); try cpu")
        _require(MIN_CAPABILITY, "device")
        self.has_float8 = torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._out = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._steps, self._side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._buffers: deque[PinnedBuffer] = deque()  # in the order of their last copies
        self._capturing = threading.Lock()

    def _buffer(self, size: int) -> PinnedBuffer:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return PinnedBuffer(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def require_float8(self, option: str) -> None:
        _require(FLOAT8_CAPABILITY, option)

    def free_memory(self) -> int:
        self._empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def give_back_memory(self) -> None:
        self._empty_cache()
        give_back()

    def _empty_cache(self) -> None:
        with self._capturing:  # torch gives nothing back meanwhile, but raises
            torch.cuda.empty_cache()

    def peak(self, run: Callable[[], object]) -> int:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        offsets, size = pack(arrays)
        buffer = self._idle_buffer()
        if size > len(buffer.memory):
            buffer = self._buffer(2 * size)
        self._buffers.append(buffer)
        fill(buffer.memory, arrays, offsets)
        copied = buffer.memory[:size].to(self.torch_device, non_blocking=True)
        buffer.copied.record()
        return views(copied, arrays, offsets)

    def _idle_buffer(self) -> PinnedBuffer:
        """The buffer whose copy was begun first, if it is done; a new one rather than to wait for it."""
        if len(self._buffers) < NUM_BUFFERS and not (self._buffers and self._buffers[0].copied.query()):  # type: ignore[no-untyped-call]
            return self._buffer(1 << 16)
        buffer = self._buffers.popleft()
        buffer.copied.synchronize()
        return buffer

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            copies = []
            for tensor in tensors:
                tensor.record_stream(self._out)
                copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                copies[-1].copy_(tensor, non_blocking=True)
            done.record()
        return _CopyInFlight(copies, done)

    @contextmanager
    def beside(self) -> Iterator[None]:
        torch.cuda.set_device(self.torch_device)  # a thread begins with the first
        self._side.wait_stream(self._steps)
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        self._steps.wait_stream(self._side)
        self._side.wait_stream(self._steps)

    def wait(self) -> None:
        self._side.synchronize()

    def pin(self, memory: NDArray[Any]) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if error:
            logger.warning("%d bytes of memory are not pinned (CUDA error %d): copies are slower", memory.nbytes, error)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()  # torch does not take one again whose graphs are all gone

    def capture(self, run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
        run()  # compiles, and sets up what libraries set up at their first call
        graph = torch.cuda.CUDAGraph()
        # other threads (of a weight transfer) may wait for the GPU meanwhile
        with self._capturing, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def _require(minimum: tuple[int, int], option: str) -> None:
    if torch.cuda.get_device_capability() < minimum:
        name, version = torch.cuda.get_device_name(), ".".join(map(str, minimum))
        raise StartError(f"option {option}: {name} is older than compute capability {version}")


@dataclass(frozen=True, slots=True)
class _CopyInFlight:
    copies: list[Tensor]
    done: torch.cuda.Event

    def arrays(self) -> list[NDArray[Any]]:
        self.done.synchronize()
        return [copy.numpy() for copy in self.copies]


def pack(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Where each array begins in one buffer, aligned for any dtype and a GPU's wide loads, and the buffer's size."""
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // ALIGN) * ALIGN
    return offsets, max(size, ALIGN)


def fill(buffer: Tensor, arrays: Sequence[NDArray[Any]], offsets: list[int]) -> None:
    """Copy the arrays to their offsets in a uint8 buffer of the host."""
    target = buffer.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        target[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(buffer: Tensor, arrays: Sequence[NDArray[Any]], offsets: list[int]) -> list[Tensor]:
    """Tensors of the arrays' shapes and dtypes at their offsets in a uint8 buffer."""
    tensors = []
    for array, offset in zip(arrays, offsets, strict=True):
        part = buffer[offset : offset + array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        tensors.append(part.view(array.shape))
    return tensors


def gpu_and_compiler(home: torch.device) -> tuple[str, ...]:
    """What the bits of results on a GPU depend on besides kernels; nothing for a CPU, whose kernels are compiled."""
    if home.type == "cpu":
        return ()
    return torch.cuda.get_device_name(home), torch.__version__, importlib.metadata.version("triton")


def use(kind: str) -> Device:
    """The device of that kind.  Raises StartError where it cannot be used."""
    return Cuda() if kind == "cuda" else Host()
