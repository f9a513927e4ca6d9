"""The C++ implementations of the ops of latent attention.  A latent cache keeps plain rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokserve import _C
from tokserve.ops import latent
from tokserve.ops.dense import PackedWeight


@latent.linear_heads.implement("cpp", device="cpu")
def linear_heads(x: Tensor, packed: Sequence[PackedWeight]) -> Tensor:
    """x may be a slice of a tensor [T, ...]."""
    out = x.new_empty(x.shape[0], x.shape[1], packed[0].rows)
    _C.linear_heads(x, [one.packed for one in packed], packed[0].columns, out)
    return out


@latent.latent_rope_store.implement("cpp", device="cpu")
def latent_rope_store(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    table: Tensor,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
) -> Tensor:
    """q and kv may be slices of tensors [T, ...]."""
    q_rope = q.new_empty(q.shape[0], q.shape[1], table.shape[1])
    _C.latent_rope_store(q, kv, weight, eps, table, positions, cache, slot_mapping, interleaved, q_rope)
    return q_rope


@latent.latent_attention.implement("cpp", device="cpu")
def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    out = q.new_empty(q.shape)
    _C.latent_attention(q, q_rope, cache, block_tables, query_start, seq_lens, scale, out)
    return out
