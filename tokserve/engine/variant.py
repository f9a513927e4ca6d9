"""`Variant`: weights beside the model's own that compute some of the requests.

A room makes variants, and says which requests they compute.  The engine keeps the KV of different variants apart, and
names the variant in the spans of an output.
"""

from __future__ import annotations

from typing import Protocol


class Variant(Protocol):
    """Weights of a name.  KV is found again only by requests of the same name and generation."""

    @property
    def name(self) -> str: ...

    @property
    def generation(self) -> int:
        """Another number, above 0, each time that weights are loaded under the name."""

    @property
    def label(self) -> str:
        """The suffix of a weight version that says which variant made a token."""

    @property
    def digest(self) -> str:
        """The digest of the weights; "" if it is not known."""

    @property
    def slot(self) -> int:
        """Where the weights are on the device; -1 while they are not."""
