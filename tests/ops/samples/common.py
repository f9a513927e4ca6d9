"""Shared by the sample generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Samples = Iterator[tuple[Any, ...]]  # arguments of calls

PRODUCTS = (  # tokens, inputs and outputs of a product
    (1, 64, 64),
    (3, 192, 576),
    (17, 512, 192),
    (70, 96, 40),
    (2, 33, 17),
    (1, 1, 1),
    (5, 1030, 3),
    (4, 7, 130),
)


def normal(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gated_products(products: Iterable[tuple[Any, ...]]) -> Samples:
    """Samples of a gated product, of those (x, weight, bias, out_dtype) of the plain one that fit."""
    for number, (x, weight, bias, out_dtype) in enumerate(products):
        if out_dtype is None and len(weight) % 2 == 0:
            yield x, weight, bias, "gelu_tanh" if number % 2 else "silu"
            yield x, weight, bias, None
