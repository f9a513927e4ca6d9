"""KV besides the KV cache, as the engine's loop sees it: events, the store that keeps blocks, and transfers.

Options name them; an engine has a feature with as many of them as are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokserve.config import KVEventsPlan, KVStorePlan
from tokserve.engine.admin.command import command
from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.request import Request
from tokserve.features.kv.event_publisher import EventPublisher
from tokserve.features.kv.events import EventLog, spec_kind
from tokserve.features.kv.identity import IdentityWatch
from tokserve.features.kv.store import KVStore
from tokserve.features.kv.transfers import Transfers


def make(context: EngineContext) -> EngineFeature:
    """What the options name.  Waits until the device has computed the digest of the weights, if blocks are kept.
    Raises StartError."""
    config = context.config.kv
    events, store, transfer = config.events(), config.store(), config.transfer()
    if store is None:
        return NoEvents() if events is None else KVEvents(context, events)
    return KeptKV(context, events, store) if transfer is None else TransferredKV(context, events, store)


class NoEvents(EngineFeature):
    """The command of an engine that publishes nothing."""

    @command("kv_event_sources")
    def sources(self) -> list[dict[str, Any]]:
        return []


class KVEvents(EngineFeature):
    """Tells subscribers what changes in the prefix cache."""

    def __init__(self, context: EngineContext, plan: KVEventsPlan | None) -> None:
        """`plan`: None to publish nothing."""
        self.log: EventLog | None = None
        self.publisher: EventPublisher | None = None
        if plan is not None:
            self.publisher = EventPublisher(plan)
            self.log = EventLog(context.cache.block_size, spec_kind(context.facts.layout))
            context.cache.events = self.log

    @command("kv_event_sources")
    def sources(self) -> list[dict[str, Any]]:
        return [] if self.publisher is None else [self.publisher.sources]

    def poll(self) -> None:
        """Publish what the last turn, and the messages since, have changed."""
        if self.publisher is not None and self.log is not None and (events := self.log.take()):
            self.publisher.publish(events)

    def close(self) -> None:
        KVEvents.poll(self)
        if self.publisher is not None:
            self.publisher.close()


class KeptKV(KVEvents):
    """The KV store, and the watch that tells it which weights serve."""

    def __init__(self, context: EngineContext, events: KVEventsPlan | None, plan: KVStorePlan) -> None:
        super().__init__(context, events)
        facts = context.facts.facts
        self.store = KVStore(
            context.cache,
            context.executor.copy,
            self.log,
            num_slots=facts["kv_store_slots"],
            block_bytes=facts["kv_block_bytes"],
            has_files=plan.directory is not None,
            tokens_per_second=context.scheduler.tokens_per_second,
            clock=context.clock,
            wake=context.wake,
        )
        executor = context.executor
        self.watch = IdentityWatch(
            self.store, context.control.weights, executor.background, executor.copy, context.wake
        )
        self.watch.start()

    def poll(self) -> None:
        super().poll()
        self.store.poll()
        self.watch.poll()

    def is_busy(self) -> bool:
        return self.store.busy

    def holds_blocks(self) -> bool:
        return self.store.loading

    def seconds_left(self) -> float | None:
        return self.store.seconds_left()

    def stats(self) -> dict[str, Any]:
        return {"kv_store": self.store.stats()}

    def clear(self) -> None:
        """Drop all blocks of the store, in memory and in files."""
        self.store.clear()


class TransferredKV(KeptKV):
    """The KV store, and transfers of its blocks between servers."""

    def __init__(self, context: EngineContext, events: KVEventsPlan | None, plan: KVStorePlan) -> None:
        super().__init__(context, events, plan)
        transfer = context.config.kv.transfer()
        assert transfer is not None
        self._outbox = context.outbox
        self._transfers = Transfers(
            transfer,
            context.cache,
            self.store,
            self.watch,
            context.executor.copy,
            block_bytes=context.facts.facts["kv_block_bytes"],
            clock=context.clock,
            wake=context.wake,
        )

    def accept(self, request: Request) -> None:
        self._transfers.expect(request)

    def hold(self, requests: list[Request]) -> list[Request]:
        return self._transfers.offer(requests)

    def on_end(self, request: Request) -> None:
        self._transfers.on_end(request)

    def drop(self, request_ids: Sequence[str]) -> None:
        self._transfers.drop(request_ids)

    def poll(self) -> None:
        super().poll()
        self._outbox.ready += self._transfers.poll()
        self._outbox.failed += self._transfers.failed
        self._transfers.failed = []

    def is_busy(self) -> bool:
        return super().is_busy() or self._transfers.busy

    def holds_blocks(self) -> bool:
        return super().holds_blocks() or self._transfers.holds_blocks

    def seconds_left(self) -> float | None:
        ends = (super().seconds_left(), self._transfers.seconds_left())
        return min((seconds for seconds in ends if seconds is not None), default=None)

    def close(self) -> None:
        super().close()
        self._transfers.close()
