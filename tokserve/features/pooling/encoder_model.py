"""Models that read a prompt both ways: a decoder's blocks, with attention to all tokens of the prompt.

What a layer keeps of a prompt is of no use after it, so all layers share the pages of one, and a prompt is computed
whole in one step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.layers.attention import AttentionSpec
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.embedding import Table
from tokserve.layers.norm import NoNorm, NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import WHOLE, Stage
from tokserve.layers.parameter import Parameter, under
from tokserve.models.decoder import Decoder, DecoderSpec
from tokserve.protocol.kv_spec import KVSpec, LayerSpec, dtype_name


@dataclass(frozen=True, slots=True)
class EncoderSpec(DecoderSpec):
    """`post_norm`: a block's norms are those after attention and after the feed-forward, each of the sum with what goes
    around it, and there is no final norm.

    `embedding_norm`: of the embeddings, `embedding_norm_name`.  `positions`: rows of the table of learned positions,
    of which a prompt's first token has row `first_position`; 0: there is none.  `types`: rows of the table of token
    types, 0 for none.
    """

    post_norm: bool = False
    embedding_norm: NormSpec | None = None
    embedding_norm_name: str = "norm"
    positions: int = 0
    first_position: int = 0
    types: int = 0

    def build(
        self,
        options: LayerOptions,
        head: LayerOptions,
        tables: list[Tensor],
        *,
        float8_cache: bool = False,
        stage: Stage = WHOLE,
    ) -> Encoder:
        """The model without weights; arguments as `Decoder` takes them.  Raises StartError."""
        if options.group.size > 1 or stage.count > 1:
            raise StartError(
                "option tensor_parallel_size or pipeline_parallel_size: a bidirectional encoder runs in one process"
            )
        return Encoder(self, options, head, tables, float8_cache=float8_cache)


class Encoder(Decoder):
    """A `Decoder` whose head for tokens is never used and takes no memory."""

    reads_both_ways = True
    spec: EncoderSpec

    def __init__(
        self,
        spec: EncoderSpec,
        options: LayerOptions,
        head: LayerOptions,
        tables: list[Tensor],
        *,
        float8_cache: bool = False,
    ) -> None:
        if float8_cache:
            raise StartError("option kv_cache_dtype: a bidirectional encoder has no KV cache")
        super().__init__(spec, options, head, tables, has_tower=False)
        if spec.post_norm:
            self.norm = NoNorm()
            self._layers = self._chain()
        norm = spec.embedding_norm
        self.embedding_norm = NoNorm() if norm is None else make_norm(spec.hidden, norm, self.dtype)
        self.positions = Table(spec.positions, spec.hidden, self.dtype) if spec.positions else None
        self.types = Table(spec.types, spec.hidden, self.dtype) if spec.types else None

    def blank(self) -> Encoder:
        return Encoder(self.spec, self.options, self.head.options, self.rope_tables)

    def kv_specs(self) -> tuple[LayerSpec, ...]:
        """The pages of one layer, which all use one after the other."""
        attention = self.spec.blocks[0].attention
        assert isinstance(attention, AttentionSpec)
        return (KVSpec(attention.heads, attention.dim, dtype_name(self.dtype)),)

    def kv_scales(self) -> list[tuple[float, float]]:
        """The multipliers of the layer with pages, which has none."""
        return [(1.0, 1.0)]

    def parameters_by_name(self) -> dict[str, Parameter]:
        parameters = super().parameters_by_name()
        parameters |= under(f"model.embeddings.{self.spec.embedding_norm_name}", self.embedding_norm.parameters())
        if self.positions is not None:
            parameters |= under("model.embeddings.position_embeddings", self.positions.parameters())
        if self.types is not None:
            parameters |= under("model.embeddings.token_type_embeddings", self.types.parameters())
        return parameters

    def embed(self, batch: ForwardBatch) -> Tensor:  # [T, hidden]
        """Tokens, their types and their positions, added and normed."""
        x = self.embedding(batch.input_ids)
        if self.types is not None:
            kinds = batch.token_types
            x = x + (self.types.weight[0] if kinds is None else self.types(kinds.clamp(max=self.spec.types - 1)))
        if self.positions is not None:
            x = x + self.positions(batch.positions + self.spec.first_position)
        return self.embedding_norm(x)

    def forward(self, batch: ForwardBatch) -> Tensor:  # [T, hidden], or [n, hidden] of `batch.logits_rows`
        """Compute the batch's prompts, each of which is whole."""
        batch = replace(batch, kv=batch.kv * len(self.blocks), bidirectional=_all(batch.seq_lens))
        rows = batch.logits_rows
        if rows is not None:
            batch.logits_rows = rows = replace(rows, bidirectional=_all(rows.seq_lens))
        if not self.spec.post_norm:
            return super().forward(batch)
        x, table = self.embed(batch), self.rope_table
        for layer, block in enumerate(self.blocks):
            needed = rows if layer == len(self.blocks) - 1 else None
            mixed = block.attention(x, batch, layer, table, needed)
            if needed is not None:
                x = x.index_select(0, needed.tokens)
            x, _ = block.attention_post_norm.add(mixed, x)
            x, _ = block.mlp_post_norm.add(block.mlp(x), x)
        return x


def _all(seq_lens: Tensor) -> Tensor:  # [R] bool
    return torch.ones(len(seq_lens), dtype=torch.bool, device=ops.torch_device)
