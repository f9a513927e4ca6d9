"""Hidden states as the engine's loop sees them: what is refused, and which positions must be computed."""

from __future__ import annotations

from typing import NoReturn

from tokserve.base.errors import RequestError, invalid
from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.request import Request
from tokserve.features.hidden_states.columns import NAME
from tokserve.features.hidden_states.options import FLAG, HiddenStateOptions
from tokserve.protocol.messages import EngineRequest
from tokserve.protocol.params import HiddenStateChoice, SamplingParams


def make(context: EngineContext) -> EngineFeature:
    return HiddenStateRequests(context)


class HiddenStateRequests(EngineFeature):
    """Checks requests with hidden states, whose chosen positions are computed though they be cached."""

    def __init__(self, context: EngineContext) -> None:
        facts = context.facts.facts
        self._limit = context.config.options_of(HiddenStateOptions).max_hidden_state_bytes
        self._num_layers = int(facts.get("hidden_layers", 0))
        self._state_bytes = int(facts.get("hidden_state_bytes", 0))
        self._context = context.limits.context

    def attach(self, request: Request, spec: EngineRequest) -> None:
        task = spec.task
        chosen = task.hidden_states if isinstance(task, SamplingParams) else None
        if chosen is None:
            return
        self._check(chosen)
        if spec.options.kv_transfer_params is not None:
            raise invalid("kv_transfer_params", "is not taken with hidden_states, whose positions are computed here")
        request.least_computed = chosen.positions[0]

    def _check(self, chosen: HiddenStateChoice) -> None:
        if not self._limit:
            _refuse(NAME, f"are not returned by this server: start it with {FLAG}")
        if chosen.layers[-1] > self._num_layers:
            raise invalid(f"{NAME}.layers", f"must be at most {self._num_layers}, got {chosen.layers[-1]}")
        if chosen.positions[-1] >= self._context:
            raise invalid(f"{NAME}.positions", f"must be below {self._context}, got {chosen.positions[-1]}")
        size = len(chosen.positions) * len(chosen.layers) * self._state_bytes
        if size > self._limit:
            _refuse(NAME, f"would have {size} bytes, and may have {self._limit} ({FLAG})")


def _refuse(field: str, words: str) -> NoReturn:
    raise RequestError(f"{field} {words}", field=field, code="unsupported")
