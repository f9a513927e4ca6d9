"""What every route needs: the engine's client, the options, the served model, and the one way to start a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import State
from starlette.requests import Request

from tokserve.base.errors import EngineDead, RequestError
from tokserve.base.rooms import contributions
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.form_defaults import FormDefaults
from tokserve.client.generation_config import log_what_is_not_followed
from tokserve.config import Config
from tokserve.server.api_process import ApiProcess
from tokserve.server.http.body_reader import BodyReader
from tokserve.server.http.client_names import ClientNames
from tokserve.server.observer import Measure, Observer, ServerObserver
from tokserve.server.request_starter import OBSERVED, RequestStarter
from tokserve.server.served_model import ServedModel
from tokserve.text.tokenizer import Tokenizer

SERVING = ("running", "updating")  # states of the engine in which tokens are made
Trace = Callable[[Mapping[str, str]], Observer]  # an observer of the request with these headers
T = TypeVar("T")


class Serving:
    """The state shared by the routes of one app."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: Config,
        state: State,
        *,
        keep_alive: float = 15.0,
        api_process: ApiProcess | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.llm = llm
        self.config = config
        self.state = state
        self.text = not config.server.tokens_only
        self.api_process = api_process or ApiProcess(0, int(time.time()), None)
        if self.text and self.api_process.index == 0:
            log_what_is_not_followed(config.model)
        self.form_defaults = FormDefaults.of(config.server)
        self.bodies = BodyReader(config.limits, config.server.max_body_mb << 20)
        self.clients = ClientNames(config.server)
        self.model = ServedModel(llm, config)
        self._trace = trace
        self._states: dict[type, Any] = {}  # of rooms
        self._observed_by: list[ServerObserver] = [self.state_of(kind) for _, kind in contributions("observers")]
        self.requests = RequestStarter(
            llm,
            config,
            self.model,
            self.bodies,
            self.clients,
            state,
            observe=self._observers,
            reserve=[partial(reserve, self) for _, reserve in contributions("reserve")],
            keep_alive=keep_alive,
        )

    def state_of(self, kind: Callable[[Serving], T]) -> T:
        """What a room keeps for this server: an object of the class, made of this at the first call."""
        assert isinstance(kind, type)
        if kind not in self._states:
            self._states[kind] = kind(self)
        state: T = self._states[kind]
        return state

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; there is none on a tokens-only server."""
        if self.llm.tokenizer is None:
            raise RequestError("this server has no tokenizer (--tokens-only): send token ids", code="tokens_only")
        return self.llm.tokenizer

    def check_text(self, text: str, field: str, min_bytes: int = 0) -> None:
        """Raise `RequestError` for a text that is too long for the context, without tokenizing it.  Texts of up to
        `min_bytes` bytes pass always."""
        self.tokenizer.check_fits(text, self.llm.ready.max_model_len, field, min_bytes)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise `RequestError` for an id that is in neither the model's vocabulary nor the tokenizer's."""
        limit = max(self.llm.ready.vocab_size, self.tokenizer.vocab_size)
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            index = next(i for i, token in enumerate(ids) if not 0 <= token < limit)
            raise RequestError(f"{field}[{index}] must be a token id from 0 to {limit - 1}", field=f"{field}[{index}]")

    async def probe(self, command: str, seconds: float) -> None:
        """Call a command of the engine that takes no arguments.  Raises EngineDead if it does not answer in time."""
        try:
            async with asyncio.timeout(seconds):
                await self.llm.call(command)
        except TimeoutError:
            raise EngineDead(f"the engine has not answered for {seconds:g} s", code="engine_hung") from None

    def _observers(self, request: Request) -> list[Observer]:
        observers = [observer for server in self._observed_by for observer in server.observe(request)]
        if self._trace is not None:
            observers.append(self._trace(request.headers))
        return observers

    def observe_lag(self, late: float) -> None:
        """The event loop woke a sleeper `late` seconds after its time."""
        for server in self._observed_by:
            server.lag(late)

    async def measures(self) -> list[Measure]:
        """What rooms export as metrics now."""
        return [measure for server in self._observed_by for measure in await server.measures()]

    def log_refusal(self, request: Request, error: RequestError) -> None:
        """Report a request that was refused before `start`, such as one whose body cannot be read."""
        if OBSERVED not in request.scope:
            for server in self._observed_by:
                server.unread(error)
