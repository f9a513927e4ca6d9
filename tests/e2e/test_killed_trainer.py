"""A trainer is killed at several points: its successor continues without intervention."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.killed_trainer import POINTS
from tests.e2e.server import Server
from tests.waiting import PATIENCE
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import ServerError, TokserveClient

SCRIPT = Path(__file__).with_name("killed_trainer.py")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("demo", "--dtype", "float32", "--tokens-only", "--control-lease", "3") as server:
        yield server


def state(server: Server) -> str:
    """The state that the server reports."""
    name: str = server.get("/inference/v1/state").json()["state"]
    return name


def kill_at(server: Server, point: str) -> None:
    """Run a trainer, and kill it when it is there."""
    command = [sys.executable, str(SCRIPT), server.url, point]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "reached\n"
        trainer.kill()


class Watcher:
    """Requests all the while: what was computed with the weights of a version is the same bits every time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._results: dict[str, set[tuple[float, ...]]] = {}  # logprobs of the same prompt, by version

    async def watch(self) -> None:
        """Until it is cancelled."""
        async with TokserveClient(self._server.url) as client:
            while True:
                (rollout,) = await client.generate([[1, 2, 3]], max_tokens=5, ignore_eos=True, temperature=0)
                versions = {version for version, _, _ in rollout.weight_versions}
                if len(versions) == 1 and rollout.finish_reason == "length":  # a pause of mode abort cuts rollouts
                    self._results.setdefault(versions.pop(), set()).add(tuple(rollout.logprobs.tolist()))

    def check(self, *expected: str) -> None:
        """Each version that served gave one result, and these were among them."""
        assert set(expected) <= set(self._results)
        assert all(len(results) == 1 for results in self._results.values()), self._results


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_its_successor_pushes_and_generates(server: Server, point: str) -> None:
    weights = load_file(DEMO_DIR / "model.safetensors")
    watcher = Watcher(server)

    async def goes_on() -> None:
        watching = asyncio.create_task(watcher.watch())
        await asyncio.to_thread(kill_at, server, point)
        held = point not in ("connected", "generating", "resumed")
        assert (await asyncio.to_thread(state, server)) in (("paused", "updating") if held else ("running",))
        async with asyncio.timeout(60), TokserveClient(server.url) as client:
            async with client.paused():
                await client.push(weights, version=f"after {point}")
            (rollout,) = await client.generate([[1, 2, 3]], max_tokens=5, ignore_eos=True)
            assert rollout.weight_versions == [(f"after {point}", 0, 5)]
            await client.generate([[1, 2, 3]] * 2, max_tokens=5, ignore_eos=True)  # the watcher's turn comes
        await asyncio.sleep(0.2)
        watching.cancel()

    asyncio.run(goes_on())
    watcher.check(f"after {point}")
    assert state(server) == "running"


@pytest.mark.slow
def test_without_a_successor_an_update_is_rolled_back(server: Server) -> None:
    server.post("/resume", {})
    kill_at(server, "started")
    server.post("/resume", {})

    async def waits() -> None:
        async with TokserveClient(server.url, take_over=False) as client:
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                try:
                    return await client.control("/start_weight_update")
                except ServerError as error:
                    assert error.status == 409 and "it is rolled back in" in error.message
                    await asyncio.sleep(0.2)

    asyncio.run(waits())
    assert server.post("/abort_weight_update", {}).status_code == 200
    assert any("no call came for" in line for line in server.log)
