"""Weights over a process group: the trainer is rank 0 and broadcasts, every server is another rank and receives.

Used by both ends.  The order of tensors and the packing are those of vLLM's NCCL transfer: tensors one by one, or
packed, as the concatenated bytes of several.  Names, dtypes and shapes are sent over HTTP; only bytes are sent here,
and nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from .errors import TransferError, WeightsError
from .rendezvous import Meeting, Rendezvous

PACKED_BYTES = 1 << 30  # a packed buffer ends with the tensor that brings it above this
FIRST_PAUSE, LONGEST_PAUSE = 1e-4, 0.05  # seconds between two questions whether a card is done
PROBE = 5.0  # seconds until a connection attempt fails
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,  # parts of quantized weights
    )
}
Declared = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape
T = TypeVar("T")


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return distributed.ProcessGroupGloo(store, rank, size, timeout)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    os.environ.setdefault(ERROR_HANDLING, "0")  # torch reads it now, and by default ends the process on a timeout
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)


BACKENDS: dict[str, tuple[Callable[..., Any], str]] = {"gloo": (_gloo, "cpu"), "nccl": (_nccl, "cuda")}
OWN = Rendezvous()
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ON_A_CARD = ("nccl",)  # backends whose tensors are on a GPU at both ends


class TransferGroup:
    """A process group, independent of any other in this process.  The constructor blocks until all ranks have joined;
    `interrupted`, set from another thread, ends the wait for rank 0.  `rendezvous`: how the other ranks are found.

    Raises WeightsError for an unknown backend or one that this build of torch lacks, TransferError if the others do
    not join.
    """

    def __init__(
        self,
        backend: str,
        address: str,
        port: int,
        rank: int,
        size: int,
        timeout: float,
        interrupted: threading.Event | None = None,
        rendezvous: Rendezvous = OWN,
    ) -> None:
        if backend not in BACKENDS:
            raise WeightsError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}", field="backend")
        make, device = BACKENDS[backend]
        if not getattr(distributed, f"is_{backend}_available")():
            raise WeightsError(f"this build of torch has no {backend}", field="backend")
        if backend in ON_A_CARD and not torch.cuda.is_available():
            raise WeightsError(f"{backend} needs a CUDA device, and there is none here: use gloo", field="backend")
        self.device = torch.device(device)
        self._backend = backend
        self._interrupted = interrupted or threading.Event()
        self._broken = False
        self._announces_sizes = rendezvous.announces_sizes and backend not in ON_A_CARD
        self._timeout, patience = timeout, timedelta(seconds=timeout)
        if rank:
            self._await_listener(address, port, timeout)
        try:
            store = rendezvous.store(Meeting(address, port, rank, size, patience), device, self._interrupted)
            self._group = make(store, rank, size, patience)
            if rendezvous.kind == "tokserve":  # fails now if the ranks cannot communicate
                self.broadcast(torch.zeros(1, device=self.device))
            elif rendezvous.kind == "vllm":  # its ranks add one number up
                ones = torch.zeros(1, device=self.device)
                self._await(self._group.allreduce([ones]), ones)
        except (RuntimeError, ValueError) as error:  # raised by torch.distributed
            raise TransferError(
                f"the {backend} group at {address}:{port} could not be formed: {_first(error)}"
            ) from None

    def _await_listener(self, address: str, port: int, timeout: float) -> None:
        """Wait until rank 0 listens: the store would wait, too, but could not be interrupted."""
        end = time.monotonic() + timeout
        while True:
            try:
                socket.create_connection((address, port), PROBE).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise TransferError(
                        f"the {self._backend} group at {address}:{port} could not be formed: {error.strerror or error}"
                    ) from None
            if self._interrupted.wait(0.05):
                raise TransferError("the transfer was interrupted")

    def broadcast(self, tensor: Tensor) -> None:
        """Send (rank 0) or receive `tensor`.  Raises TransferError; the group is unusable afterwards.

        Between two ends of this package the size is sent first over gloo, which would abort the process if a message
        were longer than expected, and leave the rest of the tensor unchanged if it were shorter.
        """
        if self._broken:
            raise TransferError("the process group is broken: initialise the transfer engine again")
        if self._announces_sizes:
            size = torch.tensor([tensor.nbytes])
            self._broadcast(size)
            if int(size) != tensor.nbytes:
                self.close()
                raise TransferError(
                    f"the sender sends {int(size)} bytes where {tensor.nbytes} were announced: both ends must agree on "
                    "names, dtypes, shapes, their order, packed and packed_buffer_size_bytes"
                )
        self._broadcast(tensor)

    def _broadcast(self, tensor: Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._broken = True  # until it is complete
        try:
            self._await(self._group.broadcast([tensor], options), tensor)
        except RuntimeError as error:
            raise TransferError(f"the other end of the transfer has gone: {_first(error)}") from None
        self._broken = False

    def _await(self, work: Any, tensor: Tensor) -> None:
        """Wait until `work`, which fills `tensor`, is over; not by `work.wait()`, which only the sender could end."""
        if self._backend in ON_A_CARD:
            return self._await_nccl(work)
        over = threading.Event()
        work.get_future().add_done_callback(lambda _: over.set())
        while not over.wait(0.05):
            if self._interrupted.is_set():
                threading.Thread(target=_await_abandoned, args=(self._group, work, tensor), daemon=True).start()
                self._group = None
                raise TransferError("the transfer was interrupted")
        work.wait()

    def _await_nccl(self, work: Any) -> None:
        """NCCL's future is complete as soon as the work is enqueued, and `wait` makes the stream wait, and what follows
        in it: the work is asked instead.  What does not end is aborted, which frees the tensor's memory for others."""
        end, pause = time.monotonic() + self._timeout, FIRST_PAUSE
        while not work.is_completed():
            late = time.monotonic() > end
            if late or self._interrupted.wait(pause):
                self._group.abort()
                self._group = None
                raise TransferError("the other end is silent" if late else "the transfer was interrupted")
            pause = min(2 * pause, LONGEST_PAUSE)
        work.wait()

    def interrupt(self) -> None:
        """Make a waiting broadcast fail; for other threads."""
        self._interrupted.set()

    def close(self) -> None:
        self._broken = True
        self._group = None


def _await_abandoned(group: Any, work: Any, tensor: Tensor) -> None:
    """Keep the memory that an abandoned broadcast still writes to, until it has timed out."""
    try:
        work.wait()
    except RuntimeError:
        return


def _first(error: Exception) -> str:
    """The message's first line, without torch's source position."""
    return str(error).partition("\n")[0].rpartition("] ")[2][:300] or type(error).__name__


def batches(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Pack items: a batch ends with the item that brings it above `limit` bytes."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total > limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def num_bytes(declared: Declared) -> int:
    _, dtype, shape = declared
    return math.prod(shape) * dtype.itemsize


def receive_tensors(
    group: TransferGroup, declared: Sequence[Declared], *, packed: bool, buffer_bytes: int = PACKED_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) in the order of `declared`; each tensor is valid until the next one is requested."""
    if not packed:
        for name, dtype, shape in declared:
            tensor = torch.empty(shape, dtype=dtype, device=group.device)
            group.broadcast(_sendable(tensor))
            yield name, tensor
        return
    for batch in batches(declared, num_bytes, buffer_bytes):
        sizes = [num_bytes(entry) for entry in batch]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
        group.broadcast(buffer)
        for (name, dtype, shape), part in zip(batch, torch.split(buffer, sizes), strict=True):
            aligned = part if part.data_ptr() % dtype.itemsize == 0 else part.clone()
            yield name, aligned.view(dtype).view(shape)


def send(group: TransferGroup, tensors: Iterable[Tensor], *, packed: bool, buffer_bytes: int = PACKED_BYTES) -> None:
    """Send tensors to `receive` on the other ranks.  What is no list is read one tensor at a time: each is copied or
    sent before the next is requested."""
    stay = not packed or isinstance(tensors, list | tuple)
    ready = (tensor.detach().to(group.device, copy=not stay).contiguous() for tensor in tensors)
    if not packed:
        for tensor in ready:
            group.broadcast(_sendable(tensor))
        return
    flat = (tensor.view(-1).view(torch.uint8) for tensor in ready)
    for batch in batches(flat, Tensor.numel, buffer_bytes):
        group.broadcast(torch.cat(batch))


def _sendable(tensor: Tensor) -> Tensor:
    """A tensor of a type that process groups do not support, as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
