"""Scenes of a client and a fake engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.fake_engine import FakeEngine, Script
from tests.client.scenes import joined
from tests.text.checkpoints import write_chatml
from tokserve.client import engine_client, launch
from tokserve.client.async_llm import AsyncLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chatml(tmp_path_factory.mktemp("model"))


@pytest.fixture
def play(tmp_path: Path, model: Path) -> Callable[..., None]:
    """Run a scene with an engine and a client that has joined it."""

    def run(
        scene: Callable[[AsyncLLM, FakeEngine], Awaitable[None]], script: Script | None = None, **options: Any
    ) -> None:
        async def all_of_it() -> None:
            async with joined(f"ipc://{tmp_path}/e.sock", model, script, **options) as (llm, engine):
                await asyncio.wait_for(scene(llm, engine), 20)

        asyncio.run(all_of_it())

    return run


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes run the scripted executor."""
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-m", "tests.engine.scripted_process"))
    monkeypatch.setattr(engine_client, "LAST_MESSAGES", 0.05)
