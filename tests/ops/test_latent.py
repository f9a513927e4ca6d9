"""The ops of latent attention: what they compute, by another formula in float64, and with == that a token's bits do not
depend on the batch, on chunks or on threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.packing import pack_arguments
from tests.ops.samples import samples
from tests.ops.test_exact import DTYPES, MOST, Outputs, cuts, every, named, packing, randn, rows_are_batch_invariant
from tokserve import ops
from tokserve.ops import registry
from tokserve.ops.registry import OPS

registry.load_extension("cpu")


class PagedRows:
    """Sequences of random queries and cached rows in scattered pages; what is in no sequence is NaN."""

    def __init__(
        self, lengths: list[int], heads: int, latent: int, rotated: int, *, page: int, dtype: torch.dtype
    ) -> None:
        blocks = -(-max(lengths) // page)
        order = torch.randperm(len(lengths) * blocks, generator=torch.Generator().manual_seed(page))
        self.tables, self.page, self.latent = order.view(len(lengths), blocks).int(), page, latent
        self.q = [randn(dtype, row, length, heads, latent + rotated) for row, length in enumerate(lengths)]
        self.rows = [randn(dtype, 90 + row, length, latent + rotated) for row, length in enumerate(lengths)]
        self.cache = torch.full((len(order), page, latent + rotated), float("nan"), dtype=dtype)

    def attend(self, call: Any, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Store and attend positions start..end-1 of row, for each (row, start, end), in one call."""
        for row, start, end in parts:
            positions = torch.arange(start, end)
            blocks = self.tables[row].long()[positions // self.page]
            self.cache[blocks, positions % self.page] = self.rows[row][start:end]
        sizes = [end - start for _, start, end in parts]
        q = torch.cat([self.q[row][start:end] for row, start, end in parts])
        result = call(
            q[..., : self.latent].contiguous(),
            q[..., self.latent :].contiguous(),
            self.cache,
            self.tables[[row for row, _, _ in parts]],
            torch.tensor([0, *sizes]).cumsum(0).int(),
            torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            0.1,
        )
        return list(result.split(sizes))


@pytest.mark.parametrize("dtype", [torch.float32])
def test_attention_over_rows_is_that_over_the_keys_and_values_that_heads_make_of_them(dtype: torch.dtype) -> None:
    """Absorbed, as it is computed, and expanded, as the model is defined."""
    heads, plain, rotated, latent, value_dim, length = 3, 10, 6, 24, 14, 40
    paged = PagedRows([length], heads, latent, rotated, page=16, dtype=dtype)
    q, rows = randn(dtype, 1, length, heads, plain + rotated), paged.rows[0].double()
    up = randn(dtype, 2, heads, plain + value_dim, latent)
    keys, values = up.split([plain, value_dim], 1)
    *_, key_weights = pack_arguments("linear_heads", "torch", (q, list(keys.transpose(1, 2).contiguous())))
    *_, value_weights = pack_arguments("linear_heads", "torch", (q, list(values)))
    absorbed = OPS["linear_heads"].reference(q, key_weights)
    paged.q[0] = torch.cat((absorbed, q[..., plain:]), -1)
    mixed = paged.attend(OPS["latent_attention"].reference, [(0, 0, length)])[0]
    result = OPS["linear_heads"].reference(mixed, value_weights)
    expanded = torch.einsum("tl,hnl->thn", rows[:, :latent], up.double())  # [T, heads, plain + value_dim]
    whole_keys = torch.cat((expanded[..., :plain], rows[:, None, latent:].expand(-1, heads, -1)), -1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), whole_keys) * 0.1
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    expected = torch.einsum("hqk,khv->qhv", scores.softmax(-1), expanded[..., plain:])
    torch.testing.assert_close(result.double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_stored_row_is_a_normed_latent_and_a_rotated_key(interleaved: bool) -> None:
    q, kv, weight = randn(torch.float32, 1, 5, 2, 14), randn(torch.float32, 2, 5, 26), randn(torch.float32, 3, 20)
    angles = randn(torch.float64, 4, 9, 3)
    table, cache = torch.cat((angles.cos(), angles.sin()), -1).float(), torch.zeros(2, 4, 26)
    positions, slots = torch.tensor([8, 0, 3, 4, 4]), torch.tensor([7, 0, 2, 3, 5])
    q_rope = ops.latent_rope_store(q, kv, weight, 1e-6, table, positions, cache, slots, interleaved)
    turned = torch.polar(torch.ones(5, 3).double(), angles[positions])

    def rotated(x: Tensor) -> Tensor:  # [5, ..., 6] as complex numbers
        pairs = x.double().unflatten(-1, (3, 2) if interleaved else (2, 3))
        parts = pairs.unbind(-1 if interleaved else -2)
        product = torch.complex(*parts) * turned.view(5, *(1,) * (x.dim() - 2), 3)
        return torch.stack((product.real, product.imag), -1 if interleaved else -2).flatten(-2)

    normed = kv[:, :20].double() / (kv[:, :20].double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(q_rope.double(), rotated(q[..., 8:]), atol=1e-5, rtol=1e-5)
    stored = cache.view(8, 26)[slots].double()
    torch.testing.assert_close(stored, torch.cat((normed, rotated(kv[:, 20:])), -1), atol=1e-5, rtol=1e-5)
    assert not cache.view(8, 26)[[1, 4, 6]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_is_the_linear_product_of_its_part(dtype: torch.dtype) -> None:
    for x, weights in samples("linear_heads", dtype):
        for name in OPS["linear_heads"].available("cpu"):
            heads, linear, pack = (
                OPS[op].implementations[name].call for op in ("linear_heads", "linear", "pack_linear")
            )
            packed = [pack(weight) for weight in weights]
            result = heads(x, packed)
            for head, weight in enumerate(packed):
                part = x[:, head, : weight.columns].contiguous()
                assert torch.equal(result[:, head], linear(part, weight, None))


@pytest.mark.parametrize("dtype", DTYPES)
@every("linear_heads")
def test_heads_rows_are_batch_invariant(name: str, call: Any, dtype: torch.dtype) -> None:
    pack = packing("pack_linear", name, call)
    x, packed = randn(dtype, 1, MOST, 3, 40), [pack(weight) for weight in randn(dtype, 2, 3, 70, 33)]
    rows_are_batch_invariant(lambda rows: call(x[rows], packed), trials=6)


@pytest.mark.parametrize("dtype", DTYPES)
@every("latent_rope_store")
def test_stored_rows_are_batch_invariant(name: str, call: Any, dtype: torch.dtype) -> None:
    q, kv, weight = randn(dtype, 1, MOST, 3, 30), randn(dtype, 2, MOST, 66 + 8), randn(dtype, 3, 66)
    table, positions = randn(torch.float32, 4, 99, 8), torch.arange(MOST) * 7 % 99

    def stored(rows: Tensor) -> Outputs:
        cache, slots = torch.zeros(6, 16, 74, dtype=dtype), torch.arange(len(rows)) + 9
        q_rope = call(q[rows], kv[rows], weight, 1e-6, table, positions[rows], cache, slots, True)
        return q_rope, cache.view(96, 74)[slots]

    rows_are_batch_invariant(stored, trials=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "latent", "rotated", "page"), [(1, 32, 8, 16), (5, 66, 6, 7), (70, 48, 16, 32)])
@every("latent_attention")
def test_chunks_and_the_batch_change_no_bit(
    name: str, call: Any, heads: int, latent: int, rotated: int, page: int, dtype: torch.dtype
) -> None:
    lengths = [600, 75, 1] if named(name, call) == "cpp" else [150, 20, 1]
    paged = PagedRows(lengths, heads, latent, rotated, page=page, dtype=dtype)
    all_rows = [paged.attend(call, [(row, 0, length)])[0] for row, length in enumerate(lengths)]
    assert all(part.isfinite().all() for part in all_rows)
    rng = random.Random(heads)
    paged.cache.fill_(float("nan"))
    other = cuts(rng, lengths[1], 30)
    for start, end in cuts(rng, lengths[0], 130):
        other_rows = [(1, *other.pop(0))] if other else [(2, 0, 1)]
        parts = paged.attend(call, [*other_rows, (0, start, end)])
        row, first, last = other_rows[0]
        assert torch.equal(parts[0], all_rows[row][first:last])
        assert torch.equal(parts[1], all_rows[0][start:end])
