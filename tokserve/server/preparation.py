"""`Preparation`: a request from when its body is read until it is sent, which aborts find."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.inputs import bare_id


class Preparation:
    """A request that is sent in the turn of the event loop in which its body was read is not announced: no abort can
    come in between.  Nor is one that is never sent, as a rendering (`is_sent` False)."""

    def __init__(self, llm: AsyncLLM, request_id: str, group_id: str | None, *, is_sent: bool) -> None:
        self.request_id = request_id
        self._llm, self._group_id = llm, group_id
        self._announcement: RequestAnnouncement | None = None
        self._later = asyncio.get_running_loop().call_soon(self._announce) if is_sent else None

    def _announce(self) -> None:
        with suppress(UnicodeEncodeError):  # of ids that the request will be refused for
            self._announcement = self._llm.announce(bare_id(self.request_id), self._group_id)

    def take(self) -> RequestAnnouncement | None:
        """The announcement, if it was made; the caller ends it."""
        if self._later is not None:
            self._later.cancel()
        announcement, self._announcement = self._announcement, None
        return announcement

    def end(self) -> None:
        """It was sent, or will not be."""
        announcement = self.take()
        if announcement is not None:
            announcement.end()
