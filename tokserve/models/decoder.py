"""The generic decoder: embedding, a stack of attention and feed-forward blocks, norm, head.

It is built from a `DecoderSpec`.  The residual stream is in the model's dtype; weights come in through
`parameters_by_name`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokserve import ops
from tokserve.base.errors import RequestError, StartError
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.embedding import Embedding, Head, Positions, PositionsSpec
from tokserve.layers.linear import Linear
from tokserve.layers.norm import NoNorm, NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import ALONE, WHOLE, Stage
from tokserve.layers.parameter import Parameter, StackedParameter, on_another_rank, under
from tokserve.layers.protocols import ImageTower, LabelHead, LabelHeadSpec, LayerInputsSpec, TowerSpec
from tokserve.layers.rope import RopeSpec, rope_table, rows_of_axes
from tokserve.models.block import BlockSpec, DecoderBlock
from tokserve.models.formats import DENSE, CheckpointFormat
from tokserve.models.provenance import HEAD, Provenance
from tokserve.protocol.kv_spec import LayerSpec

Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Embedding, blocks, final norm and head.  `tied`: the head's weight is the embedding's.

    `embedding_multiplier`: of the embeddings, in the model's dtype.  `logits_multiplier`: of the logits, and
    `logits_softcap` > 0: a logit x becomes softcap * tanh(x / softcap) after that.
    `renames`: (prefix in the checkpoint, prefix here), applied to names that start with the first; a pair whose first
    begins with a dot is replaced anywhere in the name, and a tensor whose prefix becomes "" is not used.
    `format`: how the checkpoint stores weights.  `norm_name`: of the final norm's module in a checkpoint.
    `classifier`: the head of a model that classifies.  `vision`: the tower of a model that reads images.
    `position_table`: of learned positions, if there is one.  `head_bias`: the head has a bias.  `inputs`: of each layer
    besides the stream.
    """

    vocab: int
    hidden: int
    max_position: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    tied: bool
    renames: Renames
    embedding_multiplier: float = 1.0
    format: CheckpointFormat = DENSE
    logits_multiplier: float = 1.0
    logits_softcap: float = 0.0
    norm_name: str = "norm"
    classifier: LabelHeadSpec | None = None
    vision: TowerSpec | None = None
    position_table: PositionsSpec | None = None
    head_bias: bool = False
    inputs: LayerInputsSpec | None = None

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ones, in the order of the blocks."""
        return tuple(dict.fromkeys(block.attention.rope for block in self.blocks))

    def build(
        self,
        options: LayerOptions,
        head: LayerOptions,
        tables: list[Tensor],
        *,
        float8_cache: bool = False,
        stage: Stage = WHOLE,
    ) -> Decoder:
        """The model without weights; arguments as `Decoder` takes them.  Raises StartError."""
        return Decoder(self, options, head, tables, float8_cache=float8_cache, stage=stage)

    @property
    def has_experts(self) -> bool:
        """Whether there are mixtures of experts."""
        return any(block.mlp.has_experts for block in self.blocks)


def rope_tables(spec: DecoderSpec, positions: int) -> list[Tensor]:  # [positions, rope.dim] each
    """A table for each of the spec's ropes, for so many positions."""
    return [rope_table(rope, positions).to(ops.torch_device) for rope in spec.ropes]


class Decoder:
    """`options`: of the blocks; `head`: of the output head; `tables`: a rope table for each of the spec's ropes.

    `float8_cache`: the KV cache has a narrow dtype, so scales that come with weights are used.
    `exact`: all that is computed is batch invariant if the ops are.  `implementation`: as the option model_impl.
    `has_tower` False: of a model that reads images, without what reads them.  `stage`: of several, each has some of the
    layers, `numbers`; `blocks` are its own.
    """

    exact = True
    implementation = "tokserve"
    reads_both_ways = False  # a prompt is computed whole
    tower: ImageTower | None = None

    def __init__(
        self,
        spec: DecoderSpec,
        options: LayerOptions,
        head: LayerOptions,
        tables: list[Tensor],
        *,
        float8_cache: bool = False,
        has_tower: bool = True,
        stage: Stage = WHOLE,
    ) -> None:
        self.stage, self.numbers = stage, stage.layers(len(spec.blocks))
        self.spec = spec
        self.options = options
        self.float8_cache = float8_cache
        self.dtype = options.dtype
        self.head = Head(
            spec.vocab,
            spec.hidden,
            head,
            multiplier=spec.logits_multiplier,
            softcap=spec.logits_softcap,
            bias=spec.head_bias,
        )
        self.embedding = Embedding(
            spec.vocab,
            spec.hidden,
            self.dtype,
            multiplier=spec.embedding_multiplier,
            head=self.head if spec.tied and stage.is_last else None,
            keeps_stored=options.quant.name in ("wna16", "int4"),
            group=options.group,
        )
        self.position_table = (
            None if spec.position_table is None else self._learned_positions(spec.position_table, len(tables[0]))
        )
        if spec.inputs is not None and stage.count > 1:
            raise StartError("option pipeline_parallel_size: inputs by layer cannot be divided among stages")
        self.inputs = None if spec.inputs is None else spec.inputs.layer(spec.hidden, options)
        self.classifier: LabelHead | None = None
        if spec.classifier is not None:
            self.classifier = spec.classifier.layer(spec.hidden, options, self.head)
        self.blocks = [DecoderBlock(spec.hidden, spec.blocks[number], options) for number in self.numbers]
        self.norm: NoNorm = make_norm(spec.hidden, spec.norm, self.dtype)
        if spec.vision is not None and has_tower:
            whole = replace(options, group=ALONE)  # each rank looks at each image
            self.tower = spec.vision.tower(whole)
        self.rope_tables = tables
        self._layers = self._chain()
        self.provenance = Provenance()

    def _learned_positions(self, table: PositionsSpec, served: int) -> Positions:
        """The learned positions.  Raises StartError if there are fewer than are served."""
        if served > table.rows - table.first:
            raise StartError(
                f"{served} positions are to be served, and the model has learned {table.rows - table.first}: "
                "give --max-model-len"
            )
        return Positions(self.spec.hidden, table, self.dtype)

    def _chain(self) -> list[tuple[DecoderBlock, NoNorm, int]]:
        """Each block with the norm that follows it, the last one's unless that is the next stage's, and the number of
        its rope."""
        following = [*(block.attention_norm for block in self.blocks[1:]), self.norm]
        ropes = [self.spec.ropes.index(self.spec.blocks[number].attention.rope) for number in self.numbers]
        return list(zip(self.blocks, following, ropes, strict=True))

    @property
    def rope_table(self) -> Tensor:  # [positions, rope.dim] float32
        """The first rope's; all have as many positions."""
        return self.rope_tables[0]

    def blank(self) -> Decoder:
        """Another of this kind, without weights; the cache's scales are this one's until others come."""
        blank = type(self)(
            self.spec,
            self.options,
            self.head.options,
            self.rope_tables,
            float8_cache=self.float8_cache,
            has_tower=self.tower is not None,
            stage=self.stage,
        )
        for block, scales in zip(blank.blocks, self.kv_scales(), strict=True):
            block.attention.scale_cache(*scales)
        return blank

    def borrow(self, other: Decoder) -> None:
        """Use another's embedding, norms and sinks; the spec is the same.  Raises StartError for recurrent states."""
        self.embedding, self.position_table, self.norm = other.embedding, other.position_table, other.norm
        self.inputs = other.inputs
        for block, source in zip(self.blocks, other.blocks, strict=True):
            block.borrow(source)
        self._layers = self._chain()

    @property
    def quantization(self) -> str | None:
        """The value of the option that the blocks' projections are quantized by; None: they are not."""
        return self.options.quant.name

    def kv_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps in the cache."""
        return tuple(block.attention.kv_spec() for block in self.blocks)

    def kv_scales(self) -> list[tuple[float, float]]:
        """The multipliers of a float8 cache's keys and values, by layer."""
        return [(block.attention.k_scale, block.attention.v_scale) for block in self.blocks]

    def parameters_by_name(self) -> dict[str, Parameter]:
        """Every tensor a checkpoint must have, under its Hugging Face name."""
        stage = self.stage
        embedding = under("model.embed_tokens", self.embedding.parameters())
        is_needed = stage.is_first or (self.spec.tied and stage.is_last)
        parameters = embedding if is_needed else on_another_rank(embedding)
        if self.position_table is not None:
            positions = under("model.embed_positions", self.position_table.parameters())
            parameters |= positions if stage.is_first else on_another_rank(positions)
        parameters |= {} if self.inputs is None else under("model", self.inputs.parameters())
        for number in range(len(self.spec.blocks)):
            parameters |= under(f"model.layers.{number}", self._block_parameters(number))
        last = under(f"model.{self.spec.norm_name}", self.norm.parameters())
        last |= {} if self.classifier is None else self.classifier.parameters()
        last |= {name: one for name, one in self.head.parameters().items() if name != HEAD or not self.spec.tied}
        parameters |= last if stage.is_last else on_another_rank(last)
        return parameters | ({} if self.tower is None else self.tower.parameters())

    def _block_parameters(self, number: int) -> dict[str, Parameter]:
        if number in self.numbers:
            return self.blocks[number - self.numbers.start].parameters()
        return on_another_rank(DecoderBlock(self.spec.hidden, self.spec.blocks[number], self.options).parameters())

    def inherit(self, missing: list[str]) -> list[str]:
        """Complete a model that `blank` made and that was given all parameters but the `missing`: what may stay as in
        the model before does so.  Returns the others of these names."""
        return missing

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        """Tensors that a checkpoint may have in place of some of `parameters_by_name`, under their names."""
        stacked: dict[str, StackedParameter] = {}
        for number, spec in enumerate(self.spec.blocks):
            is_mine = number in self.numbers
            mlp = (
                self.blocks[number - self.numbers.start].mlp
                if is_mine
                else spec.mlp.layer(self.spec.hidden, self.options)
            )
            prefix = f"model.layers.{number}.{spec.mlp_name}."
            for name, one in mlp.stacked_parameters().items():
                covers = tuple(prefix + covered for covered in one.covers)
                parameter = one.parameter if is_mine else on_another_rank({name: one.parameter})[name]
                stacked[prefix + name] = StackedParameter(parameter, covers)
        return stacked

    def named_linears(self) -> dict[str, Linear]:
        """The projections of the blocks, as `model.layers.0.self_attn.qkv`."""
        linears: dict[str, Linear] = {}
        for number, block in zip(self.numbers, self.blocks, strict=True):
            linears |= under(f"model.layers.{number}", block.linears())
        return linears

    def adapter_targets(self) -> dict[str, tuple[str, str]]:
        """Hugging Face name of a projection -> name of the linear layer that holds it, and of the shard it is there."""
        return {
            f"{name.rpartition('.')[0]}.{shard}": (name, shard)
            for name, linear in self.named_linears().items()
            for shard in linear.shards
        }

    def adapter_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of all projections that adapters can change, by name, whichever rank has them."""
        linears = self.named_linears()
        sizes = {target: linears[name].whole(shard) for target, (name, shard) in self.adapter_targets().items()}
        for number, spec in enumerate(self.spec.blocks):
            if number not in self.numbers:
                block = DecoderBlock(self.spec.hidden, spec, self.options)
                for name, linear in under(f"model.layers.{number}", block.linears()).items():
                    sizes |= {f"{name.rpartition('.')[0]}.{shard}": linear.whole(shard) for shard in linear.shards}
        return sizes

    def row_bytes(self) -> int:
        """Memory of one row from its token to its logits, at most."""
        widest = max(
            sum(linear.outputs for linear in block.linears().values()) + block.attention.row_elements()
            for block in self.blocks
        )
        return 4 * (self.spec.vocab + 8 * (self.spec.hidden + widest))

    def embed(self, batch: ForwardBatch) -> Tensor:  # [T, hidden]
        """The inputs of the first layer."""
        rows = self.embedding(batch.input_ids)
        if batch.embeds is not None:
            index, embeddings = batch.embeds
            rows.index_copy_(0, index, embeddings.to(rows.dtype))
        return rows if self.position_table is None else ops.add_residual(self.position_table(batch.positions), rows)

    def forward(self, batch: ForwardBatch) -> Tensor:  # [T, hidden], or [n, hidden] of `batch.logits_rows`
        """Compute the batch's tokens, up to the final norm, and store their keys and values."""
        last = len(self.spec.blocks) - 1
        batch.work = {}  # a batch that is filled again has other lengths
        tap = batch.tap
        # all tokens are routed, and have a hidden state, in the last layer too
        needed = batch.logits_rows if batch.routed is None and tap is None else None
        x, residual = self._enter(batch)
        inputs = None if self.inputs is None else self.inputs(batch.input_ids, residual)
        if tap is not None:
            tap(self.numbers.start, residual)
        added = () if batch.added is None else batch.added[1]
        tables = self.rope_tables
        if batch.axes is not None:
            batch, tables = self.along_axes(batch, batch.axes)
        for layer, (block, following, rope) in zip(self.numbers, self._layers, strict=True):
            logits_rows = needed if layer == last else None
            mixed = block.attention(x, batch, layer - self.numbers.start, tables[rope], logits_rows)
            if logits_rows is not None:
                residual = residual.index_select(0, logits_rows.tokens)
                x = x.index_select(0, logits_rows.tokens) if block.parallel and not block.has_two_norms else x
                inputs = None if inputs is None else inputs.index_select(0, logits_rows.tokens)
            mixed = block.attention_post_norm(mixed)
            if block.parallel:
                x = block.mlp_norm(residual) if block.has_two_norms else x
                residual = ops.add_residual(mixed, residual, block.residual_multiplier)
            elif not block.has_mlp:
                x = mixed
            else:
                x, residual = block.mlp_norm.add(mixed, residual, block.residual_multiplier)
            if block.parallel and not block.has_mlp:
                continue  # the next layer is beside this one
            adapters = batch.adapters if logits_rows is None else logits_rows.adapters
            x = block.mlp(x, adapters, batch.routed)
            if batch.added is not None and layer < len(added):
                x.index_add_(0, batch.added[0], added[layer].to(x.dtype))
            x = block.mlp_post_norm(x)
            if layer != self.numbers[-1] or self.stage.is_last:
                x, residual = block.end(x, residual, following, inputs, adapters)
            elif block.factor is not None:
                x, residual = block.end(x, residual, NoNorm())[0], torch.zeros_like(residual)
            if tap is not None:
                tap(layer + 1, x if layer == last else residual)
        if not self.stage.is_last:
            return self._pass_on(x, residual)
        if batch.logits_rows is None or needed is not None:
            return x
        return x.index_select(0, batch.logits_rows.tokens)

    def _enter(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """What enters this stage's first layer, and the residual stream beside it, [T, hidden] each."""
        norm = self.blocks[0].attention_norm
        if self.stage.link is None or self.stage.is_first:
            residual = self.embed(batch)
            return norm(residual), residual
        both = torch.empty(2, len(batch.input_ids), self.spec.hidden, dtype=self.dtype, device=batch.input_ids.device)
        x, residual = self.stage.link.receive(both)
        return norm.add(x, residual, self.spec.blocks[self.numbers.start - 1].residual_multiplier)

    def _pass_on(self, x: Tensor, residual: Tensor) -> Tensor:
        """Send what the next stage begins with: what this one's last layer adds, and what it is added to."""
        if self.stage.link is not None:
            self.stage.link.send(torch.stack((x, residual)))
        return x

    def along_axes(self, batch: ForwardBatch, axes: Tensor) -> tuple[ForwardBatch, list[Tensor]]:
        """The batch with a rope table for each rope that has a row per token."""
        tables = [
            rows_of_axes(table, rope, axes) for rope, table in zip(self.spec.ropes, self.rope_tables, strict=True)
        ]
        return replace(batch, positions=torch.arange(axes.shape[1], device=axes.device)), tables

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab] float32
        """Logits of some of the rows that `forward` returned; [n, 0] where another stage has them."""
        return self.head(hidden) if self.stage.is_last else hidden.new_empty(len(hidden), 0, dtype=torch.float32)

    def classify(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, labels] float32
        if self.classifier is None:
            raise RequestError("the model has no labels", code="unsupported")
        return self.classifier(hidden)
