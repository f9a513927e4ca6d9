"""`EngineFeature`: one capability beside the engine's core, and `Hooks`: what all features have to be asked.

The core knows requests, steps and blocks.  What a room adds (adapters, grammars, drafts, KV elsewhere) is a feature:
an object that keeps its own state of requests and defines the hooks that it needs.  The bound methods of each hook are
collected once, when the engine is made, so a hook that no feature defines costs an empty loop.

Two places are per request, so that other requests do not pay for them: `Request.gates`, which keep a request from being
computed, and `Request.listeners`, which are told of every new token.  A feature adds to them in `attach`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from tokserve.engine.plan_builder import InFlightStep, PlanBuilder
from tokserve.engine.request import Request
from tokserve.protocol.messages import EngineRequest, Status, Submit, SubmitReply
from tokserve.protocol.plan import GrammarBitmask, StepResult


class Prerequisite(NamedTuple):
    """What a request waits for before it is accepted.  `ready` is called once all prerequisites of its submission have
    succeeded; `failure` is what the client is told of an unforeseen error."""

    future: Future[Any]
    ready: Callable[[], None]
    failure: str


class EngineFeature:
    """The hooks, none of which must be defined.  They are called in the loop's thread, in the order of the features.

    `commands`: objects whose methods are admin commands, usually the feature itself.
    """

    @property
    def commands(self) -> Sequence[object]:
        return (self,)

    # --- a request, in the order of its life ---

    def refuse(self, submit: Submit) -> SubmitReply | None:
        """Why the requests of a submission are not accepted, if so."""

    def attach(self, request: Request, spec: EngineRequest) -> None:
        """A request is made, of `spec`, and may be refused yet.  Raises RequestError if it cannot be served."""

    def prepare(self, request: Request) -> Prerequisite | None:
        """What its submission waits for before it is accepted.  Raises RequestError if it cannot be served."""

    def accept(self, request: Request) -> None:
        """A request is about to be queued, though its prerequisite may not have ended."""

    def kept_for(self, request: Request) -> str | None:
        """What a waiting request must wait for before it may have a slot, as operators see it; None: nothing."""
        raise NotImplementedError

    def reuse(self, request: Request, hits: int) -> int:
        """How many leading positions of a request that may have a slot are computed, beyond its `hits` blocks from the
        cache; 0: no more.  `on_slot` of the feature brings them, if the request gets the slot."""
        raise NotImplementedError

    def on_slot(self, request: Request, hits: int) -> dict[str, Any]:
        """A request has got a slot, and its first `hits` blocks from the cache; returns fields of its `NewRow`."""
        raise NotImplementedError

    def on_end(self, request: Request) -> None:
        """A request has its `finish`, which may be replaced by one that says more; steps in flight may mention it."""

    # --- a step, from its plan to its result ---

    def draft(self, builder: PlanBuilder) -> None:
        """All rows that generate are in the plan: add drafts to them."""

    def may_draft(self, request: Request) -> bool:
        """Whether a step may verify drafts of a request that has gates."""
        raise NotImplementedError

    def plan(self, builder: PlanBuilder) -> None:
        """The rows of a step are complete; what is sent of them, and in which order, may be changed."""

    def on_planned(self, step: InFlightStep) -> None:
        """A step is planned, and will be computed."""

    def can_sample(self, step: InFlightStep) -> bool:
        """Whether the step may be sampled from before those ahead of it have ended."""
        raise NotImplementedError

    def bitmask(self, step: InFlightStep) -> GrammarBitmask | None:
        """Which tokens may be sampled; None: all.  One feature restricts the rows of a step."""

    def before_update(self, step: InFlightStep, result: StepResult, seconds: float) -> None:
        """The step has ended, after `seconds`, and the requests do not know yet."""

    def on_result(self, step: InFlightStep, result: StepResult, now: float) -> None:
        """The requests have their new tokens."""

    def hold(self, requests: list[Request]) -> list[Request]:
        """Requests with output to be sent; returns those whose output can be sent now.  The others are left in the
        outbox later."""
        raise NotImplementedError

    # --- the loop ---

    def poll(self) -> None:
        """Begin a turn: take what has been done beside the loop, and leave in the outbox what comes of it."""

    def is_busy(self) -> bool:
        """Whether requests may wait although nothing runs."""
        raise NotImplementedError

    def holds_blocks(self) -> bool:
        """Whether blocks are in use although no request is."""
        raise NotImplementedError

    def seconds_left(self) -> float | None:
        """The time until there is something for `poll`; None: until `wake` is called."""

    def drop(self, request_ids: Sequence[str]) -> None:
        """Clients have given up these requests, which may have ended."""

    def stats(self) -> dict[str, Any]:
        """What front ends are told in `StepStats.rooms`, by names of the room."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """Fields of the `Status` that front ends are told."""
        raise NotImplementedError

    def take_over(self, was: Status) -> None:
        """Failover: be what the engine before was, before there are any requests."""

    def clear(self) -> None:
        """Drop what is kept of earlier requests."""

    def close(self) -> None:
        """End threads and processes."""


class Hooks:
    """The bound methods of the features that define a hook, by the hook's name."""

    def __init__(self, features: Iterable[EngineFeature] = ()) -> None:
        self.collect(features)

    def collect(self, features: Iterable[EngineFeature]) -> None:
        """Ask these features from here on."""
        features = tuple(features)

        def those(name: str) -> tuple[Any, ...]:
            base = getattr(EngineFeature, name)
            return tuple(getattr(one, name) for one in features if getattr(type(one), name) is not base)

        self.refuse: tuple[Callable[[Submit], SubmitReply | None], ...] = those("refuse")
        self.attach: tuple[Callable[[Request, EngineRequest], None], ...] = those("attach")
        self.prepare: tuple[Callable[[Request], Prerequisite | None], ...] = those("prepare")
        self.accept: tuple[Callable[[Request], None], ...] = those("accept")
        self.kept_for: tuple[Callable[[Request], str | None], ...] = those("kept_for")
        self.reuse: tuple[Callable[[Request, int], int], ...] = those("reuse")
        self.on_slot: tuple[Callable[[Request, int], dict[str, Any]], ...] = those("on_slot")
        self.on_end: tuple[Callable[[Request], None], ...] = those("on_end")
        self.draft: tuple[Callable[[PlanBuilder], None], ...] = those("draft")
        self.may_draft: tuple[Callable[[Request], bool], ...] = those("may_draft")
        self.plan: tuple[Callable[[PlanBuilder], None], ...] = those("plan")
        self.on_planned: tuple[Callable[[InFlightStep], None], ...] = those("on_planned")
        self.can_sample: tuple[Callable[[InFlightStep], bool], ...] = those("can_sample")
        self.bitmask: tuple[Callable[[InFlightStep], GrammarBitmask | None], ...] = those("bitmask")
        self.before_update: tuple[Callable[[InFlightStep, StepResult, float], None], ...] = those("before_update")
        self.on_result: tuple[Callable[[InFlightStep, StepResult, float], None], ...] = those("on_result")
        self.hold: tuple[Callable[[list[Request]], list[Request]], ...] = those("hold")
        self.poll: tuple[Callable[[], None], ...] = those("poll")
        self.is_busy: tuple[Callable[[], bool], ...] = those("is_busy")
        self.holds_blocks: tuple[Callable[[], bool], ...] = those("holds_blocks")
        self.seconds_left: tuple[Callable[[], float | None], ...] = those("seconds_left")
        self.drop: tuple[Callable[[Sequence[str]], None], ...] = those("drop")
        self.stats: tuple[Callable[[], dict[str, Any]], ...] = those("stats")
        self.status: tuple[Callable[[], dict[str, Any]], ...] = those("status")
        self.take_over: tuple[Callable[[Status], None], ...] = those("take_over")
        self.clear: tuple[Callable[[], None], ...] = those("clear")
        self.close: tuple[Callable[[], None], ...] = those("close")
