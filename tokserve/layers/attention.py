"""Self-attention over the paged cache: project, rotate, store keys and values, attend, project back.

The batch, the layer's index in the cache and the rope table come as arguments; the layer keeps only weights and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.layers.batch import ForwardBatch, LogitsRows
from tokserve.layers.linear import Linear
from tokserve.layers.norm import NormSpec, RMSNorm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import OPTION, Group, Span
from tokserve.layers.parameter import Parameter, owned_copy, under
from tokserve.layers.protocols import Attend, AttentionProbe, random_rows
from tokserve.layers.rope import RopeSpec
from tokserve.protocol.kv_spec import KVSpec, dtype_name


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by 1 + growth * log(1 + n), where n is the whole part of (position + first) / period."""

    growth: float
    period: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """`heads` query heads share `kv_heads` key and value heads of `dim`; scores are multiplied by `scale`.

    `window` > 0: a query sees the last `window` keys, itself included; 0: it sees all.
    `softcap` > 0: a score s becomes softcap * tanh(s / softcap).  `qk_norm`: of each query and key head, or with
    `norm_scope` "all" of all heads of a token together, before the rotation, or with `norm_last` after it.
    `qkv_names`: the checkpoint's names of the tensors that form the first projection, one or three, or two where values
    are keys before their norm; the others are names, too.
    `by_head`: one tensor forms it, with the queries that share a key head, that key head and its value head together.
    `ahead`: in a model that reads both ways, how many keys after itself a query of window attention sees.
    `gated`: the tensor of queries has a gate behind each head, whose sigmoid multiplies what the head brings.
    `sinks`: each head has a score beside those of its keys, whose value is zero.
    `query_growth`: the multiplier of queries by position, after norms and rotation.  `value_eps` > 0: of an RMS norm
    without a weight of each value head.
    """

    heads: int
    kv_heads: int
    dim: int
    scale: float
    rope: RopeSpec
    window: int = 0
    qk_norm: NormSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    softcap: float = 0.0
    norm_scope: Literal["head", "all"] = "head"
    norm_last: bool = False
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out_name: str = "o_proj"
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    sinks: bool = False
    gated: bool = False
    ahead: int = 0
    query_growth: QueryGrowth | None = None
    value_eps: float = 0.0
    by_head: bool = False

    def layer(self, hidden: int, options: LayerOptions) -> Attention:
        """The layer without weights."""
        return (BidirectionalWindow if self.ahead else Attention)(hidden, self, options)


class Attention:
    """`hidden` is the width of inputs and outputs.  A rank of several has its part of the heads."""

    def __init__(self, hidden: int, spec: AttentionSpec, options: LayerOptions) -> None:
        group = options.group
        self.heads, self.kv_heads = group.share(spec.heads, "heads"), group.heads(spec.kv_heads, "kv heads").length
        self.dim = spec.dim
        self.window = spec.window
        self.scale = spec.scale
        self.k_scale = self.v_scale = 1.0  # what a float8 cache's keys and values are multiplied by
        self.cache_scales: Tensor | None = None  # the same [2], for readers of a layer's tensors; None: both are 1
        self.dtype, width = options.dtype, spec.heads * spec.dim
        self.softcap, self.interleaved, self.norm_last = spec.softcap, spec.rope.interleaved, spec.norm_last
        self.value_eps, self.keys_are_values = spec.value_eps, len(spec.qkv_names) == 2
        shards, rows = _shards(spec, group)
        self.qkv = Linear(hidden, shards, options, bias=spec.qkv_bias, split="column", rows=rows)
        self.out = Linear(width, {spec.out_name: hidden}, options, bias=spec.out_bias, split="row")
        self.gated, self.query_growth = spec.gated, spec.query_growth
        self.sinks = torch.zeros(self.heads, device=ops.torch_device) if spec.sinks else None  # [heads] float32
        self._heads, self._group = spec.heads, group
        norm, self.norm_names = spec.qk_norm, spec.norm_names
        self.norm_eps = norm.eps if norm else 0.0
        widths = (spec.heads * spec.dim, spec.kv_heads * spec.dim) if spec.norm_scope == "all" else (spec.dim, spec.dim)
        if norm and spec.norm_scope == "all" and group.size > 1:
            raise StartError(f"{OPTION}: norms over all heads cannot be divided among ranks")
        self.q_norm = RMSNorm(widths[0], norm, options.dtype) if norm else None
        self.k_norm = RMSNorm(widths[1], norm, options.dtype) if norm else None

    def linears(self) -> dict[str, Linear]:
        """The projections by name."""
        return {"qkv": self.qkv, "out": self.out}

    def parameters(self) -> dict[str, Parameter]:
        """The parameters of the projections and, if there are any, of the norms of queries and keys."""
        parameters = self.qkv.parameters() | self.out.parameters()
        gain = self.dim**-0.25 if self.scale == 1.0 else 1.0  # a scale that the norms have learned
        for name, norm in zip(self.norm_names, (self.q_norm, self.k_norm), strict=True):
            if norm is not None:
                norms = norm.parameters()
                parameters |= under(name, {one: replace(norms[one], random_gain=gain) for one in norms})
        if self.sinks is not None:
            parameters["sinks"] = Parameter((self._heads,), self.load_sinks, torch.float32)
        return parameters

    def load_sinks(self, tensor: Tensor) -> None:
        """Take the heads' sinks."""
        assert self.sinks is not None
        self.sinks = owned_copy(
            tensor.narrow(0, self._group.rank * self.heads, self.heads), (self.heads,), torch.float32
        )

    def borrow(self, other: object) -> None:
        """Use another's norms, sinks and cache scales; its spec is the same."""
        assert isinstance(other, Attention)
        self.q_norm, self.k_norm, self.sinks = other.q_norm, other.k_norm, other.sinks
        self.scale_cache(other.k_scale, other.v_scale)

    def kv_spec(self) -> KVSpec:
        """What the cache keeps for this layer."""
        return KVSpec(self.kv_heads, self.dim, dtype_name(self.dtype), self.window)

    def row_elements(self) -> int:
        """Elements of a token's queries and outputs that are no linear layer's: none worth counting."""
        return 0

    def probe(self) -> AttentionProbe:
        """Attention with random queries, keys and values."""
        name = f"attention of {self.heads} heads of {self.dim}"
        name += f" over {self.window} tokens" if self.window else ""
        kind = ("attention", self.heads, self.kv_heads, self.dim, self.window, self.softcap, self.sinks is None)
        return AttentionProbe(kind, name, self._probe)

    def _probe(self, cache: Tensor, tokens: int) -> Attend:
        pages = -(-tokens // cache.shape[2])
        k, v = (
            random_rows(seed, pages, *cache.shape[1:]).to(cache.device, self.dtype).to(cache.dtype) for seed in (1, 2)
        )
        q = random_rows(3, tokens, self.heads, self.dim).to(cache.device, self.dtype)

        def attend(rows: Tensor, tables: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
            return ops.paged_attention(
                q[rows],
                k,
                v,
                tables,
                starts,
                ends,
                self.scale * self.k_scale,
                self.window,
                self.v_scale,
                self.softcap,
                self.sinks,
            )

        return attend

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """Divide the keys and values that a float8 cache keeps by these; other caches have no scales."""
        self.k_scale, self.v_scale = k_scale, v_scale
        self.cache_scales = None if k_scale == v_scale == 1.0 else torch.tensor([k_scale, v_scale], device="cpu")

    def __call__(
        self, x: Tensor, batch: ForwardBatch, layer: int, table: Tensor, logits_rows: LogitsRows | None = None
    ) -> Tensor:  # [T, hidden] -> same, or [n, hidden] of the n tokens of `logits_rows`
        keys, values = batch.kv[layer]
        projected = self.qkv(x, adapters=batch.adapters)
        self.divide(projected, keys, batch)
        projected = self.with_values(projected)
        q = self.store(projected, table, batch.positions, keys, values, batch.slot_mapping)
        rows: LogitsRows | ForwardBatch = batch
        if logits_rows is not None:
            q, rows = q.index_select(0, logits_rows.tokens), logits_rows
            projected = projected.index_select(0, logits_rows.tokens) if self.gated else projected
        mixed = self.mix(q, keys, values, batch, rows)  # [T or n, heads, dim]
        mixed = ops.gate_heads(mixed, projected) if self.gated else mixed.view(q.shape[0], self.heads * self.dim)
        return self.out(mixed, adapters=rows.adapters)

    def store(
        self, projected: Tensor, table: Tensor, positions: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> Tensor:  # [T, (heads + 2 kv_heads) dim] -> [T, heads, dim]
        """The queries of what is projected at these positions; its keys and values go into the slots of a cache."""
        q = ops.norm_rope_store(
            projected,
            self._weight(self.q_norm),
            self._weight(self.k_norm),
            self.norm_eps,
            table,
            positions,
            keys,
            values,
            slots,
            self.k_scale,
            self.v_scale,
            self.interleaved,
            self.norm_last,
            self.gated,
        )
        return self.grown(q, positions)

    def with_values(self, projected: Tensor) -> Tensor:  # [T, N] -> [T, (heads + 2 kv_heads) dim], if there is no gate
        """What is projected with the norms of its values."""
        if not self.value_eps:
            return projected
        return ops.norm_values(projected, self.kv_heads, self.dim, self.value_eps, self.keys_are_values)

    def grown(self, q: Tensor, positions: Tensor) -> Tensor:  # [T, heads, dim] -> same
        """The queries times the multipliers of their positions, or gradients of such queries likewise."""
        by = self.query_growth
        return q if by is None else ops.scale_by_position(q, positions, by.growth, by.period, by.first)

    def divide(self, projected: Tensor, keys: Tensor, batch: ForwardBatch) -> None:
        """Prepare the batch for `mix`, once for all layers of a kind.  This comes before the kernels that make queries
        of what is projected [T,...]: on a GPU, attention may read it while the kernel that precedes it still runs."""
        kind = self._kind()
        if kind not in batch.work:
            q = projected.new_empty((projected.shape[0], self.heads, self.dim))  # its shape counts
            batch.work[kind] = ops.attention_work(
                q, keys, batch.block_tables, batch.query_start, batch.seq_lens, self.window
            )

    def _kind(self) -> tuple[int, int, int, int]:
        """What the division of the work depends on, besides the batch and the cache."""
        return self.heads, self.kv_heads, self.dim, self.window

    def mix(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: LogitsRows | ForwardBatch
    ) -> Tensor:  # [n, heads, dim] -> same
        """The values that the queries of the batch, or of some of its `rows`, see, weighted."""
        work = batch.work.get(self._kind()) if rows is batch else None
        return ops.paged_attention(
            q,
            keys,
            values,
            rows.block_tables,
            rows.query_start,
            rows.seq_lens,
            self.scale * self.k_scale,
            self.window,
            self.v_scale,
            self.softcap,
            self.sinks,
            rows.bidirectional,
            work,
        )

    @staticmethod
    def _weight(norm: RMSNorm | None) -> Tensor | None:
        return None if norm is None else norm.weight


class BidirectionalWindow(Attention):
    """Attention in a model that reads both ways, to a window of as many keys before a query as after it.

    A query that is taken to be `ahead` positions later sees them in a causal window of twice the width.  Those at the
    end of a prompt, with fewer keys after them, see all that there are.
    """

    def __init__(self, hidden: int, spec: AttentionSpec, options: LayerOptions) -> None:
        super().__init__(hidden, spec, options)
        self.ahead = spec.ahead

    def divide(self, projected: Tensor, keys: Tensor, batch: ForwardBatch) -> None:
        """Do nothing: `mix` divides each row into parts, with work of their own."""

    def mix(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: LogitsRows | ForwardBatch
    ) -> Tensor:  # [n, heads, dim] -> same
        kind = ("both ways", self.ahead)
        parts = batch.work.get(kind) if rows is batch else None
        if parts is None:
            parts = window_parts(rows, self.ahead)
            if rows is batch:
                batch.work[kind] = parts
        mixed = torch.empty_like(q)
        for part in parts:
            values_seen = ops.paged_attention(
                q.index_select(0, part.queries),
                keys,
                values,
                part.block_tables,
                part.query_start,
                part.seq_lens,
                self.scale,
                part.window,
                1.0,
                self.softcap,
                None,
                part.bidirectional,
            )
            mixed.index_copy_(0, part.queries, values_seen)
        return mixed


class WindowPart(NamedTuple):
    """Queries of a batch [n] int64 for one call of attention, and what it reads of their rows."""

    queries: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    window: int
    bidirectional: Tensor | None


def window_parts(rows: LogitsRows | ForwardBatch, ahead: int) -> list[WindowPart]:
    """How `BidirectionalWindow` divides the queries of a batch; the host reads the rows' lengths for it."""
    device = rows.query_start.device
    starts, lens = rows.query_start.cpu().numpy(), rows.seq_lens.cpu().numpy()
    counts = np.diff(starts)
    at_end = np.minimum(counts, ahead)
    later = np.arange(starts[-1]) - np.repeat(starts[1:] - at_end, counts) >= 0  # [n]
    parts = []
    for is_end, sizes, window in ((False, counts - at_end, 2 * ahead + 1), (True, at_end, ahead + 1)):
        (chosen,) = np.nonzero(later == is_end)
        if not len(chosen):
            continue
        kept = np.flatnonzero(sizes)
        query_start = np.zeros(len(kept) + 1, np.int32)
        np.add.accumulate(sizes[kept], out=query_start[1:])
        parts.append(
            WindowPart(
                torch.from_numpy(chosen).to(device),
                rows.block_tables.index_select(0, torch.from_numpy(kept).to(device)),
                torch.from_numpy(query_start).to(device),
                torch.from_numpy(lens[kept]).to(device),
                window,
                torch.ones(len(kept), dtype=torch.bool, device=device) if is_end else None,
            )
        )
    return parts


def _shards(spec: AttentionSpec, group: Group) -> tuple[dict[str, int], dict[str, list[Span]]]:
    """Outputs of each tensor that forms the first projection, those of queries, keys and values, or of all; and which
    rows of it this rank has."""
    width = spec.dim * (2 if spec.gated else 1)
    queries, keys = spec.heads * width, spec.kv_heads * spec.dim
    if spec.by_head:
        (name,) = spec.qkv_names
        return {name: queries + 2 * keys}, {name: _spans_by_head(spec, group)}
    first, number = group.span(spec.heads, "heads")
    spans = [Span(first * width, number * width)]
    first, number = group.heads(spec.kv_heads, "kv heads")
    spans += [Span(first * spec.dim, number * spec.dim)] * 2
    if len(spec.qkv_names) > 1:
        names = spec.qkv_names
        rows = {name: [span] for name, span in zip(names, spans, strict=False)}
        return dict(zip(names, (queries, keys, keys), strict=False)), rows
    (name,), starts = spec.qkv_names, (0, queries, queries + keys)
    spans = [Span(start + span.start, span.length) for start, span in zip(starts, spans, strict=True)]
    return {name: queries + 2 * keys}, {name: spans}


def _spans_by_head(spec: AttentionSpec, group: Group) -> list[Span]:
    """Where this rank's queries, keys and values are, each of all its heads in order, in a tensor with the queries of a
    key head before that and its values."""
    shared, dim = spec.heads // spec.kv_heads, spec.dim
    size = (shared + 2) * dim
    first, number = group.span(spec.heads, "heads")
    queries = [Span(head // shared * size + head % shared * dim, dim) for head in range(first, first + number)]
    first, number = group.heads(spec.kv_heads, "kv heads")
    keys = [Span(head * size + shared * dim, dim) for head in range(first, first + number)]
    return [*queries, *keys, *(Span(start + dim, dim) for start, _ in keys)]
