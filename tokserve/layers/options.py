"""The options that all linear layers of a model share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokserve.layers.parallel import ALONE, Group
from tokserve.layers.quant import UNQUANTIZED, QuantMethod


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """`dtype`: of activations and of unquantized weights.  `quant`: how projections keep and multiply their weights.
    `group`: the ranks that divide the projections among them."""

    dtype: torch.dtype
    quant: QuantMethod = UNQUANTIZED
    group: Group = ALONE
