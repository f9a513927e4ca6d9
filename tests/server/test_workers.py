"""Work in threads: memory freed by large work is returned to the system, once for several pieces of work."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tokserve.server.http import workers


@pytest.mark.parametrize(("size", "returns"), [(workers.TRIMMED, 1), (workers.TRIMMED - 1, 0)])
def test_free_memory_goes_back_once_after_large_work(size: int, returns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[str] = []
    monkeypatch.setattr(workers, "_trims", set())  # not one that the loop of another test has left
    monkeypatch.setattr(workers, "TRIM_SECONDS", 600.0)  # none ends before it is made to
    monkeypatch.setattr(workers, "give_back", lambda: returned.append(threading.current_thread().name))

    async def scene() -> None:
        assert await asyncio.gather(*(workers.run(size, lambda i=i: i * i) for i in range(3))) == [0, 1, 4]
        timers = list(workers._trims)
        assert len(timers) == returns
        for timer in timers:
            timer.cancel()
            workers._trim()
        while len(returned) < returns:
            await asyncio.sleep(0.01)

    asyncio.run(scene())
    assert len(returned) == returns and all(name.startswith("tokserve-work") for name in returned)


def test_timers_that_fire_when_the_threads_have_stopped_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for pool in ("_medium", "_large"):
        monkeypatch.setattr(workers, pool, ThreadPoolExecutor(1))
    done: list[int] = []
    workers.stop()
    workers._trim()
    workers.in_background(lambda: done.append(1))
    assert done == []
