"""What this dialect keeps between two requests, in each API process."""

from __future__ import annotations

import asyncio
from typing import Any

from tokserve.server.serving import Serving


class SglangState:
    """`serving.state_of(SglangState)` is a server's.

    `version`: that the open weight update will have.  `snapshot`: checksums, for /weights_checker.  `probe`: the
    health check under way.  `model_config`: the model's config.json.  `model_paths`: the names under which directories
    were sent.  `throughput`: when output tokens were counted last, how many there were, and the rate up to then.
    """

    def __init__(self, serving: Serving) -> None:
        self.version: str | None = None
        self.snapshot: dict[str, str] | None = None
        self.probe: asyncio.Task[None] | None = None
        self.model_config: dict[str, Any] | None = None
        self.model_paths: dict[str, str] = {}
        self.throughput: tuple[float, int, float] | None = None
