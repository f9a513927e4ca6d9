"""Self-attention over the paged cache: project, rotate, store keys and values, attend, project back.

The batch, the layer's place in the cache and the rope table come as arguments; the layer keeps only
weights and sizes.  It must not know how pages are allocated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve import ops
from tokserve.kv_spec import KVSpec
from tokserve.layers.batch import ForwardBatch, LogitsRows
from tokserve.layers.linear import Linear
from tokserve.layers.norm import RMSNorm
from tokserve.layers.parameter import Parameter, under
from tokserve.layers.quant import UNQUANTIZED, QuantMethod


class Attention:
    """`heads` query heads share `kv_heads` key and value heads of `dim`.

    `window` > 0: a query sees that many keys at most, itself included.  `norm_eps`: not None puts an RMS
    norm over each query and key head before the rotation.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        *,
        window: int,
        norm_eps: float | None,
        qkv_bias: bool,
        out_bias: bool,
        quant: QuantMethod = UNQUANTIZED,
    ) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.window = window
        self.scale = dim**-0.5
        self.k_scale = self.v_scale = 1.0  # what a float8 cache's keys and values are multiplied by
        self.cache_scales: Tensor | None = None  # the same [2], for readers of a layer's tensors; None: both are 1
        self.dtype = dtype
        sizes = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv = Linear(hidden, sizes, dtype, bias=qkv_bias, quant=quant)
        self.out = Linear(heads * dim, {"o_proj": hidden}, dtype, bias=out_bias, quant=quant)
        self.norm_eps = norm_eps or 0.0
        self.q_norm = None if norm_eps is None else RMSNorm(dim, norm_eps, dtype)
        self.k_norm = None if norm_eps is None else RMSNorm(dim, norm_eps, dtype)

    def parameters(self) -> dict[str, Parameter]:
        """Of the projections and, if there are any, `q_norm` and `k_norm`."""
        found = self.qkv.parameters() | self.out.parameters()
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                found |= under(name, norm.parameters())
        return found

    def kv_spec(self) -> KVSpec:
        """What the cache keeps for this layer."""
        return KVSpec(self.kv_heads, self.dim, str(self.dtype).removeprefix("torch."), self.window)

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """Have a float8 cache keep keys and values divided by these; others have no scales."""
        self.k_scale, self.v_scale = k_scale, v_scale
        self.cache_scales = None if k_scale == v_scale == 1.0 else torch.tensor([k_scale, v_scale], device="cpu")

    def __call__(
        self, x: Tensor, batch: ForwardBatch, layer: int, table: Tensor, logits_rows: LogitsRows | None = None
    ) -> Tensor:  # [T, hidden] -> same, or [n, hidden] of the n tokens of `logits_rows`
        keys, values = batch.kv[layer]
        q = ops.norm_rope_store(
            self.qkv(x, adapters=batch.adapters), self._weight(self.q_norm), self._weight(self.k_norm), self.norm_eps,
            table, batch.positions, keys, values, batch.slot_mapping, self.k_scale, self.v_scale,
        )  # [T, heads, dim]  # fmt: skip
        rows: LogitsRows | ForwardBatch = batch
        if logits_rows is not None:
            q, rows = q.index_select(0, logits_rows.tokens), logits_rows
        mixed = ops.paged_attention(
            q, keys, values, rows.block_tables, rows.query_start, rows.seq_lens, self.scale * self.k_scale,
            self.window, self.v_scale,
        )  # [T or n, heads, dim]  # fmt: skip
        return self.out(mixed.view(q.shape[0], self.heads * self.dim), adapters=rows.adapters)

    @staticmethod
    def _weight(norm: RMSNorm | None) -> Tensor | None:
        return None if norm is None else norm.weight
