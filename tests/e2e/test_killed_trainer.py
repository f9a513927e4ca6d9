"""A trainer is killed at several points: its successor goes on without a human."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.server import Server
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import ServerError, TokserveClient

SCRIPT = Path(__file__).with_name("killed_trainer.py")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("demo", "--dtype", "float32", "--tokens-only", "--control-lease", "3") as server:
        yield server


def kill_at(server: Server, point: str) -> None:
    """Run a trainer, and kill it when it is there."""
    command = [sys.executable, str(SCRIPT), server.url, point]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "reached\n"
        trainer.kill()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["paused", "in paused()", "started", "in the body", "filled"])
def test_its_successor_pushes_and_generates(server: Server, point: str) -> None:
    weights = load_file(DEMO_DIR / "model.safetensors")
    kill_at(server, point)
    assert server.get("/inference/v1/state").json()["state"] in ("paused", "updating")

    async def goes_on() -> None:
        async with asyncio.timeout(60), TokserveClient(server.url) as client:
            async with client.paused():
                await client.push(weights, version=f"after {point}")
            (rollout,) = await client.generate([[1, 2, 3]], max_tokens=5, ignore_eos=True)
            assert rollout.weight_versions == [(f"after {point}", 0, 5)]

    asyncio.run(goes_on())
    assert server.get("/inference/v1/state").json()["state"] == "running"


@pytest.mark.slow
def test_without_a_successor_an_update_is_rolled_back(server: Server) -> None:
    server.post("/resume", {})
    kill_at(server, "started")
    server.post("/resume", {})

    async def waits() -> None:
        async with TokserveClient(server.url, take_over=False) as client:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                try:
                    return await client.control("/start_weight_update")
                except ServerError as error:
                    assert error.status == 409 and "it is rolled back in" in error.message
                    await asyncio.sleep(0.2)

    asyncio.run(waits())
    assert server.post("/abort_weight_update", {}).status_code == 200
    assert any("nothing was heard of it for" in line for line in server.log)
