"""A mixture of experts on the GPU: the choice of experts, products of rows sorted by expert, and their weighted sum.

Sizes of tiles and of the grid follow from shapes alone, so that a step can be captured; programs beyond the last
tile of all experts return at once.  A product's chain over K is that of `linear_kernel`, whatever rows
came to the expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu import candidates
from tokserve.gpu.kernels import elementwise
from tokserve.gpu.kernels.dense import BLOCK_K, float8_step
from tokserve.gpu.kernels.elementwise import ACTIVATIONS
from tokserve.gpu.kernels.int8 import INTEGER_STEP, quantize
from tokserve.gpu.kernels.launch import (
    EXACT,
    addresses,
    cdiv,
    is_dependent,
    launch_dependents,
    launched,
    next_power_of_2,
    tuned,
    wait_for_inputs,
    warps,
)
from tokserve.gpu.kernels.products.experts import gated_experts_kernel
from tokserve.gpu.kernels.products.tiles import add_step, rows_of_tile
from tokserve.gpu.kernels.sums import tree_sum
from tokserve.ops import mixture
from tokserve.ops.dense import PackedWeight
from tokserve.ops.float8 import PackedFloat8
from tokserve.ops.quant import PackedInt8

COLUMNS = 1024  # of a row that one program adds up
CHOICES = 256  # that a program of `scale_choices` has
SORTED = 1024  # choices that a program of the sort reads at a time
Sorting = tuple[Tensor, Tensor]  # choices by expert [T * k] int32, and where each expert's begin [E + 1] int32
Weight = PackedWeight | PackedInt8 | PackedFloat8
NO_INDEX = tl.constexpr(1 << 30)


def dependence(device: int | None) -> int:
    """`is_dependent` of a mixture's kernels, which are on trial."""
    return is_dependent(device) if candidates.is_on("experts_dependent") else 0


def options(device: int | None) -> dict[str, Any]:
    """`launched` with `dependence`."""
    return launched(device) if dependence(device) else EXACT


@triton.jit
def best_of(values, available, index):
    """The index of the largest available value, the lowest of equals."""
    top = tl.max(tl.where(available, values, float("-inf")), 0)
    return tl.min(tl.where(available & (values == top), index, NO_INDEX), 0)


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    added,
    scale,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TWO: tl.constexpr,
    NORMALIZE: tl.constexpr,
    MIN_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The experts of one token."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    available = index < EXPERTS
    logits = tl.load(logits_ptr + token * EXPERTS + index, mask=available, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tree_sum(powers)
    choice = logits
    if BIAS:
        choice = scores + tl.load(bias_ptr + index, mask=available, other=0.0)
    elif GROUPS > 1:
        choice = scores
    choice = tl.where(choice == choice, choice, float("-inf"))  # a number for each, so that one is chosen
    if GROUPS > 1:
        group, groups = index // (EXPERTS // GROUPS), tl.arange(0, GROUP_BLOCK)
        value = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            members = available & (group == g)
            first = best_of(choice, members, index)
            score = tl.max(tl.where(members, choice, float("-inf")), 0)
            if TWO:
                score += tl.max(tl.where(members & (index != first), choice, float("-inf")), 0)
            value = tl.where(groups == g, score, value)
        left, allowed = groups < GROUPS, index < 0
        for _ in tl.static_range(KEPT):
            kept = best_of(value, left, groups)
            left = left & (groups != kept)
            allowed = allowed | (group == kept)
        available = available & allowed
    slot = tl.arange(0, K_BLOCK)
    chosen, weights, total = tl.zeros([K_BLOCK], tl.int32), tl.zeros([K_BLOCK], tl.float32), 0.0
    for j in tl.static_range(K):
        best = best_of(choice, available, index)
        available = available & (index != best)
        weight = tl.sum(tl.where(index == best, scores, 0.0), 0)
        total += weight
        chosen, weights = tl.where(slot == j, best, chosen), tl.where(slot == j, weight, weights)
    if NORMALIZE:
        weights = weights / tl.maximum(total + added, MIN_SUM)
    launch_dependents(DEPENDENT)
    tl.store(ids_ptr + token * K + slot, chosen, mask=slot < K)
    tl.store(weights_ptr + token * K + slot, weights * scale, mask=slot < K)


@mixture.route.implement("triton", device="cuda")
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
    tokens, experts = logits.shape
    ids, weights = logits.new_empty(tokens, k, dtype=torch.int32), logits.new_empty(tokens, k)
    if tokens:
        block = next_power_of_2(experts)
        route_kernel[(tokens,)](
            logits.contiguous(),
            logits if bias is None else bias,
            ids,
            weights,
            float(added),
            float(scale),
            experts,
            k,
            sigmoid,
            bias is not None,
            groups,
            kept_groups,
            two_of_group,
            normalize,
            mixture.MIN_SUM,
            block,
            next_power_of_2(groups),
            next_power_of_2(k),
            dependence(logits.device.index),
            num_warps=warps(block),
            **options(logits.device.index),
        )
    return ids, weights


@triton.jit
def choice_kernel(weight_ptr, id_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """BLOCK choices of all tokens times the factors of their experts."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    factor = tl.load(factor_ptr + tl.load(id_ptr + index, mask=inside, other=0), mask=inside, other=0.0)
    tl.store(out_ptr + index, tl.load(weight_ptr + index, mask=inside, other=0.0) * factor, mask=inside)


@mixture.scale_choices.implement("triton", device="cuda")
def scale_choices(weights: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    out = torch.empty_like(weights)
    if count := weights.numel():
        choice_kernel[(cdiv(count, CHOICES),)](weights, ids, factors, out, count, CHOICES, num_warps=4, **EXACT)
    return out


@triton.jit(do_not_specialize=["choices"])
def experts_kernel(
    x_ptr,
    weights_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    x_scale_ptr,
    weight_scales_ptr,
    choices,
    outputs,
    inputs,
    x_stride,
    GATHER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of the rows of one expert times its weight's transpose.  GATHER > 0: row r of the sorted rows is token
    order[r] // GATHER of x.  Of int8 and float8 there is a scale for each row of x, and for each output of an expert;
    GROUP > 0: for each output and so many inputs."""
    wait_for_inputs(DEPENDENT)
    INTEGERS: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    SCALED: tl.constexpr = x_ptr.dtype.element_ty == tl.int8 or x_ptr.dtype.element_ty == tl.float8e4nv
    expert, start, end = rows_of_tile(starts_ptr, tiles_ptr, EXPERTS, E_BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    address = tl.load(weights_ptr + expert)
    if address == 0:
        return
    row = start + tl.arange(0, BLOCK_M)
    output, step = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_valid, weight_valid = (row < end)[:, None], (output < outputs)[:, None]
    source = row
    if GATHER > 0:
        source = tl.load(order_ptr + row, mask=row < end, other=0) // GATHER
    weight_ptr = tl.multiple_of(address.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_stride + step[None, :]
    weight_ptrs = weight_ptr + output.to(tl.int64)[:, None] * inputs + step[None, :]
    scales_ptr = weight_scales_ptr
    if SCALED:
        scales_ptr = tl.load(weight_scales_ptr + expert).to(tl.pointer_type(tl.float32))
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGERS else tl.float32)
    for at in range(0, inputs, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs + at, mask=x_valid, other=0.0)
            weight = tl.load(weight_ptrs + at, mask=weight_valid, other=0.0)
        else:
            remaining = (step < inputs - at)[None, :]
            x = tl.load(x_ptrs + at, mask=x_valid & remaining, other=0.0)
            weight = tl.load(weight_ptrs + at, mask=weight_valid & remaining, other=0.0)
        sums = add_step(sums, x, weight, scales_ptr, at, output, outputs, outputs, SCALED, GROUP, BLOCK_K)
    launch_dependents(DEPENDENT)
    if SCALED:
        sums = sums.to(tl.float32) * tl.load(x_scale_ptr + source, mask=row < end, other=0.0)[:, None]
        if GROUP == 0:
            sums = sums * tl.load(scales_ptr + output, mask=output < outputs, other=0.0)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + expert * outputs + output, mask=output < outputs, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    offset = row.to(tl.int64)[:, None] * outputs + output[None, :]
    valid = (row < end)[:, None] & (output < outputs)[None, :]
    tl.store(out_ptr + offset, sums.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def combine_kernel(
    outputs_ptr,
    places_ptr,
    weights_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    width,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A part of one token's sum, in the order of its choices."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places_ptr + token * K + j).to(tl.int64)
        total += tl.load(weights_ptr + token * K + j) * tl.load(outputs_ptr + place * width + column, mask=valid)
    if SHARED:
        shared = tl.load(shared_ptr + token * width + column, mask=valid).to(tl.float32)
        if GATED:
            shared = shared * (1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + token))))
        total += shared
    launch_dependents(DEPENDENT)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["choices"])
def sort_kernel(
    ids_ptr,
    order_ptr,
    places_ptr,
    starts_ptr,
    choices,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The choices of one expert, in their order: where they begin among all, and the place of each."""
    wait_for_inputs(DEPENDENT)
    expert, index = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)  # of choices of experts with lower numbers
    for at in range(0, choices, BLOCK):
        ids = tl.load(ids_ptr + at + index, mask=at + index < choices, other=EXPERTS)
        before += (ids < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts_ptr + expert, place)
    if expert == EXPERTS - 1:
        tl.store(starts_ptr + EXPERTS, choices)
    for at in range(0, choices, BLOCK):
        ids = tl.load(ids_ptr + at + index, mask=at + index < choices, other=EXPERTS)
        chosen = (ids == expert).to(tl.int32)
        places = place + tl.cumsum(chosen, 0) - 1
        tl.store(order_ptr + places, at + index, mask=chosen > 0)
        tl.store(places_ptr + at + index, places, mask=chosen > 0)
        place += tl.sum(chosen, 0)
    launch_dependents(DEPENDENT)


def sorted_choices(ids: Tensor, count: int) -> tuple[Sorting, Tensor]:
    """The choices [T, k] int32 of `count` experts by expert, those of one in their order; and the place of each choice
    among them [T * k] int32."""
    choices = ids.numel()
    order, places = ids.new_empty(choices), ids.new_empty(choices)
    starts = ids.new_empty(count + 1)
    block = min(SORTED, max(32, next_power_of_2(choices)))
    sort_kernel[(count,)](
        ids.contiguous(),
        order,
        places,
        starts,
        choices,
        count,
        block,
        dependence(ids.device.index),
        num_warps=warps(block),
        **options(ids.device.index),
    )
    return (order, starts), places


@triton.jit
def tiles_kernel(
    starts_ptr,
    tiles_ptr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles of ROWS rows up to each expert's last."""
    wait_for_inputs(DEPENDENT)
    index = tl.arange(0, BLOCK)
    start = tl.load(starts_ptr + index, mask=index < EXPERTS, other=0)
    end = tl.load(starts_ptr + 1 + index, mask=index < EXPERTS, other=0)
    launch_dependents(DEPENDENT)
    tl.store(tiles_ptr + index, tl.cumsum((end - start + ROWS - 1) // ROWS, 0), mask=index < EXPERTS)


def tiles_of(sorting: Sorting, rows: int) -> tuple[Tensor, int]:
    """Tiles of so many rows up to each expert's last [E] int32, and the most that there may be."""
    order, starts = sorting
    count = len(starts) - 1
    tiles, block = starts.new_empty(count), next_power_of_2(count)
    dependent = dependence(starts.device.index)
    tiles_kernel[(1,)](
        starts, tiles, count, rows, block, dependent, num_warps=warps(block), **options(starts.device.index)
    )
    return tiles, min(len(order), count + len(order) // rows)


def _step(x: Tensor, config: dict[str, Any], group: int) -> int:
    """Inputs of one step of a product, which are part of the arithmetic of float8."""
    if x.dtype == torch.int8:
        return INTEGER_STEP
    step: int = float8_step(group) if x.dtype == torch.float8_e4m3fn else config.get("step", BLOCK_K)
    return step


def _scales_of(weights: Sequence[Weight | None], x: Tensor) -> Tensor:
    """The addresses of the weights' scales, by expert."""
    scaled = (weight if isinstance(weight, PackedInt8 | PackedFloat8) else None for weight in weights)
    return addresses(tuple(0 if weight is None else weight.scales.data_ptr() for weight in scaled), x.device)


def product(
    x: Tensor,
    weights: Sequence[Weight | None],
    bias: Tensor | None,
    out: Tensor,
    sorting: Sorting,
    k: int,
    scales: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """out [T * k, N] = the sorted rows of x times their experts' weights; k > 0: x is [T, K], its rows unsorted.

    Rows of experts without a weight are left as they are.  `scales` [T]: those of rows of int8 or float8.  `group`:
    inputs that share a scale of a float8 weight, 0: all.
    """
    order, starts = sorting
    choices, outputs, inputs, count = len(order), out.shape[1], x.shape[1], len(weights)
    config = tuned("linear", x.device.index, rows=-(-choices // count), outputs=outputs, bytes=x.element_size())
    block_m, block_n = config["tile"]
    block_k = _step(x, config, group)
    tiles, grid_tiles = tiles_of(sorting, block_m)
    grid = (grid_tiles, cdiv(outputs, block_n))
    table = addresses(tuple(0 if weight is None else weight.packed.data_ptr() for weight in weights), x.device)
    experts_kernel[grid](
        x,
        table,
        out if bias is None else bias,
        out,
        order,
        starts,
        tiles,
        out if scales is None else scales,
        table if scales is None else _scales_of(weights, x),
        choices,
        outputs,
        inputs,
        x.stride(0),
        k,
        count,
        bias is not None,
        inputs % block_k == 0,
        group,
        next_power_of_2(count),
        block_m,
        block_n,
        block_k,
        dependence(x.device.index),
        num_warps=config["warps"],
        num_stages=config["stages"],
        **options(x.device.index),
    )
    return out


def gated_product(
    x: Tensor,
    weights: Sequence[Weight],
    bias: Tensor | None,
    sorting: Sorting,
    k: int,
    activation: str,
    dtype: torch.dtype,
    scales: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """The activation of the `product` of weights [2I, K] and unsorted rows: [T * k, I] in `dtype`."""
    order, starts = sorting
    choices, inner, inputs, count = len(order), weights[0].rows // 2, x.shape[1], len(weights)
    if not candidates.is_on("experts_gated") or activation not in ACTIVATIONS:
        both = product(x, weights, bias, x.new_empty((choices, 2 * inner), dtype=dtype), sorting, k, scales, group)
        return activated(both, activation)
    out = x.new_empty((choices, inner), dtype=dtype)
    config = tuned("linear", x.device.index, rows=-(-choices // count), outputs=2 * inner, bytes=x.element_size())
    block_m, block_n = config["tile"][0], max(16, config["tile"][1] // 2)
    block_k = _step(x, config, group)
    tiles, grid_tiles = tiles_of(sorting, block_m)
    table = addresses(tuple(weight.packed.data_ptr() for weight in weights), x.device)
    gated_experts_kernel[(grid_tiles, cdiv(inner, block_n))](
        x,
        table,
        out if bias is None else bias,
        out,
        order,
        starts,
        tiles,
        out if scales is None else scales,
        table if scales is None else _scales_of(weights, x),
        inner,
        inputs,
        x.stride(0),
        k,
        count,
        bias is not None,
        inputs % block_k == 0,
        ACTIVATIONS.index(activation),
        group,
        next_power_of_2(count),
        block_m,
        block_n,
        block_k,
        dependence(x.device.index),
        num_warps=config["warps"],
        num_stages=config["stages"],
        **options(x.device.index),
    )
    return out


def activated(both: Tensor, activation: str) -> Tensor:
    """The activation of a gated product [T * k, 2I]."""
    if activation == "clamped_swiglu":
        return mixture.gated(both, activation)
    return elementwise.activate(both, activation, True)


@mixture.experts.implement("cublas", device="cuda")
@mixture.experts.implement("triton", device="cuda")
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

    def up(sorting: Sorting) -> Tensor:
        return gated_product(x, gate_up, gate_up_bias, sorting, ids.shape[1], activation, x.dtype)

    def back(inner: Tensor, out: Tensor, sorting: Sorting) -> None:
        product(inner, down, down_bias, out, sorting, 0)

    return mixed(x, ids, weights, len(gate_up), up, back, shared, shared_gate)


@mixture.experts_int8.implement("triton", device="cuda")
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

    def up(sorting: Sorting) -> Tensor:
        values, scales = quantize(x)
        return gated_product(values, gate_up, gate_up_bias, sorting, ids.shape[1], activation, x.dtype, scales)

    def back(inner: Tensor, out: Tensor, sorting: Sorting) -> None:
        values, scales = quantize(inner)
        product(values, down, down_bias, out, sorting, 0, scales)

    return mixed(x, ids, weights, len(gate_up), up, back, shared, shared_gate)


def mixed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    count: int,
    up: Callable[[Sorting], Tensor],
    back: Callable[[Tensor, Tensor, Sorting], None],
    shared: Tensor | None,
    shared_gate: Tensor | None,
) -> Tensor:
    """`experts` of `count` experts by these products of sorted rows: `up` returns [T * k, I], and `back` fills
    [T * k, H] float32."""
    (tokens, width), k = x.shape, ids.shape[1]
    out = x.new_empty(tokens, width)
    if tokens == 0:
        return out
    sorting, places = sorted_choices(ids, count)
    inner = up(sorting)
    outputs = torch.empty(len(places), width, dtype=torch.float32, device=x.device)
    back(inner, outputs, sorting)
    block = min(COLUMNS, next_power_of_2(width))
    combine_kernel[(tokens, cdiv(width, block))](
        outputs,
        places,
        weights,
        out if shared is None else shared,
        weights if shared_gate is None else shared_gate,
        out,
        width,
        k,
        shared is not None,
        shared_gate is not None,
        block,
        dependence(x.device.index),
        num_warps=warps(block),
        **options(x.device.index),
    )
    return out
