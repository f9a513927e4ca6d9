"""A draft head: one block of a model's own kind, over the embedding of a token and the hidden state before it.

Position i of a head has the hidden state of the model at i and the embedding of the token at i + 1, and predicts the
token at i + 2 (multi-token prediction: DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokserve.features.draft_heads.joined import JoinedRows
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.linear import Linear
from tokserve.layers.norm import NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, StackedParameter, under
from tokserve.models.block import BlockSpec, DecoderBlock
from tokserve.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Modules of a head in a checkpoint: its block, the norms of its two inputs, what projects both to one, and the
    norm after the block."""

    block: str
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str


@dataclass(frozen=True, slots=True)
class DraftHeadSpec:
    """`norm`: of all the head's own norms.  `repeats_normed`: where the head is applied to its own output, this is the
    output after its last norm, else the one before."""

    names: HeadNames
    block: BlockSpec
    norm: NormSpec
    repeats_normed: bool


class DraftHead:
    """The head without weights; `hidden` is the width of the model's states."""

    def __init__(self, hidden: int, spec: DraftHeadSpec, options: LayerOptions) -> None:
        self.spec = spec
        self.block = DecoderBlock(hidden, spec.block, options)
        self.attention = self.block.attention
        norms = [make_norm(hidden, spec.norm, options.dtype) for _ in range(3)]
        self._embedding_norm, self._state_norm, self._norm = norms
        self._module, _, projection = spec.names.projection.rpartition(".")
        self._projection = Linear(2 * hidden, {projection: hidden}, options)
        self._join = JoinedRows(2)

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of checkpoints."""
        names = self.spec.names
        parameters = under(names.block, self.block.parameters())
        for name, norm in (
            (names.embedding_norm, self._embedding_norm),
            (names.state_norm, self._state_norm),
            (names.norm, self._norm),
        ):
            parameters |= under(name, norm.parameters())
        return parameters | under(self._module, self._projection.parameters())

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        """Tensors that a checkpoint may have in place of some of `parameters`."""
        prefix = f"{self.spec.names.block}.{self.spec.block.mlp_name}."
        return {
            prefix + name: StackedParameter(one.parameter, tuple(prefix + covered for covered in one.covers))
            for name, one in self.block.mlp.stacked_parameters().items()
        }

    def __call__(self, batch: ForwardBatch, model: Decoder, states: Tensor) -> tuple[Tensor, Tensor]:
        """Two outputs [T, hidden] of a batch whose ids are the tokens after its positions: what the output head reads,
        and what takes the place of `states` [T, hidden] at the next positions."""
        block, multiplier, tables = self.block, self.spec.block.residual_multiplier, model.rope_tables
        if batch.axes is not None:
            batch, tables = model.along_axes(batch, batch.axes)
        table = tables[model.spec.ropes.index(self.spec.block.attention.rope)]
        embedded = self._embedding_norm(model.embedding(batch.input_ids))
        residual = self._projection(self._join((embedded, self._state_norm(states))))
        mixed = block.attention(block.attention_norm(residual), batch, 0, table)
        x, residual = block.mlp_norm.add(block.attention_post_norm(mixed), residual, multiplier)
        x, residual = self._norm.add(block.mlp_post_norm(block.mlp(x)), residual, multiplier)
        return x, x if self.spec.repeats_normed else residual

    def logits(self, model: Decoder, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        return model.logits(hidden)

    def served_logits(self, logits: Tensor) -> Tensor:
        """The logits: the vocabulary is the model's."""
        return logits
