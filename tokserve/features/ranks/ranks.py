"""This process among several that compute one model.

Rank `stage * tensor + n` has the n-th part of the layers of a stage.  The first rank of the last stage samples, and
tells the others which tokens follow: only it needs the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokserve.base.rooms import part, rooms
from tokserve.config.parallel import sampling_rank
from tokserve.features.ranks.collectives import EngineStore, ProcessGroup
from tokserve.layers.parallel import ALONE, WHOLE, Group, Stage
from tokserve.protocol.plan import OK
from tokserve.runner.device import Accelerator, use
from tokserve.runner.ranks import Ranks, ReceivedSample
from tokserve.runner.sampler import SampledTokens


class Neighbours:
    """Link protocol: the ranks with the same part of the stages before and after."""

    def __init__(self, world: ProcessGroup, rank: int, tensor: int) -> None:
        self._world, self._before, self._after = world, rank - tensor, rank + tensor

    def send(self, tensor: Tensor) -> None:
        self._world.send(tensor, self._after)

    def receive(self, tensor: Tensor) -> Tensor:
        return self._world.receive(tensor, self._before)


class JoinedRanks(Ranks):
    """`world`: all ranks."""

    def __init__(
        self,
        rank: int,
        tensor: int,
        stages: int,
        world: ProcessGroup,
        group: Group,
        total: Callable[..., Any] | None,
    ) -> None:
        self.rank, self.size = rank, tensor * stages
        self.group, self.world, self.total = group, world, total
        link = None if stages == 1 else Neighbours(world, rank, tensor)
        self.stage = WHOLE if stages == 1 else Stage(rank // tensor, stages, link)
        self.sampling_rank = sampling_rank(tensor, stages)
        self.samples = rank == self.sampling_rank

    def minimum(self, number: int) -> int:
        return self.world.minimum([number])[0]

    def broadcast_text(self, text: str) -> str:
        """The sampling rank's text, of up to 255 bytes; that of the others is ignored."""
        packed = np.zeros(256, np.uint8)
        encoded = text.encode()
        packed[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        return bytes(self.world.broadcast(torch.from_numpy(packed), self.sampling_rank).numpy()).rstrip(b"\0").decode()

    def broadcast_sample(self, sample: Any) -> None:
        """Send the other ranks what was sampled here."""
        tokens: SampledTokens = sample.result()
        status = np.full(len(tokens.token_ids), OK, np.int32) if tokens.status is None else tokens.status
        packed = np.stack([tokens.token_ids, status.astype(np.int32)])
        self.world.broadcast(torch.from_numpy(packed), self.sampling_rank)

    def receive_sample(self, count: int) -> ReceivedSample:
        """What the sampling rank broadcasts of `count` rows."""
        received = self.world.broadcast(torch.empty(2, count, dtype=torch.int32), self.sampling_rank)
        ids, status = received.numpy()
        return ReceivedSample(SampledTokens(ids, status.astype(np.uint8)), received[0].long().to(self.world.device))


def join_ranks(
    rank: int,
    tensor: int,
    stages: int,
    put: Callable[[str, bytes], None],
    get: Callable[[str], bytes],
    kind: str,
    address: str,
) -> JoinedRanks:
    """Meet the other ranks on devices of this kind, over NCCL, or over gloo at this address of the machine.  They `put`
    values under keys that this one can `get`, and the other way round."""
    target, store = use(kind), EngineStore(put, get)
    device, nccl = target.torch_device, isinstance(target, Accelerator)
    world = ProcessGroup(store, "world", rank, tensor * stages, device, address, nccl=nccl)
    total: Callable[..., Any] | None = None
    if "weights" in rooms():
        group = ProcessGroup(store, "sums", rank, tensor * stages, torch.device("cpu"), address)
        total = part("weights", "rank_sums")(group).total
    if tensor == 1:
        return JoinedRanks(rank, tensor, stages, world, ALONE, total)
    stage, number = divmod(rank, tensor)
    collectives = world
    if stages > 1:
        collectives = ProcessGroup(store, f"stage{stage}", number, tensor, device, address, nccl=nccl)
    return JoinedRanks(rank, tensor, stages, world, Group(number, tensor, collectives), total)
