"""The C++ implementations of attention and of the stores into its cache, which is never float8.

Pages of 16, 32, ... tokens hold keys and values in the layout of csrc/pages.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import attention


@attention.norm_rope_store.implement("cpp", device="cpu")
def norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    interleaved: bool = False,
    norm_last: bool = False,
    gated: bool = False,
) -> Tensor:
    """A cache is never float8, so the scales are 1."""
    _, kv_heads, _, dim = k_cache.shape
    q = qkv.new_empty(qkv.shape[0], (qkv.shape[1] // dim - 2 * kv_heads) // (2 if gated else 1), dim)
    _C.norm_rope_store(
        qkv, q_weight, k_weight, eps, table, positions, k_cache, v_cache, slot_mapping, interleaved, norm_last, gated, q
    )
    return q


@attention.store_kv.implement("cpp", device="cpu")
def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *scales: float) -> None:
    """k and v may be slices of one tensor [T, ...].  A cache is never float8, so the scales are 1."""
    _C.store_kv(k, v, k_cache, v_cache, slot_mapping)


@attention.store_rows.implement("cpp", device="cpu")
def store_rows(rows: Tensor, pages: Tensor, slot_mapping: Tensor) -> None:
    _C.store_rows(rows, pages, slot_mapping)


@attention.paged_attention.implement("cpp", device="cpu")
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    v_scale: float = 1.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bidirectional: Tensor | None = None,
    work: Tensor | None = None,
) -> Tensor:
    """q may be a slice of a tensor [T, ...].  A cache is never float8, so v_scale is 1."""
    out = torch.empty_like(q)
    _C.paged_attention(
        q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window, softcap, sinks, out, bidirectional
    )
    return out
