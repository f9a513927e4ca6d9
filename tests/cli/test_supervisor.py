"""API processes that the system does not start."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest

from tests.client.fake_engine import config
from tokserve.client.async_llm import AsyncLLM
from tokserve.features.fleet import supervisor
from tokserve.features.fleet.supervisor import Supervisor


def test_an_api_process_that_cannot_be_started_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(opening: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def scene() -> None:
        with socket.socket() as sock:
            front = Supervisor(config(tokens_only=True), sock)
            assert await front._restart(0) == "API process 0 could not be started: Too many open files"
            await front.end()

    monkeypatch.setattr(AsyncLLM, "engine", ("ipc:///nowhere", os.getpid()))
    monkeypatch.setattr(supervisor, "ApiChildProcess", exhausted)
    asyncio.run(scene())
