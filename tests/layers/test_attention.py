"""The attention block against its formula, written out per query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.attention import Attention, AttentionSpec
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.norm import NormSpec
from tokserve.layers.options import LayerOptions
from tokserve.layers.rope import RopeSpec, rope_table
from tokserve.protocol.kv_spec import KVSpec

HIDDEN, HEADS, KV_HEADS, DIM, TOKENS, PAGE = 12, 4, 2, 6, 21, 4
ROPE = RopeSpec(DIM, 50.0)
TABLE = rope_table(ROPE, TOKENS)


def rotated(x: Tensor) -> Tensor:  # [T, H, D]
    cos, sin = TABLE[:, None, : DIM // 2], TABLE[:, None, DIM // 2 :]
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def expected(x: Tensor, w: dict[str, Tensor], window: int) -> Tensor:
    zero = torch.zeros(1)

    def project(name: str, heads: int) -> Tensor:
        return (x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", zero)).view(TOKENS, heads, DIM)

    q = rotated(normed(project("q_proj", HEADS), w.get("q_norm.weight"), 0.1))
    k = rotated(normed(project("k_proj", KV_HEADS), w.get("k_norm.weight"), 0.1))
    v = project("v_proj", KV_HEADS)
    out = torch.zeros(TOKENS, HEADS, DIM)
    for t in range(TOKENS):
        first = max(0, t + 1 - window) if window else 0
        for h in range(HEADS):
            scores = k[first : t + 1, h // 2] @ q[t, h] / DIM**0.5
            out[t, h] = scores.softmax(0) @ v[first : t + 1, h // 2]
    return out.reshape(TOKENS, -1) @ w["o_proj.weight"].T + w.get("o_proj.bias", zero)


def one_row(spec: KVSpec, layer: int = 0) -> ForwardBatch:
    """A batch of one row of all tokens, with pages for one layer."""
    pages = -(-TOKENS // PAGE)
    unused = (torch.empty(0), torch.empty(0))
    cache = tuple(torch.full((pages, *shape), torch.nan) for shape in spec.shapes(PAGE))
    positions = torch.arange(TOKENS)
    return ForwardBatch(
        input_ids=positions,
        positions=positions,
        query_start=torch.tensor([0, TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
        block_tables=torch.arange(pages, dtype=torch.int32)[None],
        slot_mapping=positions,
        kv=[unused] * layer + [cache],
    )


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("qkv_bias", "out_bias"), [(False, False), (True, False), (True, True)])
def test_block_equals_its_formula(window: int, qk_norm: bool, qkv_bias: bool, out_bias: bool) -> None:
    spec = AttentionSpec(
        HEADS,
        KV_HEADS,
        DIM,
        DIM**-0.5,
        ROPE,
        window,
        qk_norm=NormSpec(0.1) if qk_norm else None,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )
    block = Attention(HIDDEN, spec, LayerOptions(torch.float32))
    assert block.kv_spec() == KVSpec(KV_HEADS, DIM, "float32", window)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in block.parameters().items():
        weights[name] = torch.randn(parameter.shape, generator=generator)
        parameter.load(weights[name])
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    batch = one_row(block.kv_spec(), layer=1)
    torch.testing.assert_close(block(x, batch, 1, TABLE), expected(x, weights, window), atol=2e-5, rtol=1e-5)


def test_layers_that_divide_their_work_differently_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a GPU follow from the heads' size, too."""
    dims: list[int] = []
    monkeypatch.setattr(ops, "attention_work", lambda q, *rest: dims.append(q.shape[-1]))
    batch = one_row(KVSpec(KV_HEADS, DIM, "float32"))
    for dim in (DIM, DIM, 8):
        layer = Attention(
            HIDDEN, AttentionSpec(HEADS, KV_HEADS, dim, 1.0, RopeSpec(dim, 50.0)), LayerOptions(torch.float32)
        )
        keys = torch.zeros(batch.block_tables.shape[1], *KVSpec(KV_HEADS, dim, "float32").shapes(PAGE)[0])
        layer.divide(torch.zeros(TOKENS, (HEADS + 2 * KV_HEADS) * dim), keys, batch)
    assert dims == [DIM, 8]
