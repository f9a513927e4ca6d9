from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokserve import ops
from tokserve.families.quantization.methods import METHODS
from tokserve.families.quantization.quantized import QuantizedWeight, quantize_int4
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.quant import UNQUANTIZED

SHARDS = {"q_proj": 6, "k_proj": 2}


def filled(layer: Linear) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(size, layer.inputs, generator=generator) for name, size in layer.shards.items()}
    for name, weight in weights.items():
        layer.load(name, weight)
    return torch.cat(list(weights.values()))


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_is_the_op_on_the_whole_weight(bias: bool, out_dtype: torch.dtype | None) -> None:
    layer = Linear(40, SHARDS, LayerOptions(torch.bfloat16, METHODS["int8"]), bias=bias)
    weight = filled(layer).bfloat16()
    if bias:
        for name, size in SHARDS.items():
            layer.load_bias(name, torch.randn(size))
    x = torch.randn(5, 40).bfloat16()
    assert torch.equal(layer(x, out_dtype), ops.linear_int8(x, ops.pack_linear_int8(weight), layer.bias, out_dtype))


def test_a_scale_belongs_to_one_output() -> None:
    """A large row costs other rows no precision."""
    layer = Linear(64, SHARDS, LayerOptions(torch.float32, METHODS["int8"]))
    weights = [torch.randn(size, 64) for size in SHARDS.values()]
    weights[0][3] *= 1000
    for name, weight in zip(SHARDS, weights, strict=True):
        layer.load(name, weight)
    x = torch.randn(4, 64)
    exact = x @ torch.cat(weights).T
    assert ((layer(x) - exact).abs().amax(0) < 0.03 * exact.abs().amax(0)).all()


def test_columns_are_cut_between_groups() -> None:
    weight = quantize_int4(torch.randn(4, 112), 32)
    for start, length in ((0, 64), (32, 32), (64, 48), (96, 16)):  # the last group is a shorter one
        part = weight.narrow(1, start, length)
        assert isinstance(part, QuantizedWeight) and torch.equal(part.dense(), weight.dense().narrow(1, start, length))
    for start, length in ((0, 48), (16, 96)):
        part = weight.narrow(1, start, length)
        assert isinstance(part, torch.Tensor) and torch.equal(part, weight.dense().narrow(1, start, length))


def test_joined_rows_mean_what_they_mean_alone_whatever_the_order_of_inputs() -> None:
    (rows,) = quantize_int4(torch.randn(4, 64), 32).parts
    orders = [torch.randperm(64, generator=torch.Generator().manual_seed(seed)).int() for seed in (0, 0, 1)]
    one, same, other = (QuantizedWeight((replace(rows, order=order),)) for order in orders)
    for others, parts in (([same], 1), ([other], 2), ([same, other], 2)):
        joined = one.joined(others)
        assert joined is not None and len(joined.parts) == parts
        assert torch.equal(joined.dense(), torch.cat([weight.dense() for weight in (one, *others)]))


def test_methods_report_the_dtypes_they_keep() -> None:
    assert UNQUANTIZED.kept_dtype(torch.float16) == torch.float16
    assert METHODS["int8"].kept_dtype(torch.float16) == torch.int8
