"""Sample inputs of the ops of mixtures of experts, whose weights come unpacked, stacked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ops.samples.common import Samples, normal
from tests.ops.samples.float8 import by_group
from tests.ops.samples.wna16 import weights as integer_weights


def route(dtype: torch.dtype) -> Samples:
    """Logits on a grid, so that there are ties, and no sum of scores decides."""
    for tokens, count, k in ((1, 8, 2), (5, 64, 8), (17, 60, 4), (70, 32, 1), (0, 4, 2), (3, 3, 3)):
        logits = (normal(dtype, tokens, tokens, count) * 4).round() / 2
        yield logits, None, k, False, 1, 1, False, True, 0.0, 1.0
        yield logits, None, k, False, 1, 1, False, False, 0.0, 2.5
        bias = (torch.arange(count) * 5 % 7) / 8.0
        yield logits, bias, k, True, 1, 1, False, True, 0.0, 1.0
        yield logits - 9, None, k, True, 1, 1, False, True, 1e-3, 1.0
        if count % 8 == 0 and k <= count // 2:
            yield logits, bias, k, True, 4, 2, True, True, 0.0, 2.5
            yield logits, None, k, False, 4, 2, False, False, 0.0, 16.0


def scale_choices(dtype: torch.dtype) -> Samples:
    for tokens, count, k in ((1, 8, 2), (70, 60, 8), (0, 4, 2)):
        ids = torch.randint(0, count, (tokens, k), generator=torch.Generator().manual_seed(k)).int()
        yield normal(dtype, 1, tokens, k), ids, normal(dtype, 2, count)


def _mixtures(dtype: torch.dtype) -> Samples:
    shapes = ((1, 8, 64, 32, 2), (5, 4, 40, 24, 3), (17, 6, 33, 17, 2), (40, 2, 96, 40, 1), (0, 3, 16, 8, 2))
    for number, (tokens, count, width, inner, k) in enumerate(shapes):
        x = normal(dtype, number, tokens, width)
        up = normal(dtype, number + 10, count, 2 * inner, width) / width**0.5
        down = normal(dtype, number + 20, count, width, inner) / inner**0.5
        order = torch.rand(tokens, count, generator=torch.Generator().manual_seed(number)).argsort(-1)
        ids, weights = order[:, :k].int().contiguous(), 0.5 + torch.rand(tokens, k)
        biases: list[Tensor | None] = [None, None]
        shared: dict[str, Any] = {"shared": None, "gate": None}
        if number % 2:
            biases = [normal(dtype, 5, count, 2 * inner), normal(dtype, 6, count, width)]
        if number >= 2:
            shared = {"shared": normal(dtype, 7, tokens, width), "gate": None}
        if number == 3:
            shared["gate"] = normal(torch.float32, 8, tokens, 1)
        for activation in ("silu", "clamped_swiglu", "gelu_tanh")[: 2 if number % 2 else 3]:
            yield x, ids, weights, up, biases[0], down, biases[1], activation, shared["shared"], shared["gate"]


def experts_wna16(dtype: torch.dtype) -> Samples:
    """Experts of every kind of weight, one with a gate and what it gates of two kinds, one of floats."""
    for number, (tokens, width, inner, k) in enumerate(
        ((1, 64, 32, 2), (17, 40, 24, 3), (40, 96, 40, 2), (0, 32, 8, 1))
    ):
        kinds, down = integer_weights(2 * inner, width), integer_weights(width, inner)
        up: list[Any] = [*([kind] for kind in kinds), normal(dtype, 3, 2 * inner, width) / width**0.5]
        downs = [*([kind] for kind in down), normal(dtype, 4, width, inner) / inner**0.5]
        activation = ("silu", "clamped_swiglu", "gelu_tanh")[number % 3]
        if activation != "clamped_swiglu":
            up[1] = [integer_weights(inner, width)[0], integer_weights(inner, width)[7]]
        x, count = normal(dtype, number, tokens, width), len(up)
        order = torch.rand(tokens, count, generator=torch.Generator().manual_seed(number)).argsort(-1)
        ids, chosen = order[:, :k].int().contiguous(), 0.5 + torch.rand(tokens, k)
        bias = (normal(dtype, 5, count, 2 * inner), normal(dtype, 6, count, width)) if number % 2 else (None, None)
        shared = (x.flip(1).contiguous(), normal(torch.float32, 8, tokens, 1)) if number == 2 else (None, None)
        yield x, ids, chosen, up, bias[0], downs, bias[1], activation, *shared


def experts(dtype: torch.dtype) -> Samples:
    return _mixtures(dtype)


def experts_float8(dtype: torch.dtype) -> Samples:
    """Weights that the test quantizes by rows, and some that come in groups of inputs with scales of their own."""
    for number, (x, ids, chosen, up, bias, down, *rest) in enumerate(list(_mixtures(dtype))[::3]):
        if number % 2:
            yield x, ids, chosen, [by_group(one) for one in up], bias, [by_group(one) for one in down], *rest
        else:
            yield x, ids, chosen, up, bias, down, *rest


def experts_int8(dtype: torch.dtype) -> Samples:
    return _mixtures(dtype)
