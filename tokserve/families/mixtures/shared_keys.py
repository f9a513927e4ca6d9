"""Attention to the keys and values of an earlier layer, as the last layers of Gemma 4's small models have it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.layers.attention import Attention, AttentionSpec
from tokserve.layers.batch import ForwardBatch, LogitsRows
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter
from tokserve.protocol.kv_spec import KVSpec, dtype_name


@dataclass(frozen=True, slots=True)
class SharedKeysSpec(AttentionSpec):
    """Queries alone; the keys and values of layer `number` are those of layer `source`."""

    number: int = 0
    source: int = 0

    def layer(self, hidden: int, options: LayerOptions) -> SharedKeysAttention:
        """The layer without weights."""
        return SharedKeysAttention(hidden, self, options)


class SharedKeysAttention(Attention):
    """Attention that projects queries, and keeps nothing in the cache."""

    def __init__(self, hidden: int, spec: SharedKeysSpec, options: LayerOptions) -> None:
        super().__init__(hidden, spec, options)
        self.number, self.source, self.k_norm = spec.number, spec.source, None
        name = spec.qkv_names[0]
        self.qkv = Linear(hidden, {name: spec.heads * spec.dim}, options, bias=spec.qkv_bias, split="column")

    def parameters(self) -> dict[str, Parameter]:
        """The parameters of the projections and of the norm of queries."""
        parameters = super().parameters()
        return {name: one for name, one in parameters.items() if not name.startswith(f"{self.norm_names[1]}.")}

    def kv_spec(self) -> KVSpec:
        """No heads: nothing is kept."""
        return KVSpec(0, self.dim, dtype_name(self.dtype), self.window)

    def probe(self) -> None:  # type: ignore[override]
        """Return None: it attends as the layer whose keys it shares."""

    def __call__(
        self, x: Tensor, batch: ForwardBatch, layer: int, table: Tensor, logits_rows: LogitsRows | None = None
    ) -> Tensor:  # [T, hidden] -> same, or [n, hidden] of the n tokens of `logits_rows`
        if layer != self.number:
            raise StartError("option pipeline_parallel_size: layers that share keys cannot be divided among stages")
        keys, values = batch.kv[self.source]
        if keys.dtype != self.dtype:
            raise StartError("option kv_cache_dtype: layers that share keys and values cannot have a float8 cache")
        projected = self.qkv(x, adapters=batch.adapters)
        self.divide(projected, keys, batch)
        q = projected.view(-1, self.dim)
        q = q if self.q_norm is None else self.q_norm(q)
        q = q.view(x.shape[0], self.heads, self.dim)
        q, _ = ops.rope(q, q.new_empty(x.shape[0], 0, self.dim), table, batch.positions, self.interleaved)
        rows: LogitsRows | ForwardBatch = batch
        if logits_rows is not None:
            q, rows = q.index_select(0, logits_rows.tokens), logits_rows
        mixed = self.mix(q, keys, values, batch, rows)
        return self.out(mixed.view(q.shape[0], self.heads * self.dim), adapters=rows.adapters)
