"""Which adapter has which of the device's slots, and the command that brings back those that requests wait for.

An adapter that has no slot keeps its name and its directory: when a request names it, it is read again, in the place of
the one that has been unused for longest.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tokserve.base.errors import Conflict, RequestError
from tokserve.engine.admin.command import STEP_BOUNDARY, Command, RunningRequests, Wait
from tokserve.engine.features import Outbox
from tokserve.executor.base import Executor
from tokserve.features.lora.adapter import Adapter


class AdapterSlots:
    """`count` slots.  `evicts`: an adapter may lose its slot to another one.  `reading`: one adapter is read at a time.
    `outbox`: gets the command that brings back adapters, and the requests whose adapter cannot be."""

    def __init__(
        self, count: int, requests: RunningRequests, executor: Executor, outbox: Outbox, *, evicts: bool
    ) -> None:
        self.reading = False
        self._requests = requests
        self._executor = executor
        self._outbox = outbox
        self._evicts = evicts
        self._free = list(range(count - 1, -1, -1))  # a stack
        self._holders: list[Adapter] = []
        self._wanted: list[Adapter] = []  # by requests that wait, in order
        self._is_bringing = False
        self._uses = 0

    def touch(self, adapter: Adapter) -> None:
        """It was loaded or named."""
        self._uses += 1
        adapter.last_use = self._uses

    def use(self, adapter: Adapter) -> None:
        """A request names it."""
        self.touch(adapter)
        if adapter.slot < 0 and adapter not in self._wanted:
            self._wanted.append(adapter)

    def place(self, adapter: Adapter, *, evict: bool = True) -> Adapter | None:
        """Put what was read last into the adapter's slot, at a step boundary; one that has none gets a free one, or
        with `evict` one that is not in use.  Returns the adapter that lost its slot for that."""
        evicted = None
        if adapter.slot < 0 and (self._free or evict):
            evicted = self._take_slot(adapter)
        if adapter.slot >= 0:
            self._executor.call("place_adapter", {"slot": adapter.slot})
        return evicted

    def release(self, adapter: Adapter) -> None:
        """It needs no slot any more."""
        if adapter.slot >= 0:
            self._holders.remove(adapter)
            self._free.append(adapter.slot)
            adapter.slot = -1

    @property
    def is_full(self) -> bool:
        """Whether no adapter more can have a slot, as none may lose its own."""
        return not self._free and not self._evicts

    @property
    def busy(self) -> bool:
        """Whether requests wait for their adapter."""
        return bool(self._wanted)

    def poll(self) -> None:
        """Begin the command that brings back the adapters that requests wait for, unless it runs already."""
        if self._wanted and not self._is_bringing:
            self._is_bringing = True
            self._outbox.commands.append(self._bring_back())

    def _bring_back(self) -> Command:
        try:
            while self._wanted:
                adapter = self._wanted[0]
                try:
                    yield from self._bring(adapter)
                except RequestError as error:
                    reason = f"the adapter {adapter.name!r} could not be loaded again: {error.message}"
                    late = [request for request in self._requests.live if request.variant is adapter]
                    self._outbox.failed += [(request, reason) for request in late]
                self._wanted.remove(adapter)
        finally:
            self._is_bringing = False
        return {}

    def _bring(self, adapter: Adapter) -> Generator[Wait, Any, None]:
        """Read an adapter again and place it, unless no request waits for it any more."""
        while adapter.slot < 0 and self._has_requests(adapter):
            yield lambda: not self.reading and (self._has_room() or not self._has_requests(adapter))
            if adapter.slot >= 0 or not self._has_room():
                continue
            self.reading = True
            try:
                read = self._executor.background("read_adapter", adapter.source)
                yield read
                if (read.result() or "") != adapter.digest:
                    raise Conflict(f"the files in {adapter.path} have changed since it was loaded; load it again")
                yield STEP_BOUNDARY
                self.place(adapter)
            finally:
                self.reading = False

    def _has_requests(self, adapter: Adapter) -> bool:
        return any(request.variant is adapter for request in self._requests.live)

    def _has_room(self) -> bool:
        """Whether a slot can be had now; if not, one is on its way: an adapter's requests that run may end, and no
        others of it are admitted."""
        if self._free or self._victim() is not None:
            return True
        served = [adapter for adapter in self._holders if adapter.has_served]
        if self._evicts and served and not any(adapter.is_leaving for adapter in served):
            min(served, key=lambda adapter: adapter.last_use).is_leaving = True
        return False

    def _victim(self) -> Adapter | None:
        """The adapter that loses its slot next: without requests, or with some that wait, if it has served any since it
        got the slot; and of these the one that has been unused for longest."""
        if not self._evicts:
            return None
        live = list(self._requests.live)
        running = {request.variant for request in live if request.slot >= 0}
        waiting = {request.variant for request in live}
        idle = [one for one in self._holders if one not in running and (one.has_served or one not in waiting)]
        return min(idle, key=lambda adapter: (adapter in waiting, adapter.last_use), default=None)

    def _take_slot(self, adapter: Adapter) -> Adapter | None:
        evicted = None
        if not self._free:
            evicted = self._victim()
            if evicted is None:
                return None
            self.release(evicted)
            evicted.is_leaving = False
            if self._has_requests(evicted) and evicted not in self._wanted:
                self._wanted.append(evicted)
        adapter.slot = self._free.pop()
        adapter.has_served = adapter.is_leaving = False
        self._holders.append(adapter)
        return evicted
