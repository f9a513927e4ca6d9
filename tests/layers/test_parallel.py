"""Layers that two ranks share: each holds its part of the weights, and the parts give what one rank computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers.test_attention import DIM, HEADS, HIDDEN, KV_HEADS, ROPE, TABLE, TOKENS, one_row
from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.families.mixtures.experts import Experts, MixtureSpec, RouterSpec
from tokserve.families.quantization.methods import FLOAT8, Float8Weight
from tokserve.layers.attention import Attention, AttentionSpec
from tokserve.layers.embedding import Head
from tokserve.layers.linear import GatedLinear, Linear
from tokserve.layers.mlp import GatedMLP, MLPSpec
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import ALONE, Group
from tokserve.layers.parameter import Parameter

SHARDS = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
RANKS = (Group(0, 2), Group(1, 2))
X = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))


pytestmark = pytest.mark.usefixtures("kernels")


def options(group: Group) -> LayerOptions:
    return LayerOptions(torch.float32, group=group)


def fill(parameters: dict[str, Parameter]) -> None:
    """Load the same values for a name on every rank."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        parameter.take(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)


def shards_of(out: Tensor, layer: Linear) -> list[Tensor]:
    return list(torch.split(out, list(layer.shards.values()), 1))


def test_columns_are_the_whole_product_bit_by_bit() -> None:
    undivided = Linear(96, SHARDS, options(ALONE), bias=True, split="column")
    parts = [Linear(96, SHARDS, options(rank), bias=True, split="column") for rank in RANKS]
    for layer in (undivided, *parts):
        fill(layer.parameters())
    assert parts[0].shards == {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    assert {name: parameter.shape for name, parameter in parts[0].parameters().items()} == {
        name: parameter.shape for name, parameter in undivided.parameters().items()
    }
    results = zip(*(shards_of(part(X), part) for part in parts), strict=True)
    for expected, halves in zip(shards_of(undivided(X), undivided), results, strict=True):
        assert torch.equal(torch.cat(halves, 1), expected)


def test_columns_of_a_gated_product_are_columns_of_its_result() -> None:
    shards = {"gate_proj": 64, "up_proj": 64}
    undivided = GatedLinear(96, shards, "silu", options(ALONE), split="column")
    parts = [GatedLinear(96, shards, "silu", options(rank), split="column") for rank in RANKS]
    for layer in (undivided, *parts):
        fill(layer.parameters())
    assert torch.equal(torch.cat([part(X) for part in parts], 1), undivided(X))


def test_rows_add_up_in_rank_order() -> None:
    undivided = Linear(96, {"o_proj": 40}, options(ALONE), bias=True, split="row")
    parts = [Linear(96, {"o_proj": 40}, options(rank), bias=True, split="row") for rank in RANKS]
    for layer in (undivided, *parts):
        fill(layer.parameters())
    assert [part.inputs for part in parts] == [48, 48]
    total = sum(part(x.contiguous()) for part, x in zip(parts, X.chunk(2, 1), strict=True))
    torch.testing.assert_close(total, undivided(X), atol=1e-5, rtol=1e-5)


def test_a_rank_keeps_the_weights_of_its_own_part() -> None:
    def kept(layer: Linear) -> Tensor:
        assert isinstance(layer.packed, ops.PackedWeight)
        return layer.packed.unpacked(0, layer.outputs)

    weights = {name: torch.randn(size, 96) for name, size in SHARDS.items()}
    for rank in RANKS:
        layer = Linear(96, SHARDS, options(rank), split="column")
        for name, weight in weights.items():
            layer.load(name, weight)
        expected = [weight.chunk(2)[rank.rank] for weight in weights.values()]
        assert torch.equal(kept(layer), torch.cat(expected))
        layer = Linear(96, {"o_proj": 40}, options(rank), split="row")
        weight = torch.randn(40, 96)
        layer.load("o_proj", weight)
        assert torch.equal(kept(layer), weight.chunk(2, 1)[rank.rank])


def test_stored_weights_are_divided_with_their_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = Float8Weight(
        torch.randn(8, 120, generator=generator).to(torch.float8_e4m3fn), torch.rand(4, 8, generator=generator), 32
    )
    for dim, start, length, kind in ((0, 4, 4, Float8Weight), (1, 64, 56, Float8Weight), (1, 60, 60, Tensor)):
        part = weight.narrow(dim, start, length)
        assert isinstance(part, kind)
        dense = part if isinstance(part, Tensor) else part.dense()
        assert torch.equal(dense, weight.dense().narrow(dim, start, length))
    per_row = Float8Weight(weight.values, weight.scales[:1], 120)
    part = per_row.narrow(1, 60, 60)
    assert isinstance(part, Float8Weight) and torch.equal(part.dense(), per_row.dense()[:, 60:])
    for rank in RANKS:
        layer = Linear(120, {"o_proj": 8}, LayerOptions(torch.float32, FLOAT8, rank), split="row")
        layer.parameters()["o_proj.weight"].take(per_row)
        half = per_row.narrow(1, 60 * rank.rank, 60)
        assert torch.equal(layer.packed.packed, FLOAT8.pack(half).packed)


@pytest.mark.parametrize(
    "spec", [MLPSpec(64, "silu", bias=True), MLPSpec(64, "silu", up_names=("gate_up_proj",))], ids=["two", "one"]
)
def test_the_mlp_of_two_ranks_adds_up(spec: MLPSpec) -> None:
    """Gate and up are two tensors, or one that is divided in both halves."""
    undivided, *parts = (GatedMLP(96, spec, options(group)) for group in (ALONE, *RANKS))
    for layer in (undivided, *parts):
        fill(layer.parameters())
    torch.testing.assert_close(sum(part(X) for part in parts), undivided(X), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_the_experts_of_two_ranks_add_up(bias: bool) -> None:
    kinds: tuple[dict[str, Any], ...] = ({}, {"activation": "clamped_swiglu", "stacked": True, "interleaved": True})
    spec = MixtureSpec(4, 64, RouterSpec(2), bias=bias, **kinds[bias])
    undivided, *parts = (Experts(96, spec, options(group)) for group in (ALONE, *RANKS))
    for layer in (undivided, *parts):
        fill(layer.parameters())
    ids, weights = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [2, 0]], dtype=torch.int32), torch.rand(5, 2)
    results = [layer(X, ids, weights, None, None) for layer in (undivided, *parts)]
    torch.testing.assert_close(results[1] + results[2], results[0], atol=1e-5, rtol=1e-5)


def test_experts_that_are_loaded_again_have_memory_of_their_own() -> None:
    layer = Experts(96, MixtureSpec(1, 64, RouterSpec(1)), options(ALONE))
    ids, weights = torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1)
    results = []
    for seed in (0, 1):
        before, packed = results[-1:], list(layer.gate_up)
        for name, parameter in layer.parameters().items():
            parameter.take(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
            if before and "gate" in name:
                assert layer.gate_up == packed and torch.equal(layer(X, ids, weights, None, None), before[0])
        results.append(layer(X, ids, weights, None, None))
    assert not torch.equal(*results)


@pytest.mark.parametrize("kv_heads", [KV_HEADS, 1])
def test_the_attention_of_two_ranks_adds_up(kv_heads: int) -> None:
    """Both ranks have the KV head if there is only one."""
    bias = kv_heads > 1
    spec = AttentionSpec(HEADS, kv_heads, DIM, DIM**-0.5, ROPE, qkv_bias=bias, out_bias=bias)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    results = []
    for group in (ALONE, *RANKS):
        layer = Attention(HIDDEN, spec, options(group))
        assert layer.kv_spec().heads == max(1, kv_heads // group.size)
        fill(layer.parameters())
        results.append(layer(x, one_row(layer.kv_spec()), 0, TABLE))
    torch.testing.assert_close(results[1] + results[2], results[0], atol=1e-5, rtol=1e-5)


class Gathered:
    """Collectives of a rank to which another sends `others`."""

    def __init__(self, others: Tensor) -> None:
        self.others = others

    def add(self, part: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat((part, self.others), 1)


def test_a_vocabulary_that_two_ranks_cannot_halve_has_the_logits_of_one() -> None:
    vocab = 33
    undivided = Head(vocab, 96, options(ALONE))
    fill(undivided.parameters())
    expected = undivided(X)
    sent = torch.nn.functional.pad(expected[:, 17:], (0, 1))  # by a rank with a row less
    first = Head(vocab, 96, options(Group(0, 2, Gathered(sent))))
    fill(first.parameters())
    logits = first(X)
    assert torch.equal(logits, expected) and logits.is_contiguous()  # as the kernels take them


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    with pytest.raises(StartError, match="k_proj 3 cannot be divided among 2 ranks"):
        Linear(8, {"q_proj": 4, "k_proj": 3}, options(RANKS[0]), split="column")
    with pytest.raises(StartError, match="kv heads 3 cannot be divided among 2 ranks"):
        Attention(HIDDEN, AttentionSpec(6, 3, DIM, 1.0, ROPE), options(RANKS[0]))
    for total, size in ((4, 3), (2, 3), (1, 2)):
        assert Group(0, size).rows(total).length > 0
        with pytest.raises(StartError, match=f"{total} rows are too few for {size} ranks"):
            Group(size - 1, size).rows(total)
    layer = Linear(8, {"o_proj": 4}, options(RANKS[1]), split="row")
    with pytest.raises(ValueError, match=r"expected a tensor of shape \[4, 8\], found \[4, 4\]"):
        layer.load("o_proj", torch.zeros(4, 4))
