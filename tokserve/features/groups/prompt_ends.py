"""The end of a prompt that does not fill its block, computed once for all running requests with the same prompt.

Full blocks are shared by reference.  The block after them holds the prompt's end and then each request's own tokens, so
a request that enters gets a copy of it from one that runs: what is left to compute is the prompt's last token, for its
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.kv_cache.block_table import BlockTable, features_key
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.plan_builder import InFlightStep
from tokserve.engine.request import Request, State
from tokserve.protocol.plan import StepResult

Key = tuple[bytes, bytes]  # the hash of the full blocks, and the content after them


def make(context: EngineContext) -> EngineFeature | None:
    """None without a prefix cache, and for recurrent states, which have no copy of a position within a block."""
    states, cache = context.facts.layout.states, context.cache
    return PromptEnds(cache) if cache.enabled and states is None else None


class PromptEnds(EngineFeature):
    """Which running requests have the end of which prompt.  `copied`: blocks so far."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._computing: set[Request] = set()
        self._holders: dict[Key, dict[Request, None]] = {}  # in the order in which they were ready
        self._keys: dict[Request, Key] = {}  # of holders
        self._held: list[BlockTable] = []  # blocks that are copied in the step being planned
        self._held_by_step: dict[int, list[BlockTable]] = {}
        self.copied = 0

    def reuse(self, request: Request, hits: int) -> int:
        size = self._cache.block_size
        known = min(request.prompt_len, request.reusable)
        if not hits or hits != request.prompt_len // size or known <= hits * size or request.joint:
            return 0
        return known if self._holder(request) is not None else 0

    def on_slot(self, request: Request, hits: int) -> dict[str, Any]:
        self._forget(request)
        if request.prompt_len >= self._cache.block_size and request.prompt_len % self._cache.block_size:
            self._computing.add(request)
        if request.num_computed <= hits * self._cache.block_size:
            return {}
        holder = self._holder(request)
        assert holder is not None
        source = holder.table.blocks[hits]
        self._held.append(self._cache.hold_block(source))
        self.copied += 1
        return {"copied_block": (source, request.table.blocks[hits])}

    def on_planned(self, step: InFlightStep) -> None:
        if self._held:
            self._held_by_step[step.step], self._held = self._held, []

    def on_result(self, step: InFlightStep, result: StepResult, now: float) -> None:
        for held in self._held_by_step.pop(step.step, ()):
            self._cache.free(held)
        if self._computing:
            for request in list(self._ready()):
                self._computing.discard(request)
                if request.state is State.RUNNING and self._cache.is_current(request.table):
                    key = self._keys[request] = self._key(request)
                    self._holders.setdefault(key, {})[request] = None

    def on_end(self, request: Request) -> None:
        self._forget(request)

    def holds_blocks(self) -> bool:
        return bool(self._held_by_step)

    def _ready(self) -> Iterator[Request]:
        """Requests whose prompt is computed, or that do not run any more."""
        return (
            request
            for request in self._computing
            if request.state is not State.RUNNING or request.num_settled >= request.prompt_len
        )

    def _forget(self, request: Request) -> None:
        self._computing.discard(request)
        key = self._keys.pop(request, None)
        if key is not None:
            holders = self._holders[key]
            del holders[request]
            if not holders:
                del self._holders[key]

    def _holder(self, request: Request) -> Request | None:
        """A running request that has computed the prompt's end."""
        for holder in self._holders.get(self._key(request), ()):
            if holder.state is State.RUNNING and holder.num_settled >= holder.prompt_len:
                return holder
        return None

    def _key(self, request: Request) -> Key:
        full = request.prompt_len // self._cache.block_size
        start, end = full * self._cache.block_size, request.prompt_len
        content = request.tokens[start:end].tobytes() + features_key(request.table.features, start, end)
        return request.table.hashes[full - 1], content
