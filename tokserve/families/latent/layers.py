"""Latent attention (DeepSeek-V2, arXiv 2405.04434): the cache keeps one short row per token for all heads.

`kv_b_proj`, from which each head's keys and values are made of a row, is never applied to rows: its first part is
applied to queries, its second to weighted sums of rows (ops/latent.py).  So a token reads rows of `latent + rotated`
elements, whatever the number of heads, and has the same bits in a prompt and as a generated token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokserve import ops
from tokserve.layers.batch import ForwardBatch, LogitsRows
from tokserve.layers.linear import Linear
from tokserve.layers.norm import NormSpec, RMSNorm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, under
from tokserve.layers.protocols import Attend, AttentionProbe, random_rows
from tokserve.layers.rope import RopeSpec
from tokserve.protocol.kv_spec import KVSpec, dtype_name


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """`heads` whose queries and keys have `plain` elements, and `rope.dim` rotated ones; values have `value_dim`.

    A cached row has `latent` elements, normed, and the rotated key that all heads share.  `query_latent` > 0: queries
    come from so many normed elements.  `bias`: of the projections from and to the residual stream, but not of queries
    that come from it at once.  Scores are multiplied by `scale`.
    """

    heads: int
    plain: int
    value_dim: int
    latent: int
    query_latent: int
    scale: float
    rope: RopeSpec
    norm: NormSpec
    bias: bool = False

    def layer(self, hidden: int, options: LayerOptions) -> LatentAttention:
        """The layer without weights."""
        return LatentAttention(hidden, self, options)


class LatentAttention:
    """`hidden` is the width of inputs and outputs.  It has the interface of `Attention`."""

    def __init__(self, hidden: int, spec: LatentAttentionSpec, options: LayerOptions) -> None:
        self.spec, self.dtype = spec, options.dtype
        first, self.heads = options.group.span(spec.heads, "heads")  # of this rank; it keeps the whole rows
        self._mine = slice(first, first + self.heads)
        self.k_scale = self.v_scale = 1.0
        rotated, queries = spec.rope.dim, spec.heads * (spec.plain + spec.rope.dim)
        self.q_a: Linear | None = None
        if spec.query_latent:
            self.q_a = Linear(hidden, {"q_a_proj": spec.query_latent}, options, bias=spec.bias)
            self.q_norm = RMSNorm(spec.query_latent, spec.norm, options.dtype)
            self.q = Linear(spec.query_latent, {"q_b_proj": queries}, options, split="column")
        else:
            self.q = Linear(hidden, {"q_proj": queries}, options, split="column")
        self.kv_a = Linear(hidden, {"kv_a_proj_with_mqa": spec.latent + rotated}, options, bias=spec.bias)
        self.kv_norm = RMSNorm(spec.latent, spec.norm, options.dtype)
        self.out = Linear(spec.heads * spec.value_dim, {"o_proj": hidden}, options, bias=spec.bias, split="row")
        self.key_weights: list[ops.PackedWeight] = []  # by head, [latent, plain]
        self.value_weights: list[ops.PackedWeight] = []  # by head, [value_dim, latent]

    def linears(self) -> dict[str, Linear]:
        """The projections that adapters can change and that are quantized: all but `kv_b_proj`."""
        first = {} if self.q_a is None else {"q_a": self.q_a}
        return first | {"q": self.q, "kv_a": self.kv_a, "out": self.out}

    def parameters(self) -> dict[str, Parameter]:
        """The parameters of the projections and norms."""
        spec, parameters = self.spec, dict[str, Parameter]()
        for linear in self.linears().values():
            parameters |= linear.parameters()
        if self.q_a is not None:
            parameters |= under("q_a_layernorm", self.q_norm.parameters())
        parameters |= under("kv_a_layernorm", self.kv_norm.parameters())
        shape = (spec.heads * (spec.plain + spec.value_dim), spec.latent)
        share = self.heads / spec.heads
        return parameters | {"kv_b_proj.weight": Parameter(shape, self.load_kv_b, self.dtype, share=share)}

    def load_kv_b(self, tensor: Tensor) -> None:
        """Take the weight [heads * (plain + value_dim), latent] that keys and values of all heads are made with."""
        spec = self.spec
        heads = tensor.to(self.dtype).view(spec.heads, spec.plain + spec.value_dim, spec.latent)[self._mine]
        self.key_weights = [ops.pack_linear(weight[: spec.plain].t().contiguous()) for weight in heads]
        self.value_weights = [ops.pack_linear(weight[spec.plain :].contiguous()) for weight in heads]

    def borrow(self, other: object) -> None:
        """Use another's norms and `kv_b_proj`; its spec is the same."""
        assert isinstance(other, LatentAttention)
        self.kv_norm, self.key_weights, self.value_weights = other.kv_norm, other.key_weights, other.value_weights
        if self.q_a is not None:
            self.q_norm = other.q_norm

    def kv_spec(self) -> KVSpec:
        width = self.spec.latent + self.spec.rope.dim
        return KVSpec(1, width, dtype_name(self.dtype), kind="latent")

    def row_elements(self) -> int:
        """Elements of a token's queries and outputs that are no linear layer's."""
        return self.heads * (2 * self.spec.latent + self.spec.rope.dim + self.spec.value_dim)

    def probe(self) -> AttentionProbe:
        """Attention with random queries and cached rows."""
        return AttentionProbe(("latent", self.heads), f"latent attention of {self.heads} heads", self._probe)

    def _probe(self, cache: Tensor, tokens: int) -> Attend:
        latent, rotated = self.spec.latent, self.spec.rope.dim
        kept = random_rows(1, -(-tokens // cache.shape[1]), *cache.shape[1:]).to(cache.device, cache.dtype)
        q, q_rope = (
            random_rows(seed, tokens, self.heads, width).to(cache.device, self.dtype)
            for seed, width in ((2, latent), (3, rotated))
        )

        def attend(rows: Tensor, tables: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
            return ops.latent_attention(q[rows], q_rope[rows], kept, tables, starts, ends, self.spec.scale)

        return attend

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """A latent cache is never float8, so there are no scales."""

    def __call__(
        self, x: Tensor, batch: ForwardBatch, layer: int, table: Tensor, logits_rows: LogitsRows | None = None
    ) -> Tensor:  # [T, hidden] -> same, or [n, hidden] of the n tokens of `logits_rows`
        spec, (cache,) = self.spec, batch.kv[layer]
        queries = x if self.q_a is None else self.q_norm(self.q_a(x, adapters=batch.adapters))
        q = self.q(queries, adapters=batch.adapters).view(x.shape[0], self.heads, spec.plain + spec.rope.dim)
        q_rope = ops.latent_rope_store(
            q,
            self.kv_a(x, adapters=batch.adapters),
            self.kv_norm.weight,
            spec.norm.eps,
            table,
            batch.positions,
            cache,
            batch.slot_mapping,
            spec.rope.interleaved,
        )  # [T, heads, rotated]
        rows: LogitsRows | ForwardBatch = batch
        if logits_rows is not None:
            q, q_rope = q.index_select(0, logits_rows.tokens), q_rope.index_select(0, logits_rows.tokens)
            rows = logits_rows
        mixed = ops.latent_attention(
            ops.linear_heads(q, self.key_weights),
            q_rope,
            cache,
            rows.block_tables,
            rows.query_start,
            rows.seq_lens,
            spec.scale,
        )  # [T or n, heads, latent]
        values = ops.linear_heads(mixed, self.value_weights)  # [T or n, heads, value_dim]
        return self.out(values.view(q.shape[0], self.heads * spec.value_dim), adapters=rows.adapters)
