from __future__ import annotations

import pytest
import torch

from tokserve import ops
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.quant import METHODS, UNQUANTIZED

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
    """A large row costs its neighbours no precision."""
    layer = Linear(64, SHARDS, LayerOptions(torch.float32, METHODS["int8"]))
    weights = [torch.randn(size, 64) for size in SHARDS.values()]
    weights[0][3] *= 1000
    for name, weight in zip(SHARDS, weights, strict=True):
        layer.load(name, weight)
    x = torch.randn(4, 64)
    exact = x @ torch.cat(weights).T
    assert ((layer(x) - exact).abs().amax(0) < 0.03 * exact.abs().amax(0)).all()


def test_methods_say_what_they_keep() -> None:
    assert UNQUANTIZED.kept_dtype(torch.float16) == torch.float16
    assert METHODS["int8"].kept_dtype(torch.float16) == torch.int8
