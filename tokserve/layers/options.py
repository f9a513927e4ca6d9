"""The options that all linear layers of a model share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokserve.layers.quant import UNQUANTIZED, QuantMethod


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """`dtype`: of activations and of unquantized weights.  `quant`: how projections keep and multiply their weights."""

    dtype: torch.dtype
    quant: QuantMethod = UNQUANTIZED
