"""Which features an engine has, what they are made of, and what they ask of its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokserve.base.rooms import contributions
from tokserve.base.trace import Spans
from tokserve.config import Config
from tokserve.engine.admin.command import Command, RunningRequests
from tokserve.engine.admin.control import Control
from tokserve.engine.hooks import EngineFeature, Hooks
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.executor.base import Executor
from tokserve.protocol.plan import DeviceFacts


@dataclass(slots=True)
class Outbox:
    """What features ask of the loop, which does it in the same turn.

    `ready`: requests whose output waited and can be sent.  `ended`: those that have a `finish`, to be taken out.
    `failed`: requests that cannot go on, and why.  `commands`: to begin.
    """

    ready: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ready or self.ended or self.failed or self.commands)


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What features are made of.  `spans`: of the loop's thread.  `clock`: that of the requests.  `wake` is called,
    from any thread, when there is something for `EngineFeature.poll`.  `offers`: functions of features for others."""

    config: Config
    facts: DeviceFacts
    limits: Limits
    cache: PrefixCache
    scheduler: Scheduler
    control: Control
    executor: Executor
    requests: RunningRequests
    outbox: Outbox
    hooks: Hooks
    spans: Spans
    clock: Callable[[], float]
    wake: Callable[[], None]
    offers: dict[str, Callable[..., Any]] = field(default_factory=dict)


def make_features(context: EngineContext) -> tuple[EngineFeature, ...]:
    """The features of an engine, in the order of the rooms, in which their hooks are called.  Raises StartError."""
    made = (make(context) for _, make in contributions("engine"))
    return tuple(feature for feature in made if feature is not None)
