"""The device's side of the runner: slot tables, KV memory, forward passes and their capture, memory budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from tokserve.layers.batch import ForwardBatch, Pages, Tap
from tokserve.layers.parameter import Parameter
from tokserve.models.decoder import Decoder
from tokserve.protocol.kv_spec import KVLayout, LayerSpec
from tokserve.protocol.plan import Int32, StepPlan
from tokserve.runner.device import Device
from tokserve.runner.logits import LogitRows
from tokserve.runner.replay import Step
from tokserve.runner.steps import PendingResult
from tokserve.runner.tables.routed import RoutedTable
from tokserve.runner.tables.slots import Int64, SamplingColumns, Slots
from tokserve.runner.tables.states import StateTable

if TYPE_CHECKING:
    from tokserve.runner.features import RunnerFeature
    from tokserve.runner.runner import Runner

WARM_UPS: tuple[dict[str, Any], ...] = (  # sampling parameters; all but the first only compile kernels
    {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "logprobs": 1,
        "prompt_logprobs": 1,
    },
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 0.5, "top_p": 0.9, "return_sampling_mask": True},
    *(
        {"temperature": 0.5, "logprobs": k, "logprobs_mode": mode} | filtered
        for k, mode, filtered in product((0, 5, 20), ("raw", "temperature"), ({}, {"top_k": 5}))
    ),
)


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """What features bring to a batch: its fields of these names."""

    embeds: tuple[Tensor, Tensor] | None = None
    added: tuple[Tensor, Tensor] | None = None
    tap: Tap | None = None

    def joined(self, other: FeatureRows | None) -> FeatureRows:
        """These, and what another feature brings, which is none of the same fields."""
        if other is None:
            return self
        return FeatureRows(self.embeds or other.embeds, self.added or other.added, self.tap or other.tap)

    def put_into(self, batch: ForwardBatch) -> None:
        batch.embeds, batch.added, batch.tap = self.embeds, self.added, self.tap


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of a step's tokens, or of the last ones of each row."""

    states: Tensor  # [n, H]
    ends: Int64  # [R], for each row of the plan the index after its last state
    logits_indices: Tensor | None  # [m] int64, the states that a token is sampled from; None: all


class DraftNetwork(Protocol):
    """What backends need of a model that draws drafts: as a `Decoder` has it."""

    def forward(self, batch: ForwardBatch) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def kv_specs(self) -> tuple[LayerSpec, ...]: ...

    def parameters_by_name(self) -> dict[str, Parameter]: ...

    def row_bytes(self) -> int: ...


@dataclass(slots=True)
class Draft:
    """A model that draws drafts.  Its layers' pages are those of the cache from `first_layer` on; 0: it shares those of
    the served model, of which it is a copy.  `feature` makes what draws with it in a runner.

    `ahead`: at a position, a draft head reads the token so many positions later; it has no adapters and no recurrent
    states.
    """

    model: DraftNetwork
    first_layer: int
    feature: Callable[[Draft, Runner], RunnerFeature]
    ahead: int = 0


class Backend(Protocol):
    """What the runner needs of a device; one implementation is chosen at start-up.  `warm_ups`: sampling parameters of
    the requests that a start runs, so that the first request is not slower."""

    @property
    def device(self) -> Device: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def slots(self) -> Slots: ...

    @property
    def kv(self) -> Pages: ...

    @property
    def routed(self) -> RoutedTable | None:
        """The chosen experts of cached positions, if they are kept."""

    @property
    def states(self) -> StateTable | None:
        """The recurrent states, if the model has some."""

    @property
    def draft(self) -> Draft | None:
        """What draws drafts; None: nothing does."""

    @property
    def keeps_memory(self) -> bool:
        """Whether capturing takes so long that new weights had better be copied to where the old ones are."""

    @property
    def prompt_logits_bytes(self) -> int:
        """Logits of prompt tokens are made in chunks of about this size."""

    @property
    def warm_ups(self) -> Sequence[dict[str, Any]]: ...

    def begin(self, plan: StepPlan, *, needs_history: bool) -> StepPlan:
        """The plan with its true `num_computed`.  `needs_history`: the draft model reads the tokens so far, so these
        must be in the host's tables."""

    def replay(self, plan: StepPlan) -> Tensor | None:
        """Logits [R, V] of a captured decode step; None if none fits."""

    def forward(self, model: Decoder, plan: StepPlan, needed: Int32, features: FeatureRows | None) -> HiddenStates:
        """Compute the plan's tokens; the last needed[i] of row i are used, at least its `num_logits`."""

    def draft_logits(self, plan: StepPlan) -> Tensor:
        """Compute the plan's tokens with the draft model: logits [n, V] of the last position of each row that has
        logits, good until the next call."""

    def columns(self, rows: LogitRows) -> SamplingColumns:
        """What sampling reads of the rows of logits of the step that was computed last."""

    def finish(self, result: PendingResult, columns: SamplingColumns, token_ids: Tensor) -> None:
        """Keep tokens [n] sampled for the rows `columns` for the next step."""

    def is_batch_invariant(self, model: Decoder) -> bool:
        """Whether the bits of a row do not depend on the other rows."""

    def capture(self, model: Decoder) -> None:
        """Capture steps of this model, unless capture is turned off.  Raises StartError."""

    def invalidate(self) -> None:
        """Drop what was captured: the memory that it reads is given up."""

    def on_foreign_code(self, model: Decoder) -> None:
        """Code that is not ours has had the model and may have replaced its tensors."""

    def allocate_kv(self) -> None:
        """Take the KV cache's memory.  Raises StartError."""

    def release_kv(self) -> None:
        """Give the KV cache's memory back."""


def decode_step(model: Decoder | DraftNetwork) -> Step:
    """A step from a decode batch to its logits."""

    def step(batch: ForwardBatch) -> Tensor:
        return model.logits(model.forward(batch))

    return step
