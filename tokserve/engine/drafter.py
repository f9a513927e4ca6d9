"""Where drafts come from: a `Drafter` proposes the next tokens of a request, and a step verifies them."""

from __future__ import annotations

from typing import Protocol

from tokserve.engine.request import Request


class Drafter(Protocol):
    """Proposes drafts on the host; called by the scheduler while it plans, so it must be quick."""

    def propose(self, request: Request, limit: int) -> list[int]:
        """At most `limit` ids of the vocabulary that may follow `request.tokens`; [] for none."""
