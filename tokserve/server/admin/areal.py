"""The routes that AReaL adds to vLLM and its trainer calls: pause, continue, load weights from a directory.

They are routes of `commands` under other names, with AReaL's replies.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.server.admin.commands import read
from tokserve.server.http import body
from tokserve.server.serving import Serving


class ArealUpdateBody(msgspec.Struct, forbid_unknown_fields=True):
    """A complete update from a checkpoint directory.  `abort_all_requests` is ignored: the trainer pauses first, which
    aborts them; so is `load_format`, as there is only one."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False


async def pause(serving: Serving, request: Request) -> Response:
    """POST /areal_pause_generation: as /pause?mode=abort"""
    await serving.llm.pause_generation(mode="abort")
    return body.reply(request, {"success": True, "message": "Generation paused and all requests aborted"})


async def resume(serving: Serving, request: Request) -> Response:
    """POST /areal_continue_generation: as /resume"""
    await serving.llm.resume_generation()
    return body.reply(request, {"success": True, "message": "Generation continued"})


async def update_weights(serving: Serving, request: Request) -> Response:
    """POST /areal_update_weights: as /update_weights with weight_dir"""
    params = await read(serving, request, ArealUpdateBody)
    await serving.llm.update_weights({"weight_dir": params.model_path})
    return body.reply(request, {"success": True, "message": f"Weights updated from {params.model_path}"})
