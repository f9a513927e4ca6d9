"""`EngineFeature`: one capability beside the engine's core, and `Hooks`: what all features have to be asked.

The core knows requests, steps and blocks.  What a room adds (adapters, grammars, drafts, KV elsewhere) is a feature:
an object that keeps its own state of requests and defines the hooks that it needs.  The bound methods of each hook are
collected once, when the engine is made, so a hook that no feature defines costs an empty loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokserve.engine.plan_builder import PlanBuilder
from tokserve.engine.request import Request
from tokserve.protocol.messages import EngineRequest, Status, Submit, SubmitReply


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

    def may_enter(self, request: Request) -> bool:
        """Whether a waiting request may have a slot now."""
        raise NotImplementedError

    def on_slot(self, request: Request, hits: int) -> dict[str, Any]:
        """A request has got a slot, and its first `hits` blocks from the cache; returns fields of its `NewRow`."""
        raise NotImplementedError

    # --- a step ---

    def plan(self, builder: PlanBuilder) -> None:
        """The rows of a step are complete; what is sent of them, and in which order, may be changed."""

    # --- the loop ---

    def poll(self) -> None:
        """Begin a turn: take what has been done beside the loop, and leave in the outbox what comes of it."""

    def is_busy(self) -> bool:
        """Whether requests may wait although nothing runs."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """Fields of the `Status` that front ends are told."""
        raise NotImplementedError

    def take_over(self, was: Status) -> None:
        """Failover: be what the engine before was, before there are any requests."""


class Hooks:
    """The bound methods of the features that define a hook, by the hook's name."""

    def __init__(self, features: Iterable[EngineFeature] = ()) -> None:
        features = tuple(features)

        def those(name: str) -> tuple[Any, ...]:
            base = getattr(EngineFeature, name)
            return tuple(getattr(one, name) for one in features if getattr(type(one), name) is not base)

        self.refuse: tuple[Callable[[Submit], SubmitReply | None], ...] = those("refuse")
        self.attach: tuple[Callable[[Request, EngineRequest], None], ...] = those("attach")
        self.may_enter: tuple[Callable[[Request], bool], ...] = those("may_enter")
        self.on_slot: tuple[Callable[[Request, int], dict[str, Any]], ...] = those("on_slot")
        self.plan: tuple[Callable[[PlanBuilder], None], ...] = those("plan")
        self.poll: tuple[Callable[[], None], ...] = those("poll")
        self.is_busy: tuple[Callable[[], bool], ...] = those("is_busy")
        self.status: tuple[Callable[[], dict[str, Any]], ...] = those("status")
        self.take_over: tuple[Callable[[Status], None], ...] = those("take_over")
