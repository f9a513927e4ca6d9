"""What this dialect keeps between two requests, in each API process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SglangState:
    """`version`: that the open weight update will have.  `snapshot`: checksums, for /weights_checker.  `probe`: the
    health check under way.  `model_config`: the model's config.json.  `model_paths`: the names
    under which directories were sent.  `throughput`: when output tokens were counted
    last, how many there were, and the rate up to then."""

    version: str | None = None
    snapshot: dict[str, str] | None = None
    probe: asyncio.Task[None] | None = None
    model_config: dict[str, Any] | None = None
    model_paths: dict[str, str] = field(default_factory=dict)
    throughput: tuple[float, int, float] | None = None
