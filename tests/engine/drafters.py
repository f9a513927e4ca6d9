"""Drafters for the scripted model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from tests.engine.scripted import ScriptedExecutor
from tests.engine.solo import VOCAB, chain, draw, prefixes_of
from tokserve.config import SpeculationPlan
from tokserve.engine.core import EngineCore
from tokserve.engine.request import Request
from tokserve.features.speculation.drafter import Drafter, TextDrafter
from tokserve.features.speculation.engine import DraftReports, Speculation
from tokserve.features.speculation.token_index import TokenIndex
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DraftPasses

D = TypeVar("D", bound=Drafter)


def draft_with(core: EngineCore, drafter: D) -> D:
    """Have an engine propose drafts by this drafter from here on."""
    context = cast(Any, SimpleNamespace(cache=core.cache, scheduler=core.scheduler, hooks=core._hooks))
    drafts = Speculation(context, drafter)
    core.features = tuple(drafts if isinstance(one, DraftReports) else one for one in core.features)
    core._hooks.collect(core.features)
    return drafter


class OneByOne:
    """A drafter that looks at one request at a time."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[list[int]]:
        return [self.propose_one(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def propose_one(self, request: Request, limit: int) -> list[int]:
        raise NotImplementedError

    def source(self, request: Request) -> str:
        return ""

    def expect(self, request: Request, prediction: TokenIndex) -> None:
        pass

    def on_step(self, rows: int, num_tokens: int, seconds: float) -> None:
        pass

    def on_drawn(self, draft_passes: DraftPasses, rows: int) -> None:
        pass

    def on_verified(self, request: Request, proposed: int, accepted: int) -> None:
        pass

    def on_end(self, request: Request) -> None:
        pass


def text_drafter(method: str = "suffix") -> TextDrafter:
    """The one that serves, with little memory."""
    return TextDrafter(SpeculationPlan(method, 8, 1 << 14), VOCAB)


class RandomDrafter(OneByOne):
    """Proposes what would be sampled, something else, or the one and then the other."""

    def __init__(self, executor: ScriptedExecutor, seed: int, right: float = 0.5, longest: int = 5) -> None:
        self._executor = executor
        self._rng = random.Random(seed)
        self._right = right
        self._longest = longest
        self.proposed = 0

    def propose_one(self, request: Request, limit: int) -> list[int]:
        if request.num_in_flight:
            return []
        count = min(self._rng.randint(0, self._longest), limit)
        right = count if self._rng.random() < self._right else self._rng.randint(0, count)
        drafts = self._continuation(request, right)
        drafts += [self._rng.randrange(VOCAB) for _ in range(count - len(drafts))]
        self.proposed += len(drafts)
        return drafts

    def _continuation(self, request: Request, count: int) -> list[int]:
        assert isinstance(request.task, SamplingParams)
        weights = str(self._executor.weights)
        if request.variant is not None:
            weights += f"+{self._executor.adapters[request.variant.slot]}"
        tokens = request.tokens.tolist()
        prefix = prefixes_of(tokens, request.features)[-1]
        for _ in range(count):
            banned = request.stop_ids if len(tokens) - request.prompt_len < request.task.min_tokens else ()
            tokens.append(draw(prefix, request.seed, len(tokens), banned, weights=weights))
            prefix = chain(prefix, tokens[-1])
        return tokens[len(request.tokens) :]
