"""Aborts by the client's ids: of requests in flight, being admitted, and announced."""

from __future__ import annotations

from tokserve.engine.admin.command import Command, command
from tokserve.engine.hooks import Hooks
from tokserve.engine.intake import Intake
from tokserve.engine.scheduler import Scheduler


class Aborts:
    """The abort commands."""

    def __init__(self, intake: Intake, scheduler: Scheduler, hooks: Hooks) -> None:
        self._intake, self._scheduler, self._hooks = intake, scheduler, hooks

    @command("abort")
    def by_id(self, keys: list[str], reason: str = "abort_user") -> Command:
        """Abort by the client's ids.  The reply, {id: "aborted" | "finished" | "not_found"}, comes when all slots and
        blocks of ended requests are free: a second abort is not answered before that either."""
        result = self._intake.abort_ids(keys, reason)
        for drop in self._hooks.drop:
            drop([f"{request_id}#0" for request_id in result])
        unreleased = self._scheduler.unreleased()
        yield lambda: all(request.released for request in unreleased)
        return result

    @command("abort_group")
    def group(self, group: str, reason: str = "abort_user") -> Command:
        return (yield from self.by_id(self._intake.request_ids(group), reason))

    @command("abort_prefix")
    def prefix(self, prefix: str, reason: str = "abort_user") -> Command:
        keys = [request_id for request_id in self._intake.request_ids() if request_id.startswith(prefix)]
        return (yield from self.by_id(keys, reason))

    @command("abort_all")
    def all(self, reason: str = "abort_user") -> Command:
        return (yield from self.by_id(self._intake.request_ids(), reason))
