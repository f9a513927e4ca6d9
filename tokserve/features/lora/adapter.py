"""A LoRA adapter as the engine sees it: a name, a slot on the device, and a number for its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Adapter:
    """`slot`: -1 while it has none.  `generation` is another one each time that weights are loaded under the name; no
    two loads of a server share one.

    `path`: "" of one that was pushed, which is kept under `key`, has the `checksum` of what was sent, and the `version`
    that its push had.  `digest`: of its weights, "" if it is not known.  `last_use`: rises with every load and request
    of any adapter; the lowest is unused for longest.  `anywhere`: the operator has named its directory.  `has_served`:
    a request has run since it got its slot.  `is_leaving`: another one is to have the slot, so no more requests
    are admitted.
    """

    name: str
    path: str
    slot: int
    generation: int
    last_use: int = 0
    digest: str = ""
    key: str = ""
    version: str = ""
    checksum: str = ""
    anywhere: bool = False
    has_served: bool = False
    is_leaving: bool = False

    @property
    def label(self) -> str:
        """The suffix of a weight version that says which adapter made a token."""
        return f"{self.name}@{self.generation}"

    @property
    def source(self) -> dict[str, Any]:
        """Where the device reads it."""
        return {"lora_path": self.path, "anywhere": self.anywhere} if self.path else {"pushed": self.key}

    @property
    def is_ready(self) -> bool:
        """Whether a request of it may be admitted now."""
        return self.slot >= 0 and not self.is_leaving
