"""The generic decoder: embedding, a stack of attention and feed-forward blocks, norm, head.

Built from a `DecoderSpec` alone; which family it is, it must not know.  The residual stream is in the
model's dtype; weights come in through `parameters_by_name`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.kv_spec import KVSpec
from tokserve.layers.attention import Attention
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.embedding import Embedding, Head
from tokserve.layers.linear import Linear
from tokserve.layers.mlp import GatedMLP
from tokserve.layers.norm import RMSNorm
from tokserve.layers.parameter import Parameter, under
from tokserve.layers.quant import UNQUANTIZED, QuantMethod
from tokserve.models.provenance import Provenance
from tokserve.models.spec import DecoderSpec


class Block:
    """One layer: norm, attention, norm, feed-forward."""

    def __init__(self, spec: DecoderSpec, window: int, dtype: torch.dtype, quant: QuantMethod) -> None:
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.attention = Attention(
            spec.hidden,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            dtype,
            window=window,
            norm_eps=spec.norm_eps if spec.qk_norm else None,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            quant=quant,
        )
        self.mlp_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.mlp = GatedMLP(spec.hidden, spec.inner, dtype, activation=spec.activation, bias=spec.mlp_bias, quant=quant)

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of Hugging Face checkpoints."""
        return (
            under("input_layernorm", self.attention_norm.parameters())
            | under("self_attn", self.attention.parameters())
            | under("post_attention_layernorm", self.mlp_norm.parameters())
            | under("mlp", self.mlp.parameters())
        )


class Decoder:
    """A dense decoder that serves as many positions as the rope `table` has rows [positions, rope.dim].

    `head_dtype`: type of the head's operands.  `quant`, `head_quant`: what the blocks' projections and the head do with
    their weights.  `float8_cache`: keys and values will be kept as float8, so scales of such a cache are of use.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        head_dtype: torch.dtype,
        table: Tensor,
        *,
        quant: QuantMethod = UNQUANTIZED,
        head_quant: QuantMethod = UNQUANTIZED,
        float8_cache: bool = False,
    ) -> None:
        self.spec = spec
        self.float8_cache = float8_cache
        self.dtype = dtype
        self.head = Head(spec.vocab, spec.hidden, head_dtype, quant=head_quant)
        self.embedding = Embedding(spec.vocab, spec.hidden, dtype, head=self.head if spec.tied else None)
        self.blocks = [Block(spec, window, dtype, quant) for window in spec.windows]
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.rope_table = table  # [positions, rope.dim] float32
        self.provenance = Provenance()

    def blank(self) -> Decoder:
        """Another of this kind, without weights; the cache's scales are this one's until others come."""
        head, quant = self.head, self.blocks[0].attention.qkv.quant
        blank = Decoder(
            self.spec, self.dtype, head.dtype, self.rope_table, quant=quant, head_quant=head.linear.quant,
            float8_cache=self.float8_cache,
        )  # fmt: skip
        for block, scales in zip(blank.blocks, self.kv_scales(), strict=True):
            block.attention.scale_cache(*scales)
        return blank

    @property
    def quantization(self) -> str | None:
        """What the blocks' projections are kept as, as the option names it; None: as the model's dtype."""
        return self.blocks[0].attention.qkv.quant.name

    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What each layer keeps in the cache."""
        return tuple(block.attention.kv_spec() for block in self.blocks)

    def kv_scales(self) -> list[tuple[float, float]]:
        """By layer, what a float8 cache's keys and values are to be multiplied by."""
        return [(block.attention.k_scale, block.attention.v_scale) for block in self.blocks]

    def parameters_by_name(self) -> dict[str, Parameter]:
        """Every tensor a checkpoint must have, under its Hugging Face name."""
        found = under("model.embed_tokens", self.embedding.parameters())
        for number, block in enumerate(self.blocks):
            found |= under(f"model.layers.{number}", block.parameters())
        found |= under("model.norm", self.norm.parameters())
        return found if self.spec.tied else found | self.head.parameters()

    def row_bytes(self) -> int:
        """What a row takes, from its token to its logits, at most."""
        spec = self.spec
        return 4 * (spec.vocab + 8 * (spec.hidden + (spec.heads + 2 * spec.kv_heads) * spec.head_dim + 2 * spec.inner))

    def projections(self) -> dict[str, tuple[Linear, str]]:
        """The linear layers of the blocks, each with the shard it is: what an adapter can add to, by its name in
        Hugging Face models."""
        found: dict[str, tuple[Linear, str]] = {}
        for number, block in enumerate(self.blocks):
            for prefix, linears in (
                ("self_attn", (block.attention.qkv, block.attention.out)),
                ("mlp", (block.mlp.gate_up, block.mlp.down)),
            ):
                for linear in linears:
                    found |= {f"model.layers.{number}.{prefix}.{shard}": (linear, shard) for shard in linear.shards}
        return found

    def forward(self, batch: ForwardBatch) -> Tensor:  # [T, hidden], or [n, hidden] of `batch.logits_rows`
        """Compute the batch's tokens, up to the final norm, and store their keys and values."""
        residual = self.embedding(batch.input_ids)
        x = self.blocks[0].attention_norm(residual)
        for layer, block in enumerate(self.blocks):
            logits_rows = batch.logits_rows if block is self.blocks[-1] else None
            x = block.attention(x, batch, layer, self.rope_table, logits_rows)
            if logits_rows is not None:
                residual = residual.index_select(0, logits_rows.tokens)
            x, residual = block.mlp_norm.add(x, residual)
            x = block.mlp(x, batch.adapters if logits_rows is None else logits_rows.adapters)
            following = self.blocks[layer + 1].attention_norm if layer + 1 < len(self.blocks) else self.norm
            x, residual = following.add(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab] float32
        """Logits of some of the rows that `forward` returned."""
        return self.head(hidden)
