"""References of a mixture of experts: the choice of each token's experts, and what these make of the token.

A token's experts, and the bits of its result, depend on the token alone: the scores are one fixed chain of float32
operations, ties go to the lowest index, an expert's products are those of `linear`, and their results are added in the
order of the choice.  No expert has a capacity, so nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokserve.ops import dense, elementwise, float8, quant, wna16
from tokserve.ops.dense import PackedWeight
from tokserve.ops.float8 import PackedFloat8
from tokserve.ops.quant import PackedInt8
from tokserve.ops.registry import op
from tokserve.ops.serial import one_thread
from tokserve.ops.wna16 import PackedWna16

MIN_SUM = 1e-20  # lower bound of the sum that weights are divided by
CLAMPED_LIMIT, CLAMPED_SLOPE = 7.0, 1.702  # of the activation "clamped_swiglu"
TOLERANCE = {torch.float32: (1e-4, 2e-5), torch.bfloat16: (2e-2, 1.6e-2), torch.float16: (2e-3, 2e-3)}


@op(tolerance={torch.float32: (1e-7, 2e-6)})
def route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    sigmoid: bool,
    groups: int,
    kept_groups: int,
    two_of_group: bool,
    normalize: bool,
    added: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token: ids [T,k] int32, best first, and their weights [T,k] float32.

    Scores are the softmax of logits [T,E] float32, or the sigmoid of each.  Experts are chosen by score + bias [E]
    float32, the lowest id among equals; with `groups` > 1, of that many groups of adjacent experts only from the best
    `kept_groups`, a group being as good as its best expert, or (`two_of_group`) its two best together.  A weight is the
    score, without bias, over the sum of the chosen and `added` (if `normalize`), times `scale`.
    """
    scores = scores_of(logits, sigmoid)
    choice = logits if bias is None and groups == 1 else scores if bias is None else scores + bias
    if groups > 1:
        choice = _within_groups(choice, groups, kept_groups, two_of_group)
    ids = torch.sort(choice, dim=-1, stable=True, descending=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if normalize:
        with one_thread():
            weights = weights / (weights.sum(-1, keepdim=True) + added).clamp(min=MIN_SUM)
    return ids.int().contiguous(), (weights * scale).contiguous()


@op(tolerance={torch.float32: (0.0, 0.0)})
def scale_choices(weights: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """weights [T,k] float32 times the factors [E] float32 of the experts ids [T,k] int32."""
    return weights * factors[ids.long()]


def scores_of(logits: Tensor, sigmoid: bool) -> Tensor:
    """The scores of all experts [T,E]: the softmax of their logits, or the sigmoid of each."""
    if sigmoid:
        return 1.0 / (1.0 + torch.exp(-logits))
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    with one_thread():
        return powers / powers.sum(-1, keepdim=True)


def _within_groups(choice: Tensor, groups: int, kept: int, two: bool) -> Tensor:
    """choice [T,E] with -inf for experts outside of the best groups."""
    grouped = choice.view(len(choice), groups, choice.shape[1] // groups)
    ordered = grouped.sort(dim=-1, descending=True).values
    best = ordered[..., 0] + ordered[..., 1] if two else ordered[..., 0]  # [T,G]
    order = torch.sort(best, dim=-1, stable=True, descending=True).indices[:, :kept]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
    return grouped.masked_fill(~allowed[:, :, None], float("-inf")).view(choice.shape)


@op(tolerance=TOLERANCE, follows="linear")
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
    """The sum over j of weights[t,j] * expert ids[t,j] of x [T,H], then + sigmoid(shared_gate) * shared: [T,H].

    An expert's result is `linear`, in float32, of its down weight [H,I] of `gated_linear` of its gate and up weights
    [2I,H], with biases [E,2I] and [E,H].  The sum is float32 in the order of j, shared [T,H] (gate [T,1] float32, None:
    1) last, rounded once.  `activation`: "silu", "gelu_tanh" or "clamped_swiglu", (up + 1) * gate * sigmoid(1.702 gate)
    for the gate clamped to at most 7 and up to -7 .. 7.
    """
    outputs = _outputs(dense.linear.reference, x, ids, gate_up, gate_up_bias, down, down_bias, activation)
    return _combined(outputs, weights, shared, shared_gate, x.dtype)


@op(tolerance=TOLERANCE, follows="linear_int8")
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
    """Do what `experts` does with the products of `linear_int8` and `gated_linear_int8`."""
    outputs = _outputs(quant.linear_int8.reference, x, ids, gate_up, gate_up_bias, down, down_bias, activation)
    return _combined(outputs, weights, shared, shared_gate, x.dtype)


@op(tolerance=float8.TOLERANCE, follows="linear_float8")
def experts_float8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[PackedFloat8],
    gate_up_bias: Tensor | None,
    down: Sequence[PackedFloat8],
    down_bias: Tensor | None,
    activation: str,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Do what `experts` does with the products of `linear_float8` and `gated_linear_float8`."""
    outputs = _outputs(float8.linear_float8.reference, x, ids, gate_up, gate_up_bias, down, down_bias, activation)
    return _combined(outputs, weights, shared, shared_gate, x.dtype)


@op(tolerance=TOLERANCE, follows="linear_wna16")
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
    """Do what `experts` does with the products of `linear_wna16` and `gated_linear_wna16`, or of `linear` where a
    weight is one of floats.  Gate and up of "clamped_swiglu" are one part."""
    outputs = _outputs(_product_of_either, x, ids, gate_up, gate_up_bias, down, down_bias, activation)
    return _combined(outputs, weights, shared, shared_gate, x.dtype)


def _product_of_either(
    x: Tensor, packed: PackedWna16 | PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    if isinstance(packed, PackedWna16):
        return wna16.linear_wna16.reference(x, packed, bias, out_dtype)
    return dense.linear.reference(x, packed, bias, out_dtype)


def _outputs(
    product: Callable[..., Tensor],
    x: Tensor,
    ids: Tensor,
    gate_up: Sequence[Any],
    gate_up_bias: Tensor | None,
    down: Sequence[Any],
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """What each chosen expert returns: [T,k,H] float32.  `product` takes the weights, packed for it."""
    outputs = torch.zeros(*ids.shape, x.shape[1])
    for expert in sorted(set(ids.flatten().tolist())):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        both = product(x[token], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert], None)
        inner = gated(both, activation)
        bias = None if down_bias is None else down_bias[expert]
        outputs[token, slot] = product(inner, down[expert], bias, torch.float32)
    return outputs


def _combined(
    outputs: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    total = torch.zeros(outputs.shape[0], outputs.shape[2])
    for slot in range(outputs.shape[1]):
        total += weights[:, slot, None] * outputs[:, slot]
    if shared is not None:
        gate = 1.0 if shared_gate is None else 1.0 / (1.0 + torch.exp(-shared_gate))
        total += gate * shared.float()
    return total.to(dtype)


def gated(both: Tensor, activation: str) -> Tensor:
    """The activation of a gated product [T,2I]."""
    if activation != "clamped_swiglu":
        return elementwise.gated(both, activation)
    gate, up = both.float().chunk(2, -1)
    gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
    return ((up + 1.0) * (gate / (1.0 + torch.exp(-CLAMPED_SLOPE * gate)))).to(both.dtype)
