"""Weight updates of callers that know no transactions: their calls change some tensors at once.

Here an update holds all tensors and takes effect as a whole.  So a call beside generation must bring them all, and
calls while generation is paused are parts of one update, which the end of the pause commits.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from tokserve.base.errors import Conflict, RequestError
from tokserve.client.async_llm import AsyncLLM

PIECE = 4 << 20  # bytes
OPEN, NONE_OPEN = "update_open", "no_update"  # codes of the engine's refusals


async def stage(llm: AsyncLLM, update: dict[str, Any], opened: Callable[[], None] = lambda: None) -> bool:
    """Stage tensors, in the update that is open or a new one; whether a commit has to follow now.  `opened` is called
    when it is a new one."""
    is_new = await begin(llm)
    if is_new:
        opened()
    waits = not is_new or (await llm.fresh_status()).paused
    await llm.update_weights({"update_info": update})
    return not waits


async def begin(llm: AsyncLLM) -> bool:
    """Open an update unless one is open; whether this call has opened it."""
    try:
        await llm.start_weight_update()
    except Conflict as error:
        if error.code != OPEN:
            raise
        return False
    return True


async def push_adapter(
    llm: AsyncLLM,
    lora_name: str,
    config: dict[str, Any],
    stage: Callable[[str], Awaitable[None]],
) -> dict[str, Any]:
    """An adapter whose tensors `stage`, which gets the update's id, stages: loaded as a whole, or not at all."""
    opened = await llm.start_weight_update(lora_name=lora_name, lora_config=config)
    update_id = opened["update_id"]
    finished = False
    try:
        await stage(update_id)
        loaded = await llm.finish_weight_update(update_id=update_id)
        finished = True
    finally:
        if not finished:
            with suppress(RequestError):  # it has been rolled back already
                await llm.abort_weight_update(update_id)
    return loaded


async def send_file(llm: AsyncLLM, file: bytes, update_id: str) -> None:
    """Stage a safetensors file."""
    stream = secrets.token_hex(8)
    await llm.begin_weight_stream(stream, update_id)
    for first in range(0, len(file), PIECE):
        await llm.feed_weights(stream, file[first : first + PIECE])
    await llm.feed_weights(stream, b"", last=True)


async def commit(llm: AsyncLLM, version: str | None = None) -> bool:
    """Commit the open update; False if there is none.  Raises `RequestError` if tensors are missing."""
    try:
        await llm.finish_weight_update(version)
    except Conflict as error:
        if error.code != NONE_OPEN:
            raise
        return False
    return True
