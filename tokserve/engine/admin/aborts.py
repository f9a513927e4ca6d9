"""Aborts by the client's ids: of requests in flight, being admitted, and announced."""

from __future__ import annotations

from collections.abc import Callable

from tokserve.engine.admin.command import Command, command
from tokserve.engine.admission import Admission
from tokserve.engine.announcements import Announcements
from tokserve.engine.hooks import Hooks
from tokserve.engine.registry import Registry
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler


class Aborts:
    """The abort commands.  `end` ends requests in flight, for a reason."""

    def __init__(
        self,
        registry: Registry,
        admission: Admission,
        announcements: Announcements,
        scheduler: Scheduler,
        hooks: Hooks,
        end: Callable[[list[Request], str], None],
    ) -> None:
        self._registry, self._admission, self._announcements = registry, admission, announcements
        self._scheduler, self._hooks = scheduler, hooks
        self._end = end

    @command("abort")
    def by_id(self, keys: list[str], reason: str = "abort_user") -> Command:
        """Abort by the client's ids.  The reply, {id: "aborted" | "finished" | "not_found"}, comes when all slots and
        blocks of ended requests are free: a second abort is not answered before that either."""
        result = dict.fromkeys(keys, "not_found")
        aborted_before = self._announcements.aborted_ids()
        coming = self._announcements.abort(result, reason) | self._admission.abort(result, reason)
        aborted: list[Request] = []
        for request_id in result:
            requests = self._registry.requests(request_id)
            aborted += requests
            if requests or request_id in coming:
                result[request_id] = "aborted"
            elif request_id in aborted_before or any(
                one.has_ended(request_id) for one in (self._registry, self._admission)
            ):
                result[request_id] = "finished"
        self._end(aborted, reason)
        for drop in self._hooks.drop:
            drop([f"{request_id}#0" for request_id in result])
        unreleased = self._scheduler.unreleased()
        yield lambda: all(request.released for request in unreleased)
        return result

    @command("abort_group")
    def group(self, group: str, reason: str = "abort_user") -> Command:
        return (yield from self.by_id(self._ids(group), reason))

    @command("abort_prefix")
    def prefix(self, prefix: str, reason: str = "abort_user") -> Command:
        keys = [request_id for request_id in self._ids() if request_id.startswith(prefix)]
        return (yield from self.by_id(keys, reason))

    @command("abort_all")
    def all(self, reason: str = "abort_user") -> Command:
        return (yield from self.by_id(self._ids(), reason))

    def _ids(self, group: str | None = None) -> list[str]:
        return [
            request_id
            for source in (self._registry, self._admission, self._announcements)
            for request_id in source.request_ids(group)
        ]
