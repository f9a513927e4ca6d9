"""The watchdog of the event loop: it measures a stall and names its cause, on the loop or in a thread."""

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from tokserve.server.http import workers
from tokserve.server.http.loop_monitor import LoopMonitor


def watched(work: Coroutine[Any, Any, None]) -> list[float]:
    """How late each heartbeat was while `work` ran."""
    late: list[float] = []

    async def scene() -> None:
        watching = asyncio.create_task(LoopMonitor(late.append, 0.01).watch())
        await asyncio.sleep(0.03)
        await asyncio.create_task(work, name="POST /somewhere")
        while not late or max(late) < 0.3:
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(scene())
    return late


def test_the_route_of_the_running_task_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def block() -> None:
        time.sleep(0.5)

    with caplog.at_level(logging.WARNING, "tokserve"):
        assert max(watched(block())) > 0.3
    assert "stalled" in caplog.text and "POST /somewhere" in caplog.text


def test_the_route_of_a_thread_that_holds_the_lock_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The loop's thread waits here as it would for the interpreter's lock."""
    begun = threading.Event()

    async def block() -> None:
        working = asyncio.create_task(workers.run(1, lambda: begun.wait(5)), name="POST /elsewhere")
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        await asyncio.sleep(0)
        begun.set()
        await working

    with caplog.at_level(logging.WARNING, "tokserve"):
        watched(block())
    assert "POST /elsewhere" in caplog.text


def test_quiet_loops_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        watching = asyncio.create_task(LoopMonitor(lambda late: None, 0.01).watch())
        await asyncio.sleep(0.1)
        watching.cancel()

    with caplog.at_level(logging.WARNING, "tokserve"):
        asyncio.run(scene())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "0.0" in record.message]


def test_finished_work_is_forgotten_once_it_cannot_have_stalled_the_loop() -> None:
    async def scene() -> None:
        watching = asyncio.create_task(LoopMonitor(lambda late: None, 0.01).watch())
        start = time.monotonic()
        await asyncio.create_task(workers.run(1, lambda: None), name="POST /forgotten")
        while "POST /forgotten" in workers.WORK_LOG.during(start, time.monotonic()):
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(asyncio.wait_for(scene(), 30))
