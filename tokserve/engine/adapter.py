"""A LoRA adapter as the engine sees it: a name, a slot on the device, and a number for its weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Adapter:
    """`generation` is another one each time weights are put into the slot; no two loads of a server share one.

    `digest`: of its weights, "" if it is not known.  `last_use`: rises with every load and request of any adapter; the
    lowest is unused for longest.
    """

    name: str
    path: str
    slot: int
    generation: int
    last_use: int = 0
    digest: str = ""

    @property
    def label(self) -> str:
        """The suffix of a weight version that says which adapter made a token."""
        return f"{self.name}@{self.generation}"
