"""Float8 products of rows that are rounded to float8: the rounding, the sums, and rows that do not depend on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.samples.common import normal
from tests.ops.samples.float8 import Scaled, by_group
from tokserve import ops  # noqa: F401  (declares the ops)
from tokserve.ops import registry
from tokserve.ops.float8 import quantize
from tokserve.ops.registry import OPS

registry.load_extension("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = OPS["linear_float8"].available("cpu")


def call(name: str, op: str, *arguments: Any) -> Any:
    return OPS[op].implementations[name].call(*arguments)


def channels(weight: Tensor) -> Scaled:
    values, scales = quantize(weight)
    return values, scales[None], weight.shape[1]


def rounded(x: Tensor) -> Tensor:
    """The rows as float8 numbers times their scales, in float64."""
    values, scales = quantize(x)
    return values.double() * scales.double()[:, None]


def dense(scaled: Scaled) -> Tensor:
    values, scales, group = scaled
    return values.double() * scales.double().t().repeat_interleave(group, 1)[:, : values.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_products_are_those_of_the_rounded_rows(name: str, dtype: torch.dtype) -> None:
    """Within the order of a sum in float32: a row that is rounded otherwise would be further off."""
    for columns, rows in ((512, 70), (264, 10), (20, 130)):
        weight = normal(torch.float32, 3, rows, columns)
        for scaled in (channels(weight), by_group(weight), by_group(weight, 128)):
            x = normal(dtype, 1, 9, columns) * torch.logspace(-6, 3, 9)[:, None].to(dtype)
            packed = call(name, "pack_scaled_float8", *scaled)
            result = call(name, "linear_float8", x, packed, None, torch.float32)
            expected = rounded(x) @ dense(scaled).t()
            bound = rounded(x).abs() @ dense(scaled).abs().t()
            assert ((result.double() - expected).abs() <= bound * 4e-6).all()


def test_every_number_is_rounded_to_the_nearest_with_ties_to_even() -> None:
    """Numbers between two of float8 and halfway, of a row whose scale is 1, by products with one."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    near = torch.cat([between, between.nextafter(torch.tensor(0.0)), between.nextafter(torch.tensor(448.0))])
    for name in IMPLEMENTATIONS:
        for x in (near, -near):
            rows = torch.diag(x)[:, :, None].expand(-1, -1, 2).flatten(1).contiguous()  # each number alone, and 448
            rows[:, 1] = 448.0
            rows[0, 0] = x[0]
            weight = torch.zeros(len(x), 2 * len(x))
            weight[torch.arange(len(x)), 2 * torch.arange(len(x))] = 448.0
            packed = call(name, "pack_scaled_float8", *channels(weight))
            result = call(name, "linear_float8", rows, packed, None, torch.float32).diagonal() / 448
            assert torch.equal(result, x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    x = normal(dtype, 1, 70, 200)
    for scaled in (channels(normal(dtype, 2, 130, 200)), by_group(normal(dtype, 2, 130, 200))):
        for op, gated in (("linear_float8", False), ("gated_linear_float8", True)):
            packed = call(name, "pack_scaled_float8", *scaled, gated)
            result = call(name, op, x, packed, None, None)
            for size in (1, 2, 3, 4, 7, 64):
                assert torch.equal(call(name, op, x[70 - size :], packed, None, None), result[70 - size :])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_gated_product_is_the_gate_of_the_product(name: str) -> None:
    x, scaled = normal(torch.bfloat16, 1, 9, 136), by_group(normal(torch.float32, 2, 140, 136))
    plain = call(name, "linear_float8", x, call(name, "pack_scaled_float8", *scaled), None, None)
    packed = call(name, "pack_scaled_float8", *scaled, True)
    assert torch.equal(call(name, "gated_linear_float8", x, packed, None, None), plain)
    for activation in ("silu", "gelu_tanh"):
        expected = call(name, f"{activation.removesuffix('_tanh')}_mul", plain)
        assert torch.equal(call(name, "gated_linear_float8", x, packed, None, activation), expected)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_that_are_not_finite_are_not_a_number_alone(name: str) -> None:
    for scaled in (channels(normal(torch.float32, 2, 70, 192)), by_group(normal(torch.float32, 2, 70, 192))):
        for value in (torch.inf, -torch.inf, torch.nan):
            x = normal(torch.bfloat16, 1, 5, 192)
            x[2, 7] = value
            result = call(name, "linear_float8", x, call(name, "pack_scaled_float8", *scaled), None, None)
            assert result[2].isnan().all() and result[:2].isfinite().all() and result[3:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_experts_are_products_of_their_rows(name: str, dtype: torch.dtype) -> None:
    """One of them in groups, as its neighbours are not; whichever tokens come with a token."""
    count, width, inner = 5, 136, 72
    ups = [normal(torch.float32, 10 + expert, 2 * inner, width) / width**0.5 for expert in range(count)]
    downs = [normal(torch.float32, 20 + expert, width, inner) / inner**0.5 for expert in range(count)]
    scaled = [(by_group if expert == 3 else channels)(weight) for expert, weight in enumerate(ups)]
    gate_up = [call(name, "pack_scaled_float8", *one, True) for one in scaled]
    down = [call(name, "pack_scaled_float8", *channels(weight)) for weight in downs]
    x, chosen = normal(dtype, 1, 40, width), torch.rand(40, 2, generator=torch.Generator().manual_seed(1))
    ids = torch.rand(40, count, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :2].int().contiguous()
    result = call(name, "experts_float8", x, ids, chosen, gate_up, None, down, None, "silu")
    expected = torch.zeros(40, width)
    for slot in range(2):
        for expert in range(count):
            tokens = (ids[:, slot] == expert).nonzero()[:, 0]
            hidden = call(name, "gated_linear_float8", x[tokens], gate_up[expert], None, "silu")
            products = call(name, "linear_float8", hidden, down[expert], None, torch.float32)
            expected[tokens] += chosen[tokens, slot, None] * products
    assert torch.equal(result, expected.to(dtype))
    for rows in (slice(3, 4), slice(7, 20)):
        part = x[rows], ids[rows].contiguous(), chosen[rows].contiguous()
        alone = call(name, "experts_float8", *part, gate_up, None, down, None, "silu")
        assert torch.equal(alone, result[rows])
