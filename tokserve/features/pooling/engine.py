"""Pairs of texts as the engine's loop sees them: the device is told where the second text begins."""

from __future__ import annotations

from typing import Any

from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.request import Request
from tokserve.protocol.messages import EngineRequest


class PairedTexts(EngineFeature):
    """Remembers where the second text of a prompt begins, of prompts that have one."""

    def __init__(self, context: EngineContext) -> None:
        self._seconds: dict[Request, int] = {}

    def attach(self, request: Request, spec: EngineRequest) -> None:
        if spec.prompt.second >= 0:
            self._seconds[request] = spec.prompt.second

    def on_slot(self, request: Request, hits: int) -> dict[str, Any]:
        return {"second": self._seconds[request]} if request in self._seconds else {}

    def on_end(self, request: Request) -> None:
        self._seconds.pop(request, None)
