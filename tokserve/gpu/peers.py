"""Memory of a GPU that the ranks on the other GPUs of this machine have mapped, and what they exchange through it.

A rank takes memory from the driver, shows the others its handle (CUDA IPC), and maps theirs.  Where one of them cannot,
on another machine or without access between the GPUs, none does, and NCCL is used.  The exchanges are kernels
(`kernels/ranks/exchange`): nothing waits on the host, so they may be part of a recorded step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tokserve.gpu.kernels.ranks.exchange import Inboxes, as_words, exchange, header_bytes, inbox_bytes
from tokserve.rl.cuda_driver import CudaError, DeviceContext, load_driver

logger = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROGRAMS = 64  # of an exchange at most: they must all be on the GPU at once
CAPACITY = 16384  # words of a program: 4 MB of a rank in one launch, what is larger takes several
Put = Callable[[str, bytes], None]
Get = Callable[[str], bytes]


class SharedMemory(msgspec.Struct, frozen=True):
    """What a rank says of its memory; `handle`: in hexadecimal digits, empty where it cannot be shared, for this
    `reason`; `machine`: where it runs."""

    machine: str
    handle: str
    reason: str = ""


class PeersUnavailable(Exception):
    """The ranks of a group cannot map each other's memory; all of them raise it."""


def machine_id() -> str:
    """What the processes of a machine, and of its containers, have in common and no other machine has."""
    return BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.is_file() else ""


class PeerGroup:
    """Some of the ranks, with one of which each is `rank` of `size`; see the protocols `Collectives` and `Link`.

    All of them make the same calls, with tensors of the same shapes, in the same order.
    """

    def __init__(self, inboxes: Inboxes) -> None:
        self._inboxes = inboxes

    def add(self, part: Tensor) -> Tensor:
        """The parts (float32) of all ranks, added in rank order, on every rank."""
        part = part.contiguous()
        total = torch.empty_like(part)
        for words, out in self._launches(as_words(part), as_words(total)):
            exchange(self._inboxes, words, out, writes="all", reads="sum")
        return total

    def gather(self, part: Tensor) -> Tensor:
        """The parts [n, w] of 4-byte elements of all ranks side by side, [n, size * w], on rank 0; elsewhere [n, 0]."""
        part, (rows, width) = part.contiguous(), part.shape
        size, is_root = self._inboxes.size, self._inboxes.rank == 0
        out = torch.empty(rows, size * width if is_root else 0, dtype=part.dtype, device=part.device)
        at_once = max(1, self._inboxes.words // max(1, width))
        for first in range(0, rows, at_once):
            turn = slice(first, first + at_once)
            exchange(
                self._inboxes,
                as_words(part[turn]),
                as_words(out[turn]),
                writes="root",
                reads="side by side" if is_root else "nothing",
                width=width,
            )
        return out

    def copy(self, tensor: Tensor, root: int) -> Tensor:
        """The tensor of the rank `root`, in place of the others' (which are contiguous)."""
        words = as_words(tensor.contiguous())
        is_root = self._inboxes.rank == root
        for part, out in self._launches(words, words):
            exchange(
                self._inboxes,
                part,
                out,
                writes="all" if is_root else "no rank",
                reads="nothing" if is_root else "copy",
                root=root,
            )
        return tensor

    def _launches(self, part: Tensor, out: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Parts of both that fit into a launch."""
        most = self._inboxes.words
        return [(part[first : first + most], out[first : first + most]) for first in range(0, part.numel(), most)]


class PeerMemory:
    """A rank's end of the groups that it is in.  `device`: its GPU, or the host that stands for one in tests."""

    def __init__(self, device: torch.device, rank: int, put: Put, get: Get) -> None:
        self._device, self._rank, self._put, self._get = device, rank, put, get
        self._context: DeviceContext | None = None
        self._own: list[int] = []
        self._mapped: list[int] = []

    def join(self, name: str, ranks: Sequence[int], *, programs: int = PROGRAMS, capacity: int = CAPACITY) -> PeerGroup:
        """The group of these ranks, which all join it under this name.  Raises PeersUnavailable, on all of them."""
        address, shown = self._shared(len(ranks), programs, capacity)
        addresses = self._addresses(f"{name}/memory", ranks, shown, address)
        table = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        group = PeerGroup(Inboxes(ranks.index(self._rank), len(ranks), table, programs, capacity))
        self._try_out(f"{name}/works", ranks, group)
        return group

    def close(self) -> None:
        """Give back the memory; no exchange runs any more."""
        if self._context is None:
            return
        for address in self._mapped:
            self._context.unmap(address)
        for address in self._own:
            self._context.free(address)
        self._mapped, self._own = [], []
        self._context.close()
        self._context = None

    def _shared(self, size: int, programs: int, capacity: int) -> tuple[int, SharedMemory]:
        """Memory with zeros in its header, and what is said of it."""
        machine = machine_id()
        try:
            context = self._opened()
            address = context.allocate(inbox_bytes(size, programs, capacity))
            self._own.append(address)
            zeros = torch.zeros(header_bytes(size, programs), dtype=torch.uint8)
            context.copy(address, zeros.data_ptr(), zeros.nbytes)
            return address, SharedMemory(machine, context.export(address).hex())
        except CudaError as error:
            return 0, SharedMemory(machine, "", str(error))

    def _opened(self) -> DeviceContext:
        if self._context is None:
            self._context = DeviceContext(load_driver(), self._device.index or 0)
        return self._context

    def _addresses(self, key: str, ranks: Sequence[int], shown: SharedMemory, address: int) -> list[int]:
        """Where this rank sees the memory of each.  Raises PeersUnavailable if one of them has not mapped another's."""
        self._put(f"{key}/{self._rank}", msgspec.json.encode(shown))
        addresses, failure = [], ""
        for rank in ranks:
            other = msgspec.json.decode(self._get(f"{key}/{rank}"), type=SharedMemory)
            if rank == self._rank:
                addresses.append(address)
                failure = failure or shown.reason
            elif not other.handle or other.machine != shown.machine:
                failure = failure or other.reason or f"rank {rank} is on another machine"
            elif not failure:
                try:
                    addresses.append(self._opened().open(bytes.fromhex(other.handle)))
                    self._mapped.append(addresses[-1])
                except CudaError as error:
                    failure = f"the memory of rank {rank} cannot be mapped: {error.message}"
        self._agree(key, ranks, failure)
        return addresses

    def _try_out(self, key: str, ranks: Sequence[int], group: PeerGroup) -> None:
        """Add numbers whose sum is known, twice, so that both sets of slots are seen."""
        numbers = torch.arange(3, dtype=torch.float32, device=self._device) + ranks.index(self._rank)
        expected = [sum(i + number for i in range(len(ranks))) for number in range(3)]
        sums = [group.add(numbers).tolist() for _ in range(2)]
        self._agree(key, ranks, "" if sums == [expected, expected] else f"sums of ranks are {sums}, not {expected}")

    def _agree(self, key: str, ranks: Sequence[int], failure: str) -> None:
        """Raise PeersUnavailable if one of the ranks has failed."""
        self._put(f"{key}/failure/{self._rank}", failure.encode())
        failures = {rank: self._get(f"{key}/failure/{rank}").decode() for rank in ranks}
        for rank, reason in failures.items():
            if reason:
                raise PeersUnavailable(f"rank {rank}: {reason}")
