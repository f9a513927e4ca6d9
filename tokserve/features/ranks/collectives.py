"""What ranks do together, over torch.distributed: gloo where tensors are on the host, NCCL where they are on GPUs.

Groups are made without torch's global state and without a listening store: ranks find each other through a `Store` that
the caller provides.  Nothing is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:

    class Store:
        """torch's base of stores, which its stubs lack."""

else:
    from torch.distributed import Store

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
LONGEST = timedelta(days=7)  # a rank may wait for another that loads; who hangs is for the engine to find out


class EngineStore(Store):
    """What ranks find each other by, kept by their engine; a value is set once and may be waited for."""

    def __init__(self, put: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> None:
        super().__init__()
        self._put, self._get = put, get

    def set(self, key: str, value: Any) -> None:
        self._put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key."""
        return self._get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta = LONGEST) -> None:
        for key in keys:
            self._get(key)


class ProcessGroup:
    """Some of the ranks: this one is `rank` of `size`; `address`: where gloo listens, without `nccl`."""

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        address: str = "127.0.0.1",
        *,
        nccl: bool = False,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        torch_distributed: Any = distributed
        scoped = torch_distributed.PrefixStore(name, store)
        if nccl:
            os.environ.setdefault(ERROR_HANDLING, "0")  # torch reads it now, and by default ends an idle process
            patient = torch_distributed.ProcessGroupNCCL.Options()
            patient._timeout = LONGEST
            self._group: Any = torch_distributed.ProcessGroupNCCL(scoped, rank, size, patient)
        else:
            gloo = torch_distributed.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = LONGEST
            self._group = gloo(scoped, rank, size, options)

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """The tensors of all ranks, by rank."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._group.allgather([parts], [part]).wait()
        return parts

    def add(self, part: Tensor) -> Tensor:
        total, *others = self.all_gather(part)
        for other in others:
            total.add_(other)
        return total

    def gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        if self.rank:
            self._group.gather([], [part], _gather_options()).wait()
            return part[:, :0]
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._group.gather([parts], [part], _gather_options()).wait()
        return torch.cat(parts, 1)

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """The tensor of the rank `root`, in place of the others'."""
        copy = tensor.to(self.device)
        self._group.broadcast(copy, root).wait()
        return copy.cpu()

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """The least of the ranks' values, for each number."""
        parts = self.all_gather(torch.tensor(numbers, dtype=torch.int64, device=self.device))
        return [int(number) for number in torch.stack(parts).amin(0)]

    def send(self, tensor: Tensor, to: int) -> None:
        self._group.send([tensor.contiguous()], to, 0).wait()

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Into `tensor`, from one rank."""
        self._group.recv([tensor], source, 0).wait()
        return tensor


def _gather_options() -> Any:
    options = distributed.GatherOptions()
    options.rootRank = 0
    return options
