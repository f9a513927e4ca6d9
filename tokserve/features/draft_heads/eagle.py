"""EAGLE-3's draft head (arXiv 2503.01840): a layer of a checkpoint of its own, which reads states of three layers.

Its state of a token is a projection of the residual streams after a few layers of the model.  The layer's attention
reads the normed embedding of the next token beside the normed state, and the state is its residual stream.  Its
vocabulary may be a part of the model's: `d2t` has what to add to its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.features.draft_heads.joined import JoinedRows
from tokserve.layers.attention import Attention, AttentionSpec
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.embedding import Embedding, Head
from tokserve.layers.linear import Linear
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, under
from tokserve.layers.rope import rope_table
from tokserve.models import weights
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import Decoder, DecoderSpec
from tokserve.models.rope_config import rope
from tokserve.models.spec import attention, head_size, mlp

WHERE = "option speculative_config: the model of the method eagle3"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TO_SERVED = "d2t"  # added to ids of the head they are the model's
UNUSED = "t2d"


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """`taps`: numbers of layers after which the model's states are read.  `vocab`: of the head's own logits.
    `adds_normed`: the residual stream begins with the normed state."""

    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    taps: tuple[int, ...]
    vocab: int
    has_bias: bool
    adds_normed: bool


def eagle_spec(hf: Mapping[str, Any], served: DecoderSpec) -> EagleSpec:
    """The spec of the head whose config.json is `hf`, for a model.  Raises StartError.

    The layer's own attributes may be in `transformer_layer_config`, as the library speculators writes them.
    """
    layer = hf.get("transformer_layer_config")
    fields = ConfigReader(dict(hf) | (layer if isinstance(layer, dict) else {}))
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers", 1)
    if hidden != served.hidden:
        raise StartError(f"{WHERE} has states of {hidden} elements, and the served model's have {served.hidden}")
    if layers != 1:
        raise StartError(f"{WHERE} must have one layer, and its config.json says {layers}")
    if fields.integer("vocab_size") != served.vocab:
        raise StartError(
            f"{WHERE} is for a vocabulary of {fields.integer('vocab_size')}, and the model's has {served.vocab}"
        )
    count = len(served.blocks)
    inner = hf.get("eagle_config")
    given = (inner if isinstance(inner, dict) else hf).get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(given) if given else (2, count // 2, count - 3)
    if not all(type(tap) is int and 0 <= tap < count for tap in taps):
        raise StartError(f"{WHERE} reads the states of layers {list(taps)}, and there are {count}")
    dim = head_size(fields)
    table = rope(fields, dim, served.max_position)
    return EagleSpec(
        attention=attention(fields, dim=dim, rope=table, qkv_bias=fields.flag("attention_bias")),
        mlp=mlp(fields, "hidden_act", "silu", bias=fields.flag("mlp_bias")),
        norm=NormSpec(fields.number("rms_norm_eps", 1e-6)),
        taps=taps,
        vocab=fields.integer("draft_vocab_size", served.vocab),
        has_bias=fields.flag("bias"),
        adds_normed=fields.flag("norm_before_residual"),
    )


class Taps:
    """Makes the states of a forward pass from the residual streams after some layers."""

    def __init__(self, layers: Sequence[int], join: JoinedRows, project: Callable[[Tensor], Tensor]) -> None:
        self._layers, self._join, self._project = layers, join, project
        self._joined: Tensor | None = None

    def put(self, layers: int, streams: Tensor) -> None:
        """Take the streams [T, hidden] after so many layers, if they are needed."""
        if self._joined is None:
            self._joined = self._join.empty(streams)
        for part, number in enumerate(self._layers):
            if number == layers:
                self._join.put(self._joined, part, streams)

    def state(self) -> Tensor:
        """The states [T, hidden], once all are taken."""
        assert self._joined is not None
        return self._project(self._joined)


class EagleHead:
    """The head without weights; `options` and `head` are those of the served model's layers and head; `positions`: of
    the rope table."""

    def __init__(
        self, spec: EagleSpec, served: DecoderSpec, options: LayerOptions, head: LayerOptions, positions: int
    ) -> None:
        hidden = served.hidden
        self.spec = spec
        self.attention = Attention(2 * hidden, spec.attention, options)
        self.attention.out = Linear(
            spec.attention.heads * spec.attention.dim, {spec.attention.out_name: hidden}, options, split="row"
        )
        self._mlp = spec.mlp.layer(hidden, options)
        norms = [make_norm(hidden, spec.norm, options.dtype) for _ in range(4)]
        self._input_norm, self._state_norm, self._mlp_norm, self._norm = norms
        self._projection = Linear(len(spec.taps) * hidden, {"fc": hidden}, options, bias=spec.has_bias)
        self._embedding = Embedding(served.vocab, hidden, options.dtype)
        self._head = Head(spec.vocab, hidden, head)
        self._has_embedding = self._has_head = True
        self._join_taps, self._join = JoinedRows(len(spec.taps)), JoinedRows(2)
        self._table = rope_table(spec.attention.rope, positions).to(ops.torch_device)
        self._served_vocab = served.vocab
        self._ids: Tensor | None = None  # [vocab] int64: the model's ids of the head's

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of checkpoints."""
        parameters = under("midlayer.self_attn", self.attention.parameters()) | under(
            "midlayer.mlp", self._mlp.parameters()
        )
        for name, norm in (
            ("midlayer.input_layernorm", self._input_norm),
            ("midlayer.hidden_norm", self._state_norm),
            ("midlayer.post_attention_layernorm", self._mlp_norm),
            ("norm", self._norm),
        ):
            parameters |= under(name, norm.parameters())
        parameters |= self._projection.parameters()
        parameters |= under("embed_tokens", self._embedding.parameters()) if self._has_embedding else {}
        return parameters | (self._head.parameters() if self._has_head else {})

    def load(self, directory: Path) -> None:
        """Read the weights of a checkpoint, which may leave out what is the model's own.  Raises StartError."""
        entries = {_name(name): entry for name, entry in weights.catalogue(directory).items() if name != UNUSED}
        ids = entries.pop(TO_SERVED, None)
        self._has_embedding, self._has_head = EMBEDDING in entries, HEAD in entries
        parameters = self.parameters()
        weights.check_names(entries, parameters, str(directory))
        if ids is not None:
            offsets = weights.read_tensor(ids).long()
            self._ids = (torch.arange(len(offsets)) + offsets).to(ops.torch_device)
        if (self._served_vocab if self._ids is None else len(self._ids)) != self.spec.vocab:
            raise StartError(f"{WHERE} draws {self.spec.vocab} tokens, and {directory} does not say which (d2t)")
        weights.load_into(parameters, weights.stream(entries))

    def taps(self) -> Taps:
        """What takes the residual streams of a forward pass."""
        return Taps(self.spec.taps, self._join_taps, self._projection)

    def __call__(
        self, batch: ForwardBatch, model: Decoder, states: Tensor
    ) -> tuple[Tensor, Tensor]:  # as `DraftHead.__call__`
        embed = self._embedding if self._has_embedding else model.embedding
        embedded = self._input_norm(embed(batch.input_ids))
        normed = self._state_norm(states)
        mixed = self.attention(self._join((embedded, normed)), batch, 0, self._table)
        x, residual = self._mlp_norm.add(mixed, normed if self.spec.adds_normed else states)
        return self._norm.add(self._mlp(x), residual)

    def logits(self, model: Decoder, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, own vocab]
        """The logits of the head's own vocabulary."""
        return self._head(hidden) if self._has_head else model.logits(hidden)

    def served_logits(self, logits: Tensor) -> Tensor:  # [n, own vocab] -> [n, vocab]
        """The same of the model's vocabulary; -inf of tokens that the head does not draw."""
        if self._ids is None:
            return logits
        every = logits.new_full((len(logits), self._served_vocab), float("-inf"))
        return every.index_copy_(1, self._ids, logits)


def _name(name: str) -> str:
    """A tensor's name without the prefix that some checkpoints have."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
