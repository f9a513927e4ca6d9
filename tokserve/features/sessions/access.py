"""The sessions of a server: the service in this process, or a connection to the process that has it."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, Protocol

from starlette.requests import Request

from tokserve.features.sessions.calls import SessionCall, SessionNotice, SessionService, make_service
from tokserve.features.sessions.host import RemoteSessions
from tokserve.features.sessions.options import SessionOptions
from tokserve.server.http.auth import ACCEPTED
from tokserve.server.serving import Serving

ROOM = "sessions"  # the name of the service that the supervisor hosts
NO_OWNER = ""  # of all sessions of a server without API keys


class Sessions(Protocol):
    """Runs calls on the store."""

    async def call(self, call: SessionCall) -> Any:
        """The result of a call.  Raises RequestError."""

    def notify(self, notice: SessionNotice) -> None:
        """Tell the store, before all later calls and notices."""


class LocalSessions:
    """Runs calls on the service in this process."""

    def __init__(self, service: SessionService) -> None:
        self._service = service

    async def call(self, call: SessionCall) -> Any:
        return await call.run(self._service)

    def notify(self, notice: SessionNotice) -> None:
        notice.apply(self._service)


class LocalService:
    """The service of this process.  Raises StartError."""

    def __init__(self, serving: Serving) -> None:
        self.service = make_service(serving.config)


class ServerSessions:
    """`serving.state_of(ServerSessions)` is a server's, which is made in its event loop."""

    def __init__(self, serving: Serving) -> None:
        self.sessions: Sessions
        address = serving.api_process.services.get(ROOM)
        if address is None:
            service = serving.state_of(LocalService).service
            self._sweep = asyncio.get_running_loop().create_task(service.sweep())
            self.sessions = LocalSessions(service)
        else:
            self.sessions = RemoteSessions(address, serving.api_process.index)


def start(serving: Serving) -> None:
    """Read the sessions of --session-dir, if this process keeps them.  Raises StartError."""
    if serving.config.options_of(SessionOptions).session_dir is not None and ROOM not in serving.api_process.services:
        serving.state_of(LocalService)


def sessions_of(serving: Serving) -> Sessions:
    """The sessions of this server, which has them."""
    return serving.state_of(ServerSessions).sessions


def owner_of(request: Request) -> str:
    """Whose sessions the request may use: those of its API key."""
    accepted: bytes | None = request.scope.get(ACCEPTED)
    return NO_OWNER if accepted is None else accepted.hex()


def cache_key(owner: str, session_id: str) -> str:
    """What the engine knows a session by."""
    return hashlib.blake2b(f"{owner}\0{session_id}".encode(), digest_size=16).hexdigest()
