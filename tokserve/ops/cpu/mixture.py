"""The C++ implementations of the ops of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import mixture
from tokserve.ops.dense import PackedWeight
from tokserve.ops.float8 import PackedFloat8
from tokserve.ops.quant import PackedInt8
from tokserve.ops.wna16 import PackedWna16

Packed = PackedWeight | PackedInt8 | PackedFloat8 | PackedWna16


@mixture.route.implement("cpp", device="cpu")
def route(logits: Tensor, bias: Tensor | None, k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens = logits.shape[0]
    ids, weights = logits.new_empty(tokens, k, dtype=torch.int32), logits.new_empty(tokens, k)
    _C.route(logits, bias, *rest, ids, weights)
    return ids, weights


@mixture.scale_choices.implement("cpp", device="cpu")
def scale_choices(weights: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    out = torch.empty_like(weights)
    _C.scale_choices(weights, ids, factors, out)
    return out


def check_experts(x: Tensor, gate_up: Packed, down: Packed) -> None:
    """Raise ValueError for weights that do not fit x: the extension does not see their sizes."""
    if not x.shape[-1] == gate_up.columns == down.rows or gate_up.rows != 2 * down.columns:
        raise ValueError(
            f"experts: x has {x.shape[-1]} columns, the weights are [{gate_up.rows},{gate_up.columns}] and "
            f"[{down.rows},{down.columns}]"
        )


@mixture.experts.implement("cpp", device="cpu")
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[PackedWeight],
    gate_up_bias: Tensor | None,
    down: Sequence[PackedWeight],
    down_bias: Tensor | None,
    activation: str,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Rows of x need not be adjacent."""
    check_experts(x, gate_up[0], down[0])
    out = x.new_empty(x.shape[0], x.shape[1])
    _C.experts(
        x,
        ids,
        weights,
        [one.packed for one in gate_up],
        [],
        gate_up_bias,
        [one.packed for one in down],
        [],
        down_bias,
        activation,
        down[0].columns,
        shared,
        shared_gate,
        out,
    )
    return out


@mixture.experts_int8.implement("cpp", device="cpu")
def experts_int8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[PackedInt8],
    gate_up_bias: Tensor | None,
    down: Sequence[PackedInt8],
    down_bias: Tensor | None,
    activation: str,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Rows of x need not be adjacent."""
    check_experts(x, gate_up[0], down[0])
    out = x.new_empty(x.shape[0], x.shape[1])
    _C.experts(
        x,
        ids,
        weights,
        [one.packed for one in gate_up],
        [one.scales for one in gate_up],
        gate_up_bias,
        [one.packed for one in down],
        [one.scales for one in down],
        down_bias,
        activation,
        down[0].columns,
        shared,
        shared_gate,
        out,
    )
    return out


@mixture.experts_wna16.implement("cpp", device="cpu")
def experts_wna16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[PackedWna16 | PackedWeight],
    gate_up_bias: Tensor | None,
    down: Sequence[PackedWna16 | PackedWeight],
    down_bias: Tensor | None,
    activation: str,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Rows of x need not be adjacent."""
    check_experts(x, gate_up[0], down[0])
    out = x.new_empty(x.shape[0], x.shape[1])
    _C.experts_wna16(
        x,
        ids,
        weights,
        _handles(gate_up),
        gate_up_bias,
        _handles(down),
        down_bias,
        activation,
        down[0].columns,
        shared,
        shared_gate,
        out,
    )
    return out


def _handles(weights: Sequence[PackedWna16 | PackedWeight]) -> list[object]:
    return [one.handle if isinstance(one, PackedWna16) else one.packed for one in weights]
