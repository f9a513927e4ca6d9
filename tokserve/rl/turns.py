"""Turns: a limit of the prompts that are with the server, and the prompts that are not, where an abort finds them.

The server knows only requests that were sent to it.  A prompt that waits for a turn, or to be sent again, is aborted
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class PromptAborted(Exception):
    """The prompt was aborted while it was not with the server."""


@dataclass(slots=True, eq=False)
class QueuedPrompt:
    """A prompt that is not with the server.  `may_be_sent`: the answer to come, false for one that is aborted."""

    group_id: str | None
    request_id: str | None
    may_be_sent: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, may_be_sent: bool) -> bool:
        """Take it out of its queue.  Returns false if that has happened before, or its task is being cancelled."""
        if self.may_be_sent.done():
            return False
        self.may_be_sent.set_result(may_be_sent)
        return True


@dataclass(slots=True, frozen=True)
class PromptTurn:
    """The right to send one prompt.  `group_id`, `request_id`: by which it can be aborted."""

    turns: PromptTurns
    group_id: str | None
    request_id: str | None

    async def sleep(self, seconds: float) -> None:
        """Wait before the prompt is sent again, and keep the turn.  Raises PromptAborted."""
        prompt = QueuedPrompt(self.group_id, self.request_id)
        timer = asyncio.get_running_loop().call_later(seconds, prompt.end, True)
        try:
            await self.turns.wait(prompt)
        finally:
            timer.cancel()


class PromptTurns:
    """Lets at most `limit` prompts have a turn at once; the others wait, in order.  For one event loop."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._next: dict[QueuedPrompt, None] = {}  # that wait for a turn, in order
        self._queued: set[QueuedPrompt] = set()  # these, and those that wait to be sent again

    @asynccontextmanager
    async def turn(self, group_id: str | None = None, request_id: str | None = None) -> AsyncIterator[PromptTurn]:
        """Wait for a turn, and give it back after the block.  Raises PromptAborted."""
        if self._free:
            self._free -= 1
        else:
            await self._wait_for_turn(QueuedPrompt(group_id, request_id))
        try:
            yield PromptTurn(self, group_id, request_id)
        finally:
            self._give_back()

    async def _wait_for_turn(self, prompt: QueuedPrompt) -> None:
        self._next[prompt] = None
        try:
            await self.wait(prompt)
        except asyncio.CancelledError:
            if not prompt.may_be_sent.cancelled() and prompt.may_be_sent.result():
                self._give_back()  # the turn came in the same iteration of the event loop
            raise
        finally:
            self._next.pop(prompt, None)

    def _give_back(self) -> None:
        """Pass the turn on to the next prompt."""
        if not any(prompt.end(may_be_sent=True) for prompt in self._next):
            self._free += 1

    async def wait(self, prompt: QueuedPrompt) -> None:
        """Wait until the prompt may be sent.  Raises PromptAborted."""
        self._queued.add(prompt)
        try:
            may_be_sent = await prompt.may_be_sent
        finally:
            self._queued.discard(prompt)
        if not may_be_sent:
            raise PromptAborted

    def abort(self, group_id: str | None = None, request_ids: Collection[str] = ()) -> int:
        """Abort the prompts of a group, or those with these ids, that are not with the server; returns their number."""
        named = [
            prompt
            for prompt in self._queued
            if (group_id is not None and prompt.group_id == group_id) or prompt.request_id in request_ids
        ]
        return sum(prompt.end(may_be_sent=False) for prompt in named)
