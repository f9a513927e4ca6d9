"""`RunnerFeature`: what a room adds to a runner, and `RunnerHooks`: what all features have to be asked.

As in the engine (`engine/hooks`), a feature keeps its own state of the requests in the slots and defines the hooks that
it needs; their bound methods are collected once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from torch import Tensor

from tokserve.base.rooms import contributions
from tokserve.config import Config
from tokserve.models.decoder import Decoder
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.plan import DraftPasses, Float32, NewRow, StepPlan
from tokserve.runner.backend import FeatureRows

if TYPE_CHECKING:
    from tokserve.runner.runner import Runner

Calls = Mapping[str, Callable[..., Any]]  # by the name of a method
Vector = Callable[[], Float32]  # that may still be on its way to the host


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """What features are made of.  `runner` is complete but for them.  `images`: of a model that reads some; `threads`:
    of ops.  `loaded`: what rooms have made of the model when it was loaded, by their names.  `offers`: functions of
    features for others."""

    config: Config
    runner: Runner
    images: ImageFormat | None
    threads: int
    loaded: Mapping[str, Any]
    offers: dict[str, Callable[..., Any]] = field(default_factory=dict)


class RunnerFeature:
    """The hooks, none of which must be defined.  They are called in the thread of steps, in the order of features."""

    def calls(self) -> Calls:
        """Admin methods, which run between two steps."""
        return {}

    def background_calls(self) -> Calls:
        """Admin methods that may take long: they run in the background thread, one at a time."""
        return {}

    def copy_calls(self) -> Calls:
        """Methods that copy KV blocks, which run in the threads of their lanes."""
        return {}

    def interrupt(self) -> None:
        """Make what the background thread waits for fail soon; called from any thread."""

    def attach(self, model: Decoder) -> None:
        """This model has been made to take the place of the one that serves."""

    def num_bytes(self) -> Mapping[str, int]:
        """Memory that the feature holds, by name."""
        return {}

    def on_start(self, facts: dict[str, Any]) -> None:
        """The start is over; what it reports of the feature is added to `facts`.  Raises StartError."""

    def draw(self, plan: StepPlan) -> tuple[StepPlan, DraftPasses]:
        """The plan with the drafts that it left open; one feature draws."""
        raise NotImplementedError

    def assign(self, row: NewRow) -> None:
        """A request takes a slot; what the one before has left there does not count."""

    def release(self, slot: int) -> None:
        """The slot is free."""

    def before(self, plan: StepPlan, model: Decoder) -> FeatureRows | None:
        """What the feature brings to the plan's batch."""

    def needed(self, plan: StepPlan) -> dict[int, int]:
        """Plan row -> of how many of its last positions `after` reads the hidden states; a feature defines both."""
        raise NotImplementedError

    def after(self, model: Decoder, plan: StepPlan, row: int, states: Tensor) -> Vector | None:
        """The hidden states [count, H] that `needed` has named; returns, at the end of the row's request, what is
        called once for its result, and may wait for the device then."""

    def values(self, plan: StepPlan) -> Mapping[str, dict[int, NDArray[Any]]]:
        """What the step that was just computed brought, by name and plan row: of `StepResult.values`."""
        raise NotImplementedError

    def on_weights(self) -> None:
        """The weights are others, or given up."""

    def on_pages_lost(self) -> None:
        """The KV cache has lost its contents."""

    def totals(self) -> dict[str, int]:
        """Counts since the start, by names of the room: they go with the result of the step just computed."""
        raise NotImplementedError


class RunnerHooks:
    """The bound methods of the features that define a hook, by the hook's name."""

    def __init__(self, features: Iterable[RunnerFeature] = ()) -> None:
        features = self.features = tuple(features)

        def those(name: str) -> tuple[Any, ...]:
            base = getattr(RunnerFeature, name)
            return tuple(getattr(one, name) for one in features if getattr(type(one), name) is not base)

        self.assign: tuple[Callable[[NewRow], None], ...] = those("assign")
        self.release: tuple[Callable[[int], None], ...] = those("release")
        self.before: tuple[Callable[[StepPlan, Decoder], FeatureRows | None], ...] = those("before")
        self.readers: tuple[RunnerFeature, ...] = tuple(method.__self__ for method in those("after"))
        self.values: tuple[Callable[[StepPlan], Mapping[str, dict[int, NDArray[Any]]]], ...] = those("values")
        self.on_weights: tuple[Callable[[], None], ...] = those("on_weights")
        self.totals: tuple[Callable[[], dict[str, int]], ...] = those("totals")
        self.on_pages_lost: tuple[Callable[[], None], ...] = those("on_pages_lost")
        self.draw: tuple[Callable[[StepPlan], tuple[StepPlan, DraftPasses]], ...] = those("draw")


def make_features(context: RunnerContext) -> tuple[RunnerFeature, ...]:
    """The features of a runner, in the order of the rooms."""
    made = (make(context) for _, make in contributions("runner"))
    return tuple(feature for feature in made if feature is not None)
