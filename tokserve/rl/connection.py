"""The HTTP side of a trainer's client: what is sent again, and what an error response becomes.

A call is repeated only where that is safe: when no connection could be made, or the server answered 503 with
Retry-After, and the caller says that it may be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Literal

import httpx

from .errors import ServerError

WAIT = 0.1  # seconds between two attempts to reach a server
OK = 200
UNAVAILABLE = 503
INTERNAL = 500  # of an error within a stream


class Connection:
    """The connections to one server, for one event loop.  Raises httpx.TransportError where a connection fails.
    `take_over`: the first update and the first pause take the place of what a trainer that has gone left open."""

    def __init__(self, url: str, api_key: str | None, connections: int, *, take_over: bool) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits)
        self._taking_over = {"update", "pause"} if take_over else set()

    async def close(self) -> None:
        """Close all connections, which aborts the requests in flight."""
        await self.http.aclose()

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server serves.  Raises TimeoutError, which says what it answered last."""
        last = "nothing was tried"
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        response = await self.http.get("/health")
                        if response.status_code == OK:
                            return
                        last = f"it answered {response.status_code}"
                    except httpx.TransportError as error:
                        last = str(error) or type(error).__name__
                    await asyncio.sleep(WAIT)
        except TimeoutError:
            raise TimeoutError(f"the server at {self.http.base_url} is not ready after {seconds:g} s: {last}") from None

    async def get(self, path: str) -> Any:
        """The reply of a GET, as JSON.  Raises ServerError."""
        return (await self.send("GET", path, again=True)).json()

    async def post(self, path: str, body: dict[str, Any] | None = None, *, again: bool = False) -> Any:
        """The reply of a POST, as JSON.  Raises ServerError."""
        return (await self.send("POST", path, again=again, json=body or {})).json()

    async def open(
        self, what: Literal["update", "pause"], path: str, body: dict[str, Any], *, again: bool = False
    ) -> Any:
        reply = await self.post(path, body | ({"take_over": True} if what in self._taking_over else {}), again=again)
        self._taking_over.discard(what)
        return reply

    async def send(self, method: str, path: str, *, again: bool = False, **kwargs: Any) -> httpx.Response:
        """Send a request; with `again`, repeat it where it cannot have had an effect.  Raises ServerError."""
        reconnect = again  # once
        while True:
            try:
                response = await self.http.request(method, path, **kwargs)
            except httpx.ConnectError:
                if not reconnect:
                    raise
                reconnect = False
                await asyncio.sleep(WAIT)
                continue
            if response.status_code == OK:
                return response
            if not again or (delay := _retry_after(response)) is None:
                raise server_error(response)
            await asyncio.sleep(delay)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The events of a stream, as JSON.  Leaving it early closes the connection, which aborts the request."""
        while True:
            async with self.http.stream("POST", path, json=body) as response:
                if response.status_code == OK:
                    async with aclosing(_events(response)) as events:
                        async for event in events:
                            yield event
                    return
                await response.aread()
            delay = _retry_after(response)
            if delay is None:
                raise server_error(response)
            await asyncio.sleep(delay)


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
    if response.status_code == UNAVAILABLE:
        with suppress(KeyError, ValueError):
            return float(response.headers["retry-after"])
    return None


def server_error(response: httpx.Response) -> ServerError:
    try:
        return _described(response.status_code, response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return ServerError(response.status_code, response.text[:500])


def _described(status: int, error: dict[str, Any]) -> ServerError:
    return ServerError(status, error["message"], error["type"], error["param"], error.get("code"))
