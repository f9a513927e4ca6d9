"""The format of a model that lies in GGUF files: its tensors are whole weights, most of them quantized in groups.

A live update brings floats under the names of the model's own checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokserve.families.quantization.methods import WNA16
from tokserve.models.formats import DenseFormat, Grouped


@dataclass(frozen=True, slots=True)
class GgufFormat(DenseFormat):
    """Every tensor is a whole weight."""

    name: str = "gguf"

    def native_method(self, weights: Mapping[str, Grouped], *, has_float8: bool, rounded: bool) -> str | None:
        """Integer weights, whatever types there are."""
        return WNA16.name
