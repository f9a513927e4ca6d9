from __future__ import annotations

import weakref

import pytest
import torch

from tokserve.families.quantization.methods import METHODS
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions

SHARDS = {"q_proj": 6, "k_proj": 2, "v_proj": 4}


def filled(layer: Linear, seed: int = 0) -> torch.Tensor:
    """Load random shards in reverse order; the whole weight."""
    generator = torch.Generator().manual_seed(seed)
    parts = {name: torch.randn(size, layer.inputs, generator=generator) for name, size in layer.shards.items()}
    for name in reversed(parts):
        layer.load(name, parts[name])
    return torch.cat(list(parts.values()))


def test_shards_are_rows_of_one_product_in_declared_order() -> None:
    layer = Linear(8, SHARDS, LayerOptions(torch.float32))
    weight = filled(layer)
    x = torch.randn(5, 8)
    torch.testing.assert_close(layer(x), x @ weight.T)


def test_biases_belong_to_their_shard() -> None:
    layer = Linear(8, SHARDS, LayerOptions(torch.float32), bias=True)
    weight = filled(layer)
    parts = [torch.randn(size) for size in SHARDS.values()]
    for name, part in zip(SHARDS, parts, strict=True):
        layer.load_bias(name, part)
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), x @ weight.T + torch.cat(parts))


def test_parameters_have_name_shape_and_load() -> None:
    layer = Linear(8, SHARDS, LayerOptions(torch.float32), bias=True)
    parameters = layer.parameters()
    assert {name: parameter.shape for name, parameter in parameters.items()} == {
        "q_proj.weight": (6, 8),
        "q_proj.bias": (6,),
        "k_proj.weight": (2, 8),
        "k_proj.bias": (2,),
        "v_proj.weight": (4, 8),
        "v_proj.bias": (4,),
    }
    weights = {name: torch.randn(parameter.shape) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.load(weights[name])
    x = torch.randn(2, 8)
    q = x @ weights["q_proj.weight"].T + weights["q_proj.bias"]
    torch.testing.assert_close(layer(x)[:, :6], q)


@pytest.mark.parametrize("shape", [(2, 7), (3, 8), (8, 2), (2,), (1, 8)])
def test_another_shape_is_refused_with_both(shape: tuple[int, ...]) -> None:
    layer = Linear(8, SHARDS, LayerOptions(torch.float32), bias=True)
    with pytest.raises(ValueError, match=rf"k_proj: expected .*\[2, 8\], found \[{', '.join(map(str, shape))}\]"):
        layer.load("k_proj", torch.zeros(shape))
    with pytest.raises(ValueError, match=r"k_proj: expected .*\[2\], found \[1\]"):
        layer.load_bias("k_proj", torch.zeros(1))


def test_unknown_shards_are_refused_by_name() -> None:
    layer = Linear(8, SHARDS, LayerOptions(torch.float32))
    with pytest.raises(ValueError, match=r"gate_proj.*q_proj, k_proj, v_proj"):
        layer.load("gate_proj", torch.zeros(2, 8))
    with pytest.raises(ValueError, match="no bias"):
        layer.load_bias("k_proj", torch.zeros(2))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_unpacked_shards_are_freed(quantization: str) -> None:
    layer = Linear(8, SHARDS, LayerOptions(torch.float32, METHODS[quantization]))
    unpacked = []
    for shard, outputs in SHARDS.items():
        weight = torch.randn(outputs, 8)
        layer.load(shard, weight)
        unpacked.append(weakref.ref(weight))
    del weight
    assert [one() for one in unpacked] == [None] * len(SHARDS)


def test_loading_again_replaces() -> None:
    layer = Linear(8, SHARDS, LayerOptions(torch.float32))
    filled(layer)
    x, packed = torch.randn(2, 8), layer.packed
    before = layer(x)
    weight = filled(layer, seed=1)
    torch.testing.assert_close(layer(x), x @ weight.T)
    layer.packed = packed
    assert torch.equal(layer(x), before), "the new weight has memory of its own"


def test_loads_convert_and_copy() -> None:
    layer = Linear(8, {"down_proj": 4}, LayerOptions(torch.bfloat16))
    weight = torch.randn(4, 8)
    rounded = weight.bfloat16()
    layer.load("down_proj", weight)
    weight.zero_()
    x = torch.randn(2, 8).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    full = layer(x, out_dtype=torch.float32)
    assert full.dtype == torch.float32
    torch.testing.assert_close(full, x.float() @ rounded.float().T)
