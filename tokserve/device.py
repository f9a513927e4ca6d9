"""The device under the ops: its name, its threads, its memory, and how values get there and back.

Nothing else may ask the machine what it is.  This file must not know what runs on the device.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.cpu_list import cpu_list
from tokserve.errors import StartError

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
CPUS = Path("/proc/cpuinfo")
NODES = Path("/sys/devices/system/node")
STAGES = 4  # copies to a GPU that may be under way at once
LEAST_CAPABILITY = (8, 0)  # of a GPU: bfloat16 in the matrix unit
FLOAT8_CAPABILITY = (8, 9)
ALIGN = 16  # bytes
NO_LIMIT = 1 << 60  # cgroups version 1 writes about 2^63 for no limit


def name() -> str:
    """What the maker calls the processor."""
    lines = CPUS.read_text(encoding="utf-8").splitlines() if CPUS.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def set_threads(count: int | None) -> int:
    """Let torch compute with `count` threads, by default one per core this process may use; returns the number."""
    threads = count or len(os.sched_getaffinity(0))
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
    allowed = os.sched_getaffinity(0)
    lists = [path.read_text(encoding="utf-8").strip() for path in sorted(NODES.glob("node[0-9]*/cpulist"), key=_number)]
    nodes = [[cpu for cpu in cpu_list(text) if cpu in allowed] for text in lists if text]
    if len([node for node in nodes if node]) < 2 or threads != len(allowed):
        return []
    return [cpu for node in nodes for cpu in node]


def _number(path: Path) -> int:
    return int(path.parent.name.removeprefix("node"))


def give_back_memory() -> None:
    """Return memory that the C allocator holds unused to the system, where the allocator can (glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def free_memory() -> int:
    """Bytes this process can still take: what the machine has available, within the container's limit."""
    return max(0, min([psutil.virtual_memory().available, *_room_in_cgroups()]))


def _room_in_cgroups() -> list[int]:
    """Limit minus use, in bytes, of each control group around this process that has a limit."""
    if not OWN_CGROUP.is_file():
        return []
    rooms = []
    for line in OWN_CGROUP.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, use = CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, use = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(root):
                rooms += _room(directory, limit, use)
    return rooms


def _room(directory: Path, limit: str, use: str) -> list[int]:
    if not ((directory / limit).is_file() and (directory / use).is_file()):
        return []
    most = (directory / limit).read_text(encoding="utf-8").strip()
    if most == "max" or int(most) >= NO_LIMIT:
        return []
    return [int(most) - int((directory / use).read_text(encoding="utf-8")) + _reclaimable(directory / "memory.stat")]


def _reclaimable(statistics: Path) -> int:
    """Bytes of file cache that count as used but are given up on demand."""
    if not statistics.is_file():
        return 0
    pairs = dict(line.split(" ", 1) for line in statistics.read_text(encoding="utf-8").splitlines() if " " in line)
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", "0")))


class Fetched(Protocol):
    """Tensors on their way to the host."""

    def arrays(self) -> list[NDArray[Any]]:
        """Their values; waits until they are there.  Any thread may ask, and ask again."""


class Device(Protocol):
    """Where the runner's tensors are.

    `staged`: in memory of its own, and work is done some time after the call.  `has_float8`: it multiplies float8
    (e4m3) by instructions of its own.
    """

    torch_device: torch.device
    staged: bool
    has_float8: bool

    def free_memory(self) -> int:
        """Bytes that can still be taken.  Any thread may ask."""

    def give_back_memory(self) -> None:
        """Return memory that is held but not used, here and on the host.  Any thread may ask."""

    def require_float8(self, option: str) -> None:
        """Raise StartError, naming the option, if kernels cannot compute with float8 (e4m3) here."""

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes at most while it runs, beyond what is taken now."""

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The arrays as tensors, in one copy if they have to be copied.  They are the caller's again at once."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Begin to copy out what the tensors hold once all work so far is done."""

    def pool(self) -> Any:
        """Memory for captures of which one at a time is repeated."""

    def capture(self, run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
        """`run` to be repeated at little cost: each call computes anew, from and into the same memory of a `pool`."""


@dataclass(frozen=True, slots=True)
class _There:
    values: list[NDArray[Any]]

    def arrays(self) -> list[NDArray[Any]]:
        return self.values


class Host:
    """The CPU: a tensor is an array, work is done when the call returns."""

    torch_device = torch.device("cpu")
    staged = False
    has_float8 = False

    def free_memory(self) -> int:
        return free_memory()

    def give_back_memory(self) -> None:
        give_back_memory()

    def require_float8(self, option: str) -> None:
        pass  # what has no instructions for it converts

    def peak(self, run: Callable[[], object]) -> int:
        return 0  # the caller takes what it needs as it goes

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        return _There([tensor.numpy() for tensor in tensors])

    def pool(self) -> Any:
        return None

    def capture(self, run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
        return run


@dataclass(slots=True)
class _Stage:
    """A pinned buffer, and the end of its last copy."""

    buffer: Tensor  # [bytes] uint8
    copied: torch.cuda.Event


class Cuda:
    """The current NVIDIA GPU.  Plans run on one stream; what is fetched leaves on another, so nothing waits for it."""

    staged = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise StartError("option device: no GPU is usable here (torch.cuda.is_available() is false); try cpu")
        _require(LEAST_CAPABILITY, "device")
        self.has_float8 = torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._out = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stages = [self._stage(1 << 16) for _ in range(STAGES)]
        self._next = 0
        self._capturing = threading.Lock()

    def _stage(self, size: int) -> _Stage:
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return _Stage(buffer, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def require_float8(self, option: str) -> None:
        _require(FLOAT8_CAPABILITY, option)

    def free_memory(self) -> int:
        self._empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def give_back_memory(self) -> None:
        self._empty_cache()
        give_back_memory()

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
        places, size = pack(arrays)
        self._next = (self._next + 1) % STAGES
        stage = self._stages[self._next]
        stage.copied.synchronize()  # of the copy STAGES calls ago
        if size > len(stage.buffer):
            stage = self._stages[self._next] = self._stage(2 * size)
        fill(stage.buffer, arrays, places)
        staged = stage.buffer[:size].to(self.torch_device, non_blocking=True)
        stage.copied.record()
        return views(staged, arrays, places)

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
        return _Leaving(copies, done)

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


def _require(least: tuple[int, int], option: str) -> None:
    if torch.cuda.get_device_capability() < least:
        name, wanted = torch.cuda.get_device_name(), ".".join(map(str, least))
        raise StartError(f"option {option}: {name} is older than compute capability {wanted}")


@dataclass(frozen=True, slots=True)
class _Leaving:
    copies: list[Tensor]
    done: torch.cuda.Event

    def arrays(self) -> list[NDArray[Any]]:
        self.done.synchronize()
        return [copy.numpy() for copy in self.copies]


def pack(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Where each array begins in one buffer, aligned for any dtype and a GPU's wide loads, and the buffer's size."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-array.nbytes // ALIGN) * ALIGN
    return places, max(size, ALIGN)


def fill(buffer: Tensor, arrays: Sequence[NDArray[Any]], places: list[int]) -> None:
    """Copy the arrays to their places in a uint8 buffer of the host."""
    target = buffer.numpy()
    for array, place in zip(arrays, places, strict=True):
        target[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(buffer: Tensor, arrays: Sequence[NDArray[Any]], places: list[int]) -> list[Tensor]:
    """Tensors of the arrays' shapes and dtypes at their places in a uint8 buffer."""
    found = []
    for array, place in zip(arrays, places, strict=True):
        part = buffer[place : place + array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        found.append(part.view(array.shape))
    return found


def use(kind: str) -> Device:
    """The device of that kind.  Raises StartError where it cannot be used."""
    return Cuda() if kind == "cuda" else Host()
