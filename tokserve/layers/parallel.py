"""How a layer's weight is divided among the ranks that share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokserve.errors import StartError

Split = Literal["column", "row"]  # by output features, by input features


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share a model: this one's number, and how many there are."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, name: str) -> int:
        """A rank's part of `total`.  Raises StartError, saying `name`, if the parts are not equal."""
        if total % self.size:
            raise StartError(f"{name} {total} cannot be divided among {self.size} ranks")
        return total // self.size


ALONE = Group()
