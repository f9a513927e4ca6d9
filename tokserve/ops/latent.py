"""References of latent attention: heads share a row per token, from which each has keys and values by its own weights.

DeepSeek-V2, arXiv 2405.04434, section 2.1.  A cached row is [latent, rotated key].  A head's key is its weight times
the latent, and the rotated key; its value is another weight times the latent.  Neither is ever computed: the first
weight is applied to the query, the second to the weighted sum of latents ("absorbed"), for any number of tokens, so
that a token's arithmetic is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokserve.ops import attention, dense, elementwise
from tokserve.ops.dense import PackedWeight
from tokserve.ops.registry import op


@op(tolerance=dense.TOLERANCE, follows="linear")
def linear_heads(x: Tensor, packed: Sequence[PackedWeight]) -> Tensor:
    """The first K elements of each head of x [T,H,K or more] times that head's packed weight [N,K]: [T,H,N].

    Each head is `linear` of its elements.
    """
    columns = packed[0].columns
    heads = [dense.linear.reference(x[:, head, :columns], weight, None) for head, weight in enumerate(packed)]
    return torch.stack(heads, 1)


@op(tolerance=elementwise.TOLERANCE, follows="paged_attention")
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
    """The last R elements of each head of q [T,H,N+R], rotated: [T,H,R]; and kv [T,L+R] written into cache [B,P,L+R].

    The row at slot block * P + offset [T] int64 is `rms_norm` of kv's first L elements, and kv's others rotated, by
    `rope` with a table of width R; both are rounded.
    """
    latent, rotated = len(weight), table.shape[1]
    normed = elementwise.rms_norm.reference(kv[:, :latent].contiguous(), weight, eps)
    q_rope, k_rope = elementwise.rope.reference(
        q[..., q.shape[-1] - rotated :].contiguous(), kv[:, None, latent:].contiguous(), table, positions, interleaved
    )
    page = cache.shape[1]
    cache[slot_mapping // page, slot_mapping % page] = torch.cat((normed, k_rope[:, 0]), -1)
    return q_rope


@op(tolerance=attention.TOLERANCE, follows="paged_attention")
def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """`paged_attention` of queries [q, q_rope] ([T,H,L] and [T,H,R]) over the rows of cache [B,P,L+R]: [T,H,L].

    A row is the key of all heads, and its first L elements are their value.
    """
    rows = cache[:, None]  # [B,1,P,L+R]
    mixed = attention.paged_attention.reference(
        torch.cat((q, q_rope), -1), rows, rows, block_tables, query_start, seq_lens, scale, 0
    )
    return mixed[..., : q.shape[-1]].contiguous()
