"""The question asked at start-up: do rows of a product depend on how many there are?"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokserve.layers.linear import Linear
from tokserve.models.dummy import tiny_config
from tokserve.models.load import load
from tokserve.runner import exactness


class ByTheBatch(Linear):
    """Sums in another order from 64 rows on, as a library may."""

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return super().__call__(x, out_dtype) * (1.0 + 2**-20 if len(x) >= 64 else 1.0)


def test_products_of_the_cpu_stand_alone_and_others_are_found_out() -> None:
    model = load(
        Path(), tiny_config("qwen3"), dtype="float32", head_dtype="auto", load_format="dummy", seed=0, max_model_len=64
    )
    assert exactness.unequal_products(model) == []
    model.blocks[0].mlp.down.__class__ = ByTheBatch
    assert exactness.unequal_products(model) == ["down"]
