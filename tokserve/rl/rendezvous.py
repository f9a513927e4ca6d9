"""How the ranks of a process group find each other: in this package's way, torch.distributed's, or vLLM's.

A rendezvous yields the store from which torch makes the group.  vLLM's sends one pickle, the NCCL id of the group: its
128 bytes are looked for among the opcodes, and nothing is unpickled.
"""

from __future__ import annotations

import pickle
import pickletools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from .errors import TransferError

PREFIX = "tokserve_weights"
NCCL_ID_BYTES = 128
NCCL_ID_KEY = "broadcast_from/0/0"  # where vLLM's rank 0 puts the id of its group
FIRST_COMMUNICATOR = "0"  # where torch's NCCL group looks for it
MAX_PICKLE = 1 << 16  # bytes
KINDS = ("tokserve", "torch", "vllm")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group meets: the address of rank 0, and which rank of how many this is."""

    address: str
    port: int
    rank: int
    size: int
    timeout: timedelta


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """`kind`: tokserve; torch: a group of `torch.distributed` with the name `group_name`, as trainers that add ranks to
    a group of their own make it (AReaL's, SGLang's, OpenRLHF's); vllm: its StatelessProcessGroup, of NCCL alone.
    """

    kind: str = "tokserve"
    group_name: str = ""

    @property
    def announces_sizes(self) -> bool:
        """Whether the size of each message goes ahead of it over gloo."""
        return self.kind == "tokserve"

    def store(self, meeting: Meeting, device: str, interrupted: threading.Event) -> Any:
        """The store of the group.  Raises RuntimeError of torch.distributed, TransferError."""
        first = meeting.rank == 0
        tcp = TCPStore(meeting.address, meeting.port, meeting.size, first, meeting.timeout, wait_for_workers=not first)
        if first and meeting.size > 1:
            failure = _await_another(tcp, meeting.timeout.total_seconds(), interrupted)
            if failure:
                del tcp  # and with it the port: the error would keep it
                raise TransferError(failure)
        return STORES[self.kind](tcp, self.group_name, device)


def _await_another(tcp: Any, timeout: float, interrupted: threading.Event) -> str:
    """Wait until another rank has joined, which makes the store's first key; returns why it did not.  The store itself
    would wait for all, but could not be interrupted, and keep its port."""
    end = time.monotonic() + timeout
    while not tcp.num_keys():
        if time.monotonic() > end:
            return f"no other rank has joined in {timeout:g} s"
        if interrupted.wait(0.02):
            return "the transfer was interrupted"
    return ""


def _own(tcp: Any, group_name: str, device: str) -> Any:
    return PrefixStore(PREFIX, tcp)


def _of_torch(tcp: Any, group_name: str, device: str) -> Any:
    """A store nested as `torch.distributed` nests it for the one device type of a group with a backend."""
    return PrefixStore(f"{device}/", PrefixStore(f"{group_name}/", PrefixStore(group_name, tcp)))


def _of_vllm(tcp: Any, group_name: str, device: str) -> Any:
    """A store in which torch's NCCL group finds the id that vLLM's rank 0 has sent."""
    store = HashStore()
    store.set(FIRST_COMMUNICATOR, nccl_id(tcp.get(NCCL_ID_KEY)))  # type: ignore[arg-type]  # takes bytes, too
    return store


STORES: dict[str, Callable[[Any, str, str], Any]] = {"tokserve": _own, "torch": _of_torch, "vllm": _of_vllm}


def nccl_id(pickled: bytes) -> bytes:
    """The bytes of the NCCL id that vLLM pickles, a ctypes structure.  Raises TransferError for anything else.  The
    pickle is read as data: its opcodes are listed, not executed."""
    values: list[bytes] = []
    try:
        if len(pickled) > MAX_PICKLE:
            raise ValueError("too long")
        for _, argument, _ in pickletools.genops(pickled):
            if isinstance(argument, bytes | bytearray):
                values.append(bytes(argument))
    except (ValueError, pickle.UnpicklingError) as error:
        raise TransferError(f"rank 0 has sent no NCCL id: {error}") from None
    if len(values) != 1 or len(values[0]) != NCCL_ID_BYTES:
        raise TransferError(f"rank 0 has sent no NCCL id: it is {NCCL_ID_BYTES} bytes in one piece")
    return values[0]
