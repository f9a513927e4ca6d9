"""This process among several that compute one model.

Rank `stage * tensor + n` has the n-th part of the layers of a stage.  The first rank of the last stage samples, and
tells the others which tokens follow: only it needs the logits.

GPUs of one machine exchange tensors through memory that they have mapped of each other (the part `peers` of the GPU's
room), which can be recorded and does not wait on the host; others use NCCL, and hosts gloo.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokserve.base.rooms import part, rooms
from tokserve.config.parallel import sampling_rank
from tokserve.features.ranks.collectives import EngineStore, ProcessGroup
from tokserve.layers.parallel import ALONE, WHOLE, Collectives, Group, Link, Stage
from tokserve.protocol.plan import NOT_FINITE, OK
from tokserve.runner.device import Accelerator, Device, Fetched, use
from tokserve.runner.ranks import Ranks, ReceivedSample
from tokserve.runner.sampler import SampledTokens

logger = logging.getLogger(__name__)


class World(Protocol):
    """All ranks.  They make the same calls in the same order; see `ProcessGroup`."""

    device: torch.device

    def minimum(self, numbers: Sequence[int]) -> list[int]: ...

    def broadcast(self, tensor: Tensor, root: int) -> Tensor: ...

    def send(self, tensor: Tensor, to: int) -> None: ...

    def receive(self, tensor: Tensor, source: int) -> Tensor: ...


class Copies(Protocol):
    """Ranks that copy tensors from one of them."""

    def copy(self, tensor: Tensor, root: int) -> Tensor:
        """The tensor of the rank `root`, in place of the others'."""


class Neighbours:
    """Link protocol: the ranks with the same part of the stages before and after."""

    def __init__(self, world: World, rank: int, tensor: int) -> None:
        self._world, self._before, self._after = world, rank - tensor, rank + tensor

    def send(self, tensor: Tensor) -> None:
        self._world.send(tensor, self._after)

    def receive(self, tensor: Tensor) -> Tensor:
        return self._world.receive(tensor, self._before)


@dataclass(frozen=True, slots=True)
class PeerNeighbours:
    """Link protocol: a pair of this rank with the one before, and with the one after, in which the lower one sends."""

    before: Copies | None
    after: Copies | None

    def send(self, tensor: Tensor) -> None:
        assert self.after is not None, "the last stage sends nothing"
        self.after.copy(tensor, 0)

    def receive(self, tensor: Tensor) -> Tensor:
        assert self.before is not None, "the first stage receives nothing"
        return self.before.copy(tensor, 0)


@dataclass(frozen=True, slots=True)
class PeerGroups:
    """What the ranks of one machine's GPUs exchange tensors by: this rank's stage, its neighbours, and all ranks."""

    stage: Collectives | None
    link: Link | None
    everyone: Copies


@dataclass(frozen=True, slots=True)
class SampleOnDevice:
    """Tokens that another rank has sampled, on this one's device.  `fetched`: ids and whether they count, [2, n]."""

    token_ids: Tensor  # [n] int64
    fetched: Fetched

    def result(self) -> SampledTokens:
        """Wait for them."""
        ((ids, are_ok),) = self.fetched.arrays()
        return SampledTokens(ids, np.where(are_ok, np.uint8(OK), np.uint8(NOT_FINITE)))


class JoinedRanks(Ranks):
    """`world`: all ranks; `device`: what this one computes on; `peers`: how tensors of steps are exchanged without the
    host, if they can be."""

    def __init__(
        self,
        rank: int,
        tensor: int,
        stages: int,
        world: World,
        group: Group,
        total: Callable[..., Any] | None,
        device: Device,
        peers: PeerGroups | None = None,
    ) -> None:
        self.rank, self.size = rank, tensor * stages
        self.group, self.world, self.total = group, world, total
        link = None if stages == 1 else Neighbours(world, rank, tensor) if peers is None else peers.link
        self.stage = WHOLE if stages == 1 else Stage(rank // tensor, stages, link)
        self.sampling_rank = sampling_rank(tensor, stages)
        self.samples = rank == self.sampling_rank
        self._device, self._peers = device, peers
        self.can_be_recorded = peers is not None

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
        if self._peers is not None:
            are_ok = torch.stack(sample.flags).all(0)
            self._peers.everyone.copy(torch.stack([sample.token_ids.int(), are_ok.int()]), self.sampling_rank)
            return
        tokens: SampledTokens = sample.result()
        status = np.full(len(tokens.token_ids), OK, np.int32) if tokens.status is None else tokens.status
        packed = np.stack([tokens.token_ids, status.astype(np.int32)])
        self.world.broadcast(torch.from_numpy(packed), self.sampling_rank)

    def receive_sample(self, count: int) -> ReceivedSample | SampleOnDevice:
        """What the sampling rank broadcasts of `count` rows."""
        if self._peers is not None:
            packed = torch.empty(2, count, dtype=torch.int32, device=self._device.torch_device)
            self._peers.everyone.copy(packed, self.sampling_rank)
            return SampleOnDevice(packed[0].long(), self._device.fetch([packed]))
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
    """Meet the other ranks on devices of this kind, over memory that they share, over NCCL, or over gloo at this
    address of the machine.  They `put` values under keys that this one can `get`, and the other way round."""
    target, store = use(kind), EngineStore(put, get)
    device, peers = target.torch_device, None
    if isinstance(target, Accelerator):
        peers = join_peers(device, rank, tensor, stages, put, get)
    nccl = isinstance(target, Accelerator) and peers is None
    host = torch.device("cpu")
    world = ProcessGroup(store, "world", rank, tensor * stages, device if nccl else host, address, nccl=nccl)
    total: Callable[..., Any] | None = None
    if "weights" in rooms():
        group = ProcessGroup(store, "sums", rank, tensor * stages, host, address)
        total = part("weights", "rank_sums")(group).total
    if tensor == 1:
        return JoinedRanks(rank, tensor, stages, world, ALONE, total, target, peers)
    stage, number = divmod(rank, tensor)
    collectives: Collectives = world
    if peers is not None and peers.stage is not None:
        collectives = peers.stage
    elif stages > 1:
        collectives = ProcessGroup(store, f"stage{stage}", number, tensor, device, address, nccl=nccl)
    return JoinedRanks(rank, tensor, stages, world, Group(number, tensor, collectives), total, target, peers)


def join_peers(
    device: torch.device,
    rank: int,
    tensor: int,
    stages: int,
    put: Callable[[str, bytes], None],
    get: Callable[[str], bytes],
) -> PeerGroups | None:
    """The groups of this rank; None, on all ranks, if one cannot map the memory of another."""
    memory_of, unavailable = part("gpu", "peers"), part("gpu", "peers_unavailable")
    memory = memory_of(device, rank, put, get)
    try:
        return peer_groups(rank, tensor, stages, memory.join)
    except unavailable as error:
        memory.close()
        logger.warning("ranks use NCCL, and their steps are not recorded: %s", error)
        return None


class Exchanges(Collectives, Copies, Protocol):
    """Ranks that exchange tensors of steps in every way."""


def peer_groups(rank: int, tensor: int, stages: int, join: Callable[[str, Sequence[int]], Exchanges]) -> PeerGroups:
    """The groups of this rank, which `join` makes from their names and their ranks."""
    stage = rank // tensor
    first = stage * tensor
    everyone = join("everyone", range(tensor * stages))
    groups: list[Sequence[int]] = [range(first, first + tensor)] if tensor > 1 else []
    pairs = [(rank - tensor, rank)] if stage else []
    pairs += [(rank, rank + tensor)] if stage + 1 < stages else []
    joined = [join(f"group {list(group)}", group) for group in (*groups, *pairs)]
    link: Link | None = None
    if stages > 1:
        after = joined[-1] if stage + 1 < stages else None
        link = PeerNeighbours(joined[len(groups)] if stage else None, after)
    return PeerGroups(joined[0] if groups else None, link, everyone)


class Echo:
    """World protocol without other ranks: they would answer what this one says itself."""

    device = torch.device("cpu")

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        pass

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        return tensor


def lone_rank(
    rank: int, tensor: int, stages: int, device: Device, join: Callable[[str, Sequence[int]], Exchanges]
) -> JoinedRanks:
    """A rank whose others are not there, for a device that computes nothing; `join`: as for `peer_groups`."""
    peers = peer_groups(rank, tensor, stages, join)
    group = ALONE if tensor == 1 else Group(rank % tensor, tensor, peers.stage)
    return JoinedRanks(rank, tensor, stages, Echo(), group, None, device, peers)
