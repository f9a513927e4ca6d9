"""The trainer's end of CUDA IPC: tensors lie packed in a GPU's memory, which the server's process maps and copies.

The memory is the driver's, not that of torch's allocator: so `expandable_segments` does not matter, and nothing that
torch reuses is shared.  What is sent is JSON: a handle, and the tensors' places.
"""

from __future__ import annotations

import asyncio
import os
import struct
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from .connection import Connection
from .cuda_driver import DeviceContext, load_driver
from .errors import TransferError
from .push import PushResult
from .pusher import Pusher
from .weight_pairs import Weights
from .weight_routes import WeightRoutes

ALIGN = 256  # bytes: of each tensor's place
GOES_ON, FAILED = 0, 1
ROW = struct.Struct("<BI16s64sQQ")  # what a rank tells the others: state, digest of the call, UUID, handle, size, pid
NO_MEMORY = (bytes(16), bytes(64), 0, 0)


@dataclass(frozen=True)
class CudaIpc:
    """`transport` of a push: through memory of a GPU of this machine, to a server of the same user.

    `device`: the GPU's number; default: the first tensor's, else torch's current one.  `group`: a group of
    torch.distributed whose ranks all push the same tensors (a sharded model's `full_tensor()`s, say), each from its own
    GPU; rank 0 of it calls the server, which reads each tensor from the GPU that it is on.
    """

    device: int | None = None
    group: Any = None


class SharedBuffer:
    """Memory of a GPU that other processes can read, filled with tensors again and again; grows to what is needed."""

    def __init__(self, device: int | None) -> None:
        self._chosen = device
        self._context: DeviceContext | None = None
        self._address = self._size = 0
        self.row: tuple[bytes, bytes, int, int] = NO_MEMORY  # UUID, handle, size, process

    def fill(self, tensors: Sequence[Tensor]) -> list[int]:
        """Copy tensors into it; the place of each, in bytes.  Raises CudaError."""
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.nbytes // ALIGN) * ALIGN
        if self._context is None or size > self._size:
            self.close()
            self._allocate(max(size, ALIGN), _device(self._chosen, tensors))
        assert self._context is not None
        contiguous = [tensor.detach().contiguous() for tensor in tensors]
        for device in {tensor.device for tensor in contiguous if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        for tensor, offset in zip(contiguous, offsets, strict=True):
            if tensor.nbytes:
                self._context.copy(self._address + offset, tensor.data_ptr(), tensor.nbytes)
        return offsets

    def _allocate(self, size: int, device: int) -> None:
        driver = load_driver()
        owner = driver.uuid_of(device).bytes
        self._context = DeviceContext(driver, device)
        self._address = self._context.allocate(size)
        self._size = size
        self.row = owner, self._context.export(self._address), size, os.getpid()

    def close(self) -> None:
        """Free the memory, which no process may have open any more."""
        if self._context is not None:
            if self._address:
                self._context.free(self._address)
            self._context.close()
        self._context = None
        self._address = self._size = 0
        self.row = NO_MEMORY


def _device(chosen: int | None, tensors: Sequence[Tensor]) -> int:
    if chosen is not None:
        return chosen
    numbers = [tensor.device.index for tensor in tensors if tensor.is_cuda]
    return numbers[0] if numbers else torch.cuda.current_device() if torch.cuda.is_available() else 0


class PushingRanks:
    """The ranks that push together.  Each call of one is a call of all: so a rank that fails ends the others' push."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = 0 if group is None else distributed.get_rank(group)
        self.size = 1 if group is None else distributed.get_world_size(group)
        on_gpu = group is not None and distributed.get_backend(group) == "nccl"
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self._is_over = False

    def begin(self) -> None:
        """A push begins."""
        self._is_over = False

    async def meet(self, what: str, memory: tuple[bytes, bytes, int, int] = NO_MEMORY) -> list[tuple[Any, ...]]:
        """Wait until all ranks are here: (UUID, handle, size, process) of each one's memory.  Raises TransferError if
        one of them has failed, or does something else."""
        row = ROW.pack(GOES_ON, zlib.crc32(what.encode()), *memory)
        rows = await asyncio.to_thread(self._gather, row)
        failed = [rank for rank, other in enumerate(rows) if other[0] == FAILED]
        self._is_over = bool(failed) or len({other[1] for other in rows}) > 1
        if failed:
            raise TransferError(f"the push of rank {failed[0]} failed")
        if self._is_over:
            raise TransferError("the ranks push different tensors: names, dtypes, shapes and order have to be the same")
        return [other[2:] for other in rows]

    async def fail(self) -> None:
        """Tell the others that this rank's push has failed, if they do not know."""
        if self.size > 1 and not self._is_over:
            self._is_over = True
            await asyncio.to_thread(self._gather, ROW.pack(FAILED, 0, *NO_MEMORY))

    def _gather(self, row: bytes) -> list[tuple[Any, ...]]:
        if self.size == 1:
            return [ROW.unpack(row)]
        local = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self._device)
        rows = [torch.empty_like(local) for _ in range(self.size)]
        distributed.all_gather(rows, local, group=self._group)
        return [ROW.unpack(bytes(other.tolist())) for other in rows]


class IpcChannel(WeightRoutes):
    """The calls of updates whose tensors are read from GPUs' memory: rank 0's; the other ranks follow them."""

    has_group = False
    sends_on_device = True
    failures = (*WeightRoutes.failures, TransferError)

    def __init__(self, connection: Connection, transport: CudaIpc) -> None:
        super().__init__(connection)
        self.ranks = PushingRanks(transport.group)
        self._buffer = SharedBuffer(transport.device)

    @asynccontextmanager
    async def pushing(self) -> AsyncIterator[None]:
        """Around a push: the memory is freed at its end, and the other ranks learn that it failed."""
        self.ranks.begin()
        complete = False
        try:
            yield
            complete = True
        finally:
            self._buffer.close()
            if not complete:
                await self.ranks.fail()

    async def start(self, base: dict[str, Any]) -> dict[str, Any]:
        started = await self._led("start", partial(super().start, base))
        return started or {}

    async def finish(self, body: dict[str, Any]) -> dict[str, Any]:
        done = await self._led("finish", partial(super().finish, body))
        return done or await self.served_weights()

    async def abort(self, handle: dict[str, Any]) -> None:
        if self.ranks.rank == 0:
            await super().abort(handle)

    async def broadcast(
        self, announced: dict[str, Any], tensors: list[Tensor], *, packed: bool, handle: dict[str, Any]
    ) -> None:
        """Put tensors into memory that is shared, and have the server read them there."""
        offsets = await asyncio.to_thread(self._buffer.fill, tensors)
        shared = await self.ranks.meet(str(announced), self._buffer.row)
        places = {
            str(uuid.UUID(bytes=owner)): {"handle": memory.hex(), "size": size, "pid": process}
            for owner, memory, size, process in reversed(shared)
        }
        update = announced | {"offsets": offsets, "ipc_handles": [places]}
        await self._led("read", partial(self.announce, update, handle))

    async def _led(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """What rank 0's call returns, after which the others go on; None on these."""
        result = await call() if self.ranks.rank == 0 else None
        await self.ranks.meet(what)
        return result


class IpcPusher:
    """Pushes through GPUs' memory; the methods are those of `Pusher`."""

    def __init__(self, connection: Connection, transport: CudaIpc) -> None:
        self._channel = IpcChannel(connection, transport)
        self._pusher = Pusher(self._channel)

    async def push(
        self, weights: Weights, version: str | None, *, delta: bool, directory: str | Path | None, **options: Any
    ) -> PushResult:
        if self._channel.ranks.size > 1 and (delta or directory is not None):
            raise ValueError("deltas and directories are one rank's: push them without a group")
        async with self._channel.pushing():
            return await self._pusher.push(weights, version, delta=delta, directory=directory, **options)

    async def update(self, weights: Weights, version: str | None, *, recompute_kv: bool) -> dict[str, Any]:
        async with self._channel.pushing():
            return await self._pusher.update(weights, version, recompute_kv=recompute_kv)


def make_pusher(connection: Connection, transport: Any) -> IpcPusher:
    """The pushes over a `transport`: "cuda_ipc", or a `CudaIpc`.  Raises ValueError."""
    chosen = CudaIpc() if transport == "cuda_ipc" else transport
    if not isinstance(chosen, CudaIpc):
        raise ValueError(f'transport is "cuda_ipc" or a CudaIpc, got {transport!r}')
    return IpcPusher(connection, chosen)
