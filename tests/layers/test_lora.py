"""Adapters of a projection's shards: what they add to their rows, and that other rows keep their bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokserve.families.quantization.methods import METHODS
from tokserve.features.lora.layer import LoraSlots
from tokserve.features.weights.checksums import checksums
from tokserve.layers.linear import GatedLinear, Linear
from tokserve.layers.low_rank import LowRank
from tokserve.layers.mlp import GatedMLP, MLPSpec
from tokserve.layers.options import LayerOptions
from tokserve.layers.quant import UNQUANTIZED, QuantMethod

SHARDS = {"q_proj": 6, "k_proj": 2, "v_proj": 4}


def filled(layer: Linear) -> Tensor:
    parts = {name: torch.randn(size, layer.inputs) for name, size in layer.shards.items()}
    for name, part in parts.items():
        layer.load(name, part)
    return torch.cat(list(parts.values()))


def with_slots(layer: Linear, *, slots: int = 3, rank: int = 4) -> Linear:
    layer.lora = LoraSlots(layer.inputs, layer.shards, slots, rank, layer.dtype)
    return layer


def place(layer: Linear, slot: int, shard: str, weights: LowRank | None) -> None:
    assert layer.lora is not None
    layer.lora.place(slot, shard, weights)


def low_rank(inputs: int, outputs: int, rank: int = 3) -> LowRank:
    return LowRank(torch.randn(rank, inputs), torch.randn(outputs, rank), 0.5)


def test_each_shard_has_what_its_adapter_adds() -> None:
    layer = with_slots(Linear(8, SHARDS, LayerOptions(torch.float32)))
    weight = filled(layer)
    added = {
        slot: {name: low_rank(8, size) for name, size in SHARDS.items() if name != left_out}
        for slot, left_out in ((0, "k_proj"), (2, ""))
    }
    for slot, parts in added.items():
        for name in SHARDS:
            place(layer, slot, name, parts.get(name))
    x, adapters = torch.randn(4, 8), torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    out = layer(x, adapters=adapters)
    for row, slot in enumerate(adapters.tolist()):
        merged = weight.clone().split(list(SHARDS.values()))
        for part, name in zip(merged, SHARDS, strict=True):
            if name in added.get(slot, {}):
                part += 0.5 * added[slot][name].up @ added[slot][name].down
        torch.testing.assert_close(out[row], x[row] @ torch.cat(merged).T)
    assert torch.equal(out[[1, 3]], layer(x)[[1, 3]])  # none, and an empty slot


def test_a_smaller_adapter_leaves_nothing_of_a_larger_one() -> None:
    layer, other = (with_slots(Linear(8, {"o_proj": 5}, LayerOptions(torch.float32))) for _ in range(2))
    weight = filled(layer)
    other.load("o_proj", weight)
    large, small = low_rank(8, 5, rank=4), low_rank(8, 5, rank=2)
    place(layer, 1, "o_proj", large)
    for linear in (layer, other):
        place(linear, 1, "o_proj", small)
    x, ones = torch.randn(3, 8), torch.ones(3, dtype=torch.int32)
    assert torch.equal(layer(x, adapters=ones), other(x, adapters=ones))
    assert layer.lora is not None and other.lora is not None
    assert checksums(layer.lora) == checksums(other.lora)
    place(layer, 1, "o_proj", None)
    assert torch.equal(layer(x, adapters=ones), layer(x))
    assert checksums(layer.lora) == checksums(LoraSlots(8, {"o_proj": 5}, 3, 4, torch.float32))


@pytest.mark.parametrize("quant", [UNQUANTIZED, METHODS["int8"]], ids=["plain", "int8"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_an_adapter_have_the_bits_of_the_fused_gate(
    quant: QuantMethod, activation: str, dtype: torch.dtype
) -> None:
    mlp = GatedMLP(16, MLPSpec(24, activation, bias=True), LayerOptions(dtype, quant))  # type: ignore[arg-type]
    for layer in (mlp.gate_up, mlp.down):
        filled(with_slots(layer))
        for shard, size in layer.shards.items():
            layer.load_bias(shard, torch.randn(size))
            place(layer, 0, shard, low_rank(layer.inputs, size))
    assert isinstance(mlp.gate_up, GatedLinear)
    x, adapters = torch.randn(6, 16).to(dtype), torch.tensor([-1, 0, -1, 0, 1, -1], dtype=torch.int32)
    out, plain = mlp(x, adapters), mlp(x)
    alone = torch.tensor([0, 2, 4, 5])
    assert torch.equal(out[alone], plain[alone])
    assert not torch.equal(out[1], plain[1]) and not torch.equal(out[3], plain[3])
