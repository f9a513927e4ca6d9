"""Drafts drawn by a draft head: the first from a hidden state of the model, the next from those of the head itself.

The model writes the hidden state of each token to a page beside its keys and values, so the states of a prefix that
requests share are there for all of them, and the head computes what it needs when it drafts.  After a verification it
computes the tokens that stay again, from the model's states.  A block's last position depends on the token after the
block, which requests that share it may not have in common: that costs acceptance, never a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from tokserve import checkpoint, ops
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.features.draft_heads.eagle import EagleHead, eagle_spec
from tokserve.features.draft_heads.served import METHODS, DraftingDecoder
from tokserve.features.speculation.draft_model import DraftModel, Flags
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter
from tokserve.models.decoder import Decoder
from tokserve.protocol.kv_spec import KVSpec, LayerSpec, dtype_name
from tokserve.protocol.plan import Int32
from tokserve.runner.backend import Draft
from tokserve.runner.cpu_graphs import MAX_TOKENS
from tokserve.runner.runner import Runner
from tokserve.runner.tables.slots import Int64, last_indices


class HeadModel:
    """A draft head with what it has of the served model, as backends run a draft model.

    `put` its input states before each pass; `outputs` are good until the next.  `captured`: the most tokens of a step
    that is captured: those of so few have one place, which captured steps read and write.
    """

    def __init__(self, model: DraftingDecoder, captured: int) -> None:
        self.model, self._captured = model, captured
        shape = 1, captured, model.spec.hidden
        self._inputs, self._kept = (
            torch.zeros(shape, dtype=model.dtype, device=ops.torch_device) for _ in ("inputs", "outputs")
        )
        places = torch.arange(captured, device=ops.torch_device)
        self._by_count = [(self._inputs[0, :count], places[:count]) for count in range(captured + 1)]
        self._states = self._outputs = self._inputs[0]  # of more tokens

    def put(self, states: Tensor) -> None:
        """Take the states [T, hidden] of the next pass."""
        count = len(states)
        if count > self._captured:
            self._states = states
            return
        self._by_count[count][0].copy_(states)
        self._outputs = self._kept[0, :count]

    def outputs(self) -> Tensor:
        """What the last pass made to take the place of the states after its tokens, [T, hidden]."""
        return self._outputs

    def forward(self, batch: ForwardBatch) -> Tensor:  # [T, hidden], or [n, hidden] of `batch.logits_rows`
        batch.work = {}
        count = len(batch.input_ids)
        inputs = self._by_count[count][0] if count <= self._captured else self._states
        states, repeated = self.model.draft_head(batch, self.model, inputs)
        if count <= self._captured:
            ops.store_rows(repeated, self._kept, self._by_count[count][1])
        else:
            self._outputs = repeated
        return states if batch.logits_rows is None else states.index_select(0, batch.logits_rows.tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.draft_head.logits(self.model, hidden)

    def kv_specs(self) -> tuple[LayerSpec, ...]:
        """What the head's attention keeps, and the model's hidden states."""
        states = KVSpec(1, self.model.spec.hidden, dtype_name(self.model.dtype), kind="hidden")
        return self.model.draft_head.attention.kv_spec(), states

    def parameters_by_name(self) -> dict[str, Parameter]:
        return self.model.draft_head.parameters()

    def row_bytes(self) -> int:
        return self.model.row_bytes()


class HeadDrafts(DraftModel):
    """Draws with the draft head of the served model."""

    catch_up = 2048  # a head has one layer
    keeps_drafted = False

    def __init__(self, draft: Draft, runner: Runner) -> None:
        super().__init__(draft, runner)
        assert isinstance(draft.model, HeadModel)
        self._head = draft.model
        width = self._head.model.spec.hidden
        self._repeated = torch.zeros(  # by slot
            len(self._slots.prompt_lens), width, dtype=self._head.model.dtype, device=ops.torch_device
        )

    def num_bytes(self) -> Mapping[str, int]:
        """The bytes of its weights, unless they are the model's."""
        return {} if self._head.model.spec.head is not None else super().num_bytes()

    def on_weights(self) -> None:
        model = self._runner.model
        assert isinstance(model, DraftingDecoder)
        self._head.model = model
        if self.progress is not None:
            self.progress.clear()

    def _served_logits(self, logits: Tensor) -> Tensor:
        return self._head.model.draft_head.served_logits(logits)

    def _pass(self, number: int, slots: Int32, computed: Int32, sizes: Int32, has_logits: Flags) -> Int32:
        if number == 0:
            positions, owner = last_indices(computed + sizes, sizes), slots.repeat(sizes)
            blocks, offsets = np.divmod(positions, self._slots.block_size)
            pages = self._backend.kv[-1][0]
            places = self._slots.blocks[owner, blocks] * np.int64(self._slots.block_size) + offsets
            states = pages.view(-1, pages.shape[-1]).index_select(0, self._index(places))
        else:
            states = self._repeated.index_select(0, self._index(slots))
        self._head.put(states)
        token_ids = super()._pass(number, slots, computed, sizes, has_logits)
        last = self._index(np.add.accumulate(sizes, dtype=np.int64)[has_logits] - 1)
        outputs = self._head.outputs().index_select(0, last)
        self._repeated.index_copy_(0, self._index(slots[has_logits]), outputs)
        return token_ids

    def _index(self, numbers: Int32 | Int64) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._repeated.device)


def load_draft(config: Config, model: Decoder, load: Callable[[Config], Decoder]) -> Draft | None:
    """The draft head of `model`, if the options say that one draws.  Raises StartError."""
    plan = config.speculation.resolved()
    if plan.method not in METHODS:
        return None
    if not isinstance(model, DraftingDecoder):
        raise StartError(
            f"option speculative_config: the method {plan.method} needs a built-in model, and this one is "
            f"{model.implementation}'s"
        )
    if plan.model is not None:
        directory = checkpoint.locate(plan.model)
        spec = eagle_spec(checkpoint.hf_config(directory), model.spec)
        head = EagleHead(spec, model.spec, LayerOptions(model.dtype), model.head.options, len(model.rope_table))
        head.load(directory)
        model.draft_head = head
    captured = max(MAX_TOKENS, config.scheduler.rows)
    return Draft(HeadModel(model, captured), len(model.kv_specs()), HeadDrafts, ahead=1)
