"""Clients of a fake engine: an `AsyncLLM` that has joined one, and an `LLM` that has started one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client.fake_engine import FakeEngine, Script, config
from tokserve.client import launch
from tokserve.client.async_llm import AsyncLLM
from tokserve.features.offline.llm import LLM


@asynccontextmanager
async def joined(
    address: str, model: Path, script: Script | None, **options: Any
) -> AsyncIterator[tuple[AsyncLLM, FakeEngine]]:
    with FakeEngine(address, script=script) as engine:
        llm = AsyncLLM.from_config(config(model, **options))
        await llm.connect(address)
        try:
            yield llm, engine
        finally:
            await llm.shutdown()


async def waited(engine: FakeEngine, kind: type[Any], count: int = 1) -> list[Any]:
    return await asyncio.to_thread(engine.wait, kind, count)


async def settled(llm: AsyncLLM) -> None:
    """Everything the engine has said so far is taken."""
    await llm.call("ping")


def make(model: Path, mode: str = "serve", **options: Any) -> LLM:
    """An LLM whose engine is the fake one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "COMMAND", (sys.executable, "-m", "tests.client.fake_process", mode))
        patch.setattr("tokserve.client.async_llm.resolve", lambda _: config(model, **options))
        return LLM(str(model))
