"""Tensors that a process of this machine and of this user shares: in POSIX shared memory, or in a GPU's by CUDA IPC.

What is said is checked before memory is mapped, and what was mapped is given back before the reply.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tokserve.base.errors import RequestError, TransferFailed
from tokserve.features.weights.weight_sources import Announcement, SharedAllocation, shared_memory
from tokserve.rl.broadcast import Declared, num_bytes
from tokserve.rl.cuda_driver import HANDLE_BYTES, CudaDriver, CudaError, DeviceContext, load_driver

HANDLES, OFFSETS = "update_info.ipc_handles", "update_info.offsets"
PROCESSES = Path("/proc")


@contextmanager
def local_tensors(
    announced: Announcement, declared: Sequence[Declared], device: torch.device
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """(name, tensor), each valid until the next one is taken: views of a segment, or copies on `device` of what lies in
    a GPU's memory, which is mapped in the block.  Raises RequestError that names the field, TransferFailed."""
    if announced.ipc_handles is None:
        yield shared_memory(announced, declared)
        return
    shared, driver = announced.ipc_handles, _driver()
    if len(shared) not in (1, len(declared)):
        raise RequestError("ipc_handles has one entry for all names, or one for each", field=HANDLES)
    if announced.offsets is None or len(announced.offsets) != len(declared):
        raise RequestError("ipc_handles need an offset for every name", field=OFFSETS)
    entries = shared * len(declared) if len(shared) == 1 else shared
    places = list(zip(declared, entries, announced.offsets, strict=True))
    for entry in shared:
        for allocation in entry.values():
            _check(allocation)
    for one, entry, offset in places:
        for allocation in entry.values():
            if not 0 <= offset <= allocation.size - num_bytes(one):
                raise RequestError(
                    f"{one[0]}: bytes {offset} to {offset + num_bytes(one)} do not lie in the {allocation.size} of its "
                    "handle",
                    field=OFFSETS,
                )
    with ExitStack() as stack:
        memory = MappedMemory(stack, driver, device)
        maps = [(one, memory.place(entry), offset) for one, entry, offset in places]
        yield ((one[0], memory.copied(one, place, offset)) for one, place, offset in maps)


def _check(allocation: SharedAllocation) -> None:
    """Refuse what no process of this user can have exported."""
    try:
        is_handle = len(bytes.fromhex(allocation.handle)) == HANDLE_BYTES
    except ValueError:
        is_handle = False
    if not is_handle:
        raise RequestError(f"handle must be {2 * HANDLE_BYTES} hexadecimal digits", field=f"{HANDLES}.handle")
    if allocation.size <= 0:
        raise RequestError("size must be the number of bytes that were exported", field=f"{HANDLES}.size")
    if allocation.pid == os.getpid():
        raise RequestError("pid is this server's own process, whose handles it cannot open", field=f"{HANDLES}.pid")
    try:
        owner = (PROCESSES / str(allocation.pid)).stat().st_uid
    except OSError:
        raise RequestError(
            f"there is no process {allocation.pid} here: it has exited, or is in another container (which needs the "
            "same PID namespace)",
            field=f"{HANDLES}.pid",
        ) from None
    if owner != os.geteuid():
        raise RequestError(f"process {allocation.pid} is another user's", field=f"{HANDLES}.pid")


class MappedMemory:
    """Memory of other processes, mapped until `stack` is closed, each once; `device`: where copies go."""

    def __init__(self, stack: ExitStack, driver: CudaDriver, device: torch.device) -> None:
        self._stack, self._driver, self._device = stack, driver, device
        self._contexts: dict[int, DeviceContext] = {}
        self._mapped: dict[tuple[int, str], int] = {}

    def place(self, entry: dict[str, SharedAllocation]) -> tuple[DeviceContext, int]:
        """Where the memory is: that of the copies' GPU if it is among them, else of another that is seen here."""
        numbers = {self._number(name): allocation for name, allocation in entry.items()}
        seen = sorted(number for number in numbers if number is not None)
        if not seen:
            names = ", ".join(sorted(entry)) or "no GPU"
            raise RequestError(
                f"the handles are of {names[:300]}, and this server sees "
                + ", ".join(str(one) for one in self._driver.devices),
                field=HANDLES,
            )
        number = self._device.index if self._device.index in seen else seen[0]
        allocation = numbers[number]
        context = self._context(number)
        key = number, allocation.handle
        if key not in self._mapped:
            self._mapped[key] = self._map(context, allocation)
        return context, self._mapped[key]

    def copied(self, declared: Declared, place: tuple[DeviceContext, int], offset: int) -> Tensor:
        """A copy of a tensor that lies there."""
        name, dtype, shape = declared
        context, address = place
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        try:
            if tensor.nbytes:
                context.copy(tensor.data_ptr(), address + offset, tensor.nbytes)
        except CudaError as error:
            raise TransferFailed(f"{name} could not be copied: {error.message}", field=HANDLES) from None
        return tensor

    def _number(self, name: str) -> int | None:
        """The number of the GPU with a UUID, which may begin as nvidia-smi shows it; None: there is none here."""
        try:
            return self._driver.devices.get(uuid.UUID(name.removeprefix("GPU-").removeprefix("MIG-")))
        except ValueError:
            raise RequestError(f"{name[:100]!r} is not the UUID of a GPU", field=HANDLES) from None

    def _context(self, number: int) -> DeviceContext:
        if number not in self._contexts:
            self._contexts[number] = DeviceContext(self._driver, number)
            self._stack.callback(self._contexts[number].close)
        return self._contexts[number]

    def _map(self, context: DeviceContext, allocation: SharedAllocation) -> int:
        try:
            address = context.open(bytes.fromhex(allocation.handle))
        except CudaError as error:
            raise RequestError(
                f"the handle cannot be opened: {error.message}; it has expired (the memory was freed), or is no handle "
                f"of process {allocation.pid}",
                field=f"{HANDLES}.handle",
            ) from None
        self._stack.callback(context.unmap, address)
        try:
            size = context.size_from(address)
        except CudaError:  # a driver that does not say: what is out of bounds fails when it is copied
            return address
        if size < allocation.size:
            raise RequestError(f"size is {allocation.size}, and the memory has {size} bytes", field=f"{HANDLES}.size")
        return address


def _driver() -> CudaDriver:
    try:
        return load_driver()
    except CudaError as error:
        raise RequestError(
            f"{error.message}; without a GPU give segment and offsets, or send a safetensors file (docs/rl.md)",
            field=HANDLES,
        ) from None
