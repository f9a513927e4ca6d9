"""This process among those that compute one model: its share of each layer, its layers, and who samples.

Rank `stage * tensor + n` has the n-th part of the layers of a stage.  The first rank of the last stage samples, and
tells the others which tokens follow: only it needs the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokserve.config.parallel import sampling_rank
from tokserve.features.ranks.collectives import ProcessGroup
from tokserve.features.weights.coordinates import Parts, of_one_rank
from tokserve.features.weights.rank_sums import RankSums
from tokserve.layers.parallel import ALONE, WHOLE, Group, Stage
from tokserve.protocol.plan import OK
from tokserve.rl.sums import Sums
from tokserve.runner.sampler import SampledTokens


@dataclass(frozen=True, slots=True)
class ReceivedSample:
    """Tokens that another rank has sampled."""

    tokens: SampledTokens
    token_ids: Tensor  # [n] int64

    def result(self) -> SampledTokens:
        """The tokens, which are there at once."""
        return self.tokens


class Neighbours:
    """Link protocol: the ranks with the same part of the stages before and after."""

    def __init__(self, world: ProcessGroup, rank: int, tensor: int) -> None:
        self._world, self._before, self._after = world, rank - tensor, rank + tensor

    def send(self, tensor: Tensor) -> None:
        self._world.send(tensor, self._after)

    def receive(self, tensor: Tensor) -> Tensor:
        return self._world.receive(tensor, self._before)


class Ranks:
    """`group`: the ranks of this one's `stage`.  `world`: all ranks; None: there is no other.  `total`: see
    `Coordinates`."""

    def __init__(
        self,
        rank: int = 0,
        tensor: int = 1,
        stages: int = 1,
        world: ProcessGroup | None = None,
        group: Group = ALONE,
        total: Callable[[Callable[[], Sums], Parts], Sums] = of_one_rank,
    ) -> None:
        self.rank, self.size = rank, tensor * stages
        self.group, self.world, self.total = group, world, total
        link = None if world is None or stages == 1 else Neighbours(world, rank, tensor)
        self.stage = WHOLE if stages == 1 else Stage(rank // tensor, stages, link)
        self.sampling_rank = sampling_rank(tensor, stages)

    @property
    def samples(self) -> bool:
        return self.rank == self.sampling_rank

    def minimum(self, number: int) -> int:
        return number if self.world is None else self.world.minimum([number])[0]

    def broadcast_text(self, text: str) -> str:
        """The sampling rank's text, of up to 255 bytes; that of the others is ignored."""
        if self.world is None:
            return text
        packed = np.zeros(256, np.uint8)
        encoded = text.encode()
        packed[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        return bytes(self.world.broadcast(torch.from_numpy(packed), self.sampling_rank).numpy()).rstrip(b"\0").decode()

    def broadcast_sample(self, sample: Any) -> None:
        """Send the other ranks what was sampled here."""
        if self.world is None:
            return
        tokens: SampledTokens = sample.result()
        status = np.full(len(tokens.token_ids), OK, np.int32) if tokens.status is None else tokens.status
        packed = np.stack([tokens.token_ids, status.astype(np.int32)])
        self.world.broadcast(torch.from_numpy(packed), self.sampling_rank)

    def receive_sample(self, count: int) -> ReceivedSample:
        """What the sampling rank broadcasts of `count` rows."""
        assert self.world is not None
        received = self.world.broadcast(torch.empty(2, count, dtype=torch.int32), self.sampling_rank)
        ids, status = received.numpy()
        return ReceivedSample(SampledTokens(ids, status.astype(np.uint8)), received[0].long().to(self.world.device))


ONE = Ranks()


def join(rank: int, tensor: int, stages: int, store: Any, device: torch.device, address: str, *, nccl: bool) -> Ranks:
    """Meet the other ranks: over NCCL, or over gloo at this address of the machine."""
    world = ProcessGroup(store, "world", rank, tensor * stages, device, address, nccl=nccl)
    sums = RankSums(ProcessGroup(store, "sums", rank, tensor * stages, torch.device("cpu"), address))
    if tensor == 1:
        return Ranks(rank, tensor, stages, world, total=sums.total)
    stage, part = divmod(rank, tensor)
    collectives = world
    if stages > 1:
        collectives = ProcessGroup(store, f"stage{stage}", part, tensor, device, address, nccl=nccl)
    return Ranks(rank, tensor, stages, world, Group(part, tensor, collectives), sums.total)
