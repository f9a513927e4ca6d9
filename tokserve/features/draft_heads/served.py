"""A decoder that keeps the hidden states of its tokens beside their keys and values, for a draft head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from tokserve import checkpoint, ops
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.features.draft_heads.eagle import EagleHead, eagle_spec
from tokserve.features.draft_heads.head import DraftHead, DraftHeadSpec
from tokserve.features.draft_heads.names import head_of, require_tensors
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import WHOLE, Stage
from tokserve.layers.parameter import Parameter, StackedParameter
from tokserve.models.decoder import Decoder, DecoderSpec

METHODS = ("mtp", "eagle3")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingSpec(DecoderSpec):
    """A decoder for a draft head: that of its own checkpoint, `head`, which is loaded and updated with it, or one of
    another checkpoint that reads the states after `taps` layers."""

    head: DraftHeadSpec | None = None
    taps: tuple[int, ...] = ()

    def build(
        self,
        options: LayerOptions,
        head: LayerOptions,
        tables: list[Tensor],
        *,
        float8_cache: bool = False,
        stage: Stage = WHOLE,
    ) -> Decoder:
        return DraftingDecoder(self, options, head, tables, float8_cache=float8_cache, stage=stage)


class DraftingDecoder(Decoder):
    """Arguments as `Decoder` takes them; the last layer of its batches' cache has pages of states [P, hidden]."""

    spec: DraftingSpec
    draft_head: DraftHead | EagleHead  # with `taps`, set once it is loaded
    # the last one with weights, until this model's own has all of them
    _head_before: DraftHead | EagleHead | None = None

    def __init__(self, spec: DraftingSpec, options: LayerOptions, *arguments: Any, **more: Any) -> None:
        super().__init__(spec, options, *arguments, **more)
        if spec.head is not None:
            self.draft_head = DraftHead(spec.hidden, spec.head, options)

    def _own_head(self) -> DraftHead:
        assert isinstance(self.draft_head, DraftHead)
        return self.draft_head

    def blank(self) -> Decoder:
        blank = super().blank()
        assert isinstance(blank, DraftingDecoder)
        if self.spec.head is None:
            blank.draft_head = self.draft_head
        blank._head_before = self._head_before or self.draft_head
        return blank

    def inherit(self, missing: list[str]) -> list[str]:
        """The names but for those of the head, if all of them are missing: a trainer need not have it."""
        names = set() if self.spec.head is None else self.draft_head.parameters().keys()
        if self._head_before is not None and names <= set(missing):
            self.draft_head = self._head_before
            missing = [name for name in missing if name not in names]
        if names.isdisjoint(missing):
            self._head_before = None
        return missing

    def parameters_by_name(self) -> dict[str, Parameter]:
        parameters = super().parameters_by_name()
        return parameters if self.spec.head is None else parameters | self._own_head().parameters()

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        parameters = super().stacked_parameters()
        return parameters if self.spec.head is None else parameters | self._own_head().stacked_parameters()

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The states as `Decoder.forward` returns them; all tokens are computed in all layers."""
        rows, batch.logits_rows = batch.logits_rows, None
        head = self.draft_head
        states, kept = self._with_taps(batch, head) if isinstance(head, EagleHead) else (super().forward(batch),) * 2
        ops.store_rows(kept, batch.kv[-1][0], batch.slot_mapping)
        batch.logits_rows = rows
        return states if rows is None else states.index_select(0, rows.tokens)

    def _with_taps(self, batch: ForwardBatch, head: EagleHead) -> tuple[Tensor, Tensor]:
        """The states for the output head, and those for the draft head."""
        taps, outer = head.taps(), batch.tap

        def tap(layers: int, states: Tensor) -> None:
            taps.put(layers, states)
            if outer is not None:
                outer(layers, states)

        batch.tap = tap
        states = super().forward(batch)
        batch.tap = outer
        return states, taps.state()


def with_draft_head(
    config: Config, hf: Mapping[str, Any], spec: DecoderSpec, names: Collection[str] | None
) -> DecoderSpec:
    """The spec with what the options' draft head needs.  `names`: of the checkpoint's tensors; None: weights are drawn.
    Raises StartError."""
    plan = config.speculation.resolved()
    if plan.method not in METHODS:
        return spec
    if type(spec) is not DecoderSpec:
        raise StartError(f"option speculative_config: the method {plan.method} is for models that generate")
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if plan.model is not None:
        return DraftingSpec(**values, taps=eagle_spec(checkpoint.hf_config(checkpoint.locate(plan.model)), spec).taps)
    head, renames = head_of(hf, spec)
    if names is not None:
        require_tensors(head, names)
    return DraftingSpec(**values | {"renames": renames}, head=head)
