"""This process among those that compute one model: its share of each layer, its layers, and who samples.

Here it is the only one; `features/ranks` has a subclass for several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tokserve.layers.parallel import ALONE, WHOLE, Group, Stage
from tokserve.runner.sampler import SampledTokens


class AwaitedTokens(Protocol):
    """Tokens that another rank has sampled, which may be on their way to this one."""

    @property
    def token_ids(self) -> Tensor:  # [n] int64
        """The ids, on the device."""

    def result(self) -> SampledTokens:
        """Wait for them."""


@dataclass(frozen=True, slots=True)
class ReceivedSample:
    """Tokens that another rank has sampled."""

    tokens: SampledTokens
    token_ids: Tensor  # [n] int64

    def result(self) -> SampledTokens:
        """The tokens, which are there at once."""
        return self.tokens


class Ranks:
    """`group`: the ranks of this one's `stage`.  `samples`: this rank has the logits.  `total`: adds up the sums of
    ranks, see `Coordinates`; None: there is one rank.  `can_be_recorded`: what ranks do together in a step is work of
    their devices alone."""

    rank = 0
    size = 1
    group: Group = ALONE
    stage: Stage = WHOLE
    samples = True
    total: Callable[..., Any] | None = None
    can_be_recorded = True

    def minimum(self, number: int) -> int:
        """The smallest number of all ranks."""
        return number

    def broadcast_text(self, text: str) -> str:
        """The sampling rank's text, of up to 255 bytes; that of the others is ignored."""
        return text

    def broadcast_sample(self, sample: Any) -> None:
        """Send the other ranks what was sampled here."""

    def receive_sample(self, count: int) -> AwaitedTokens:
        """What the sampling rank broadcasts of `count` rows."""
        raise NotImplementedError


ONE = Ranks()
