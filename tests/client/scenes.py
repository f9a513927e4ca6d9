"""An `AsyncLLM` that has joined a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.client.fake_engine import FakeEngine, Script, config
from tokserve.client.async_llm import AsyncLLM


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
