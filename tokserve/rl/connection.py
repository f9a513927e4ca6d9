"""The HTTP side of a trainer's client: what is sent again, and what an error response becomes.

Rollouts and control calls have pools of their own, so that a pause, its extension and its end never wait for rollouts.
A call is repeated only where that is safe: when no connection could be made, or the server refused it with Retry-After
(429, 503), and the caller says that it may be.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Literal

import httpx

from .errors import ServerError
from .plain import plain
from .pools import NOT_SENT, async_pool, authorization
from .turns import PromptTurn

WAIT = 0.1  # seconds between two attempts to reach a server
WARN_EVERY = 30.0  # seconds between two warnings that the server refuses what is sent again
OK = 200
BUSY = (429, 503)  # statuses after which the same request may be sent again
CONFLICT = 409
INTERNAL = 500  # of an error within a stream
Sleep = Callable[[float], Awaitable[None]]
log = logging.getLogger(__name__)


class Connection:
    """The connections to one server, for one event loop.  Raises httpx.TransportError where a connection fails.

    `rollouts`: a pool of at most `connections`, for what takes as long as its tokens, where nothing waits, because its
    callers take turns; `control`: one without a limit, for all else.  `take_over`: the first update and the first pause
    take the place of what a trainer that has gone left open.  `patience`: seconds for which a request is sent again
    that the server refuses with Retry-After.
    """

    def __init__(
        self, url: str, api_key: str | None, connections: int, *, take_over: bool, patience: float, trust_env: bool
    ) -> None:
        headers = authorization(api_key)
        self.rollouts = async_pool(url, headers, connections=connections, trust_env=trust_env)
        self.control = async_pool(url, headers, connections=None, trust_env=trust_env)
        self._patience = patience
        self._warned = -WARN_EVERY
        self._taking_over = {"update", "pause"} if take_over else set()

    async def close(self) -> None:
        """Close all connections, which aborts the requests in flight."""
        await self.rollouts.aclose()
        await self.control.aclose()

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server serves.  Raises TimeoutError, which says what it answered last."""
        last = "nothing was tried"
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        response = await self.control.get("/health")
                        if response.status_code == OK:
                            return
                        last = f"it answered {response.status_code}"
                    except httpx.TransportError as error:
                        last = str(error) or type(error).__name__
                    await asyncio.sleep(WAIT)
        except TimeoutError:
            raise TimeoutError(
                f"the server at {self.control.base_url} is not ready after {seconds:g} s: {last}"
            ) from None

    async def get(self, path: str) -> Any:
        """The reply of a GET, as JSON.  Raises ServerError."""
        return (await self.send("GET", path, again=True)).json()

    async def post(self, path: str, body: dict[str, Any] | None = None, *, again: bool = False) -> Any:
        """The reply of a POST, as JSON.  Raises ServerError, TypeError for a body that cannot be sent."""
        return (await self.send("POST", path, again=again, json=plain(body or {}))).json()

    async def open(
        self, what: Literal["update", "pause"], path: str, body: dict[str, Any], *, again: bool = False
    ) -> Any:
        reply = await self.post(path, body | ({"take_over": True} if what in self._taking_over else {}), again=again)
        self._taking_over.discard(what)
        return reply

    async def rollout(self, path: str, turn: PromptTurn, **kwargs: Any) -> httpx.Response:
        """POST what generates.  Raises ServerError, PromptAborted."""
        return await self._sent(self.rollouts, "POST", path, again=True, sleep=turn.sleep, **kwargs)

    async def send(self, method: str, path: str, *, again: bool = False, **kwargs: Any) -> httpx.Response:
        """Send a control call; with `again`, repeat it where it cannot have had an effect.  Raises ServerError."""
        return await self._sent(self.control, method, path, again=again, **kwargs)

    async def _sent(
        self,
        pool: httpx.AsyncClient,
        method: str,
        path: str,
        *,
        again: bool,
        sleep: Sleep = asyncio.sleep,
        **kwargs: Any,
    ) -> httpx.Response:
        reconnect, end = again, time.monotonic() + self._patience  # connect twice at most
        while True:
            try:
                response = await pool.request(method, path, **kwargs)
            except NOT_SENT:
                if not reconnect:
                    raise
                reconnect = False
                await sleep(WAIT)
                continue
            if response.status_code == OK:
                return response
            if not again:
                raise server_error(response)
            await self._wait_to_repeat(response, end, sleep)

    async def events(
        self, path: str, body: dict[str, Any], turn: PromptTurn, *, id_was_left: bool = False
    ) -> AsyncGenerator[Any, None]:
        """The events of a stream, as JSON.  Leaving it early closes the connection, which aborts the request.
        `id_was_left`: a stream of this request id was left, and may not have ended yet.  Raises ServerError,
        PromptAborted."""
        end = time.monotonic() + self._patience
        content = plain(body)
        while True:
            async with self.rollouts.stream("POST", path, json=content) as response:
                if response.status_code == OK:
                    async with aclosing(_events(response)) as events:
                        async for event in events:
                            yield event
                    return
                await response.aread()
            await self._wait_to_repeat(response, end, turn.sleep, id_was_left=id_was_left)

    async def _wait_to_repeat(
        self, response: httpx.Response, end: float, sleep: Sleep, *, id_was_left: bool = False
    ) -> None:
        """Wait until the request may be sent again.  Raises ServerError if it may not, or not before `end`."""
        error, now = server_error(response), time.monotonic()
        delay = _retry_after(response)
        if id_was_left and error.status == CONFLICT and error.code == "duplicate_id":
            delay = WAIT
        if delay is None or now + delay > end:
            raise error
        if error.status in BUSY and now >= self._warned + WARN_EVERY:
            self._warned = now
            log.warning("the server refuses requests, which are sent again for up to %g s: %s", self._patience, error)
        await sleep(delay)


async def _events(response: httpx.Response) -> AsyncGenerator[Any, None]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise _described(INTERNAL, event["error"])
            yield event
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds after which the same request may be sent again."""
    if response.status_code in BUSY:
        with suppress(KeyError, ValueError):
            seconds = float(response.headers["retry-after"])
            return seconds if 0.0 <= seconds < math.inf else None
    return None


def server_error(response: httpx.Response) -> ServerError:
    try:
        return _described(response.status_code, response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return ServerError(response.status_code, response.text[:500])


def _described(status: int, error: dict[str, Any]) -> ServerError:
    return ServerError(status, error["message"], error["type"], error["param"], error.get("code"))
