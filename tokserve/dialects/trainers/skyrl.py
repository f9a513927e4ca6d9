"""What SkyRL's client calls beside vLLM's routes: its own paths, and methods of its worker extension.

The methods of that extension which are an update's beginning and end are commands of the engine here.  The others
receive CUDA handles, or unpickle what they get.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError
from tokserve.server.admin import commands
from tokserve.server.http import body
from tokserve.server.serving import Serving

START, FINISH = "skyrl_start_weight_update", "skyrl_finish_weight_update"
WAYS = (
    "use a process group (/init_weight_transfer_engine, and /update_weights with update_info), a checkpoint directory, "
    "or a safetensors file as the body of /update_weights (docs/rl.md)"
)
REFUSED = {
    "update_weights_ipc": "receives CUDA IPC handles",
    "init_weight_transfer_engine_rdt": "receives CUDA memory by RDMA",
    "update_weights_rdt": "receives CUDA memory by RDMA",
    "init_weight_update_communicator": "unpickles what it gets, which can run any code",
    "load_weights": "unpickles what it gets, which can run any code",
}


async def collective_rpc(serving: Serving, request: Request) -> Response:
    """POST /collective_rpc: call the worker extension, or the equivalent of SkyRL's"""
    params = await commands.read(serving, request, commands.WorkerCallBody)
    has_extension = serving.config.weights.worker_extension_cls is not None
    if has_extension or params.method not in (START, FINISH, *REFUSED):
        return await commands.call_worker(serving, request, params)
    if params.method in REFUSED:
        raise RequestError(f"{params.method} {REFUSED[params.method]}: {WAYS}", field="method", code="unsupported")
    await _bracket(serving, params.method, params.args, params.kwargs)
    return body.reply(request, {"results": [None]})


async def _bracket(serving: Serving, method: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """The beginning or the end of an update; the first takes whether tensors have the names of a checkpoint."""
    if method == FINISH:
        await serving.llm.finish_weight_update()
        return
    is_checkpoint_format = kwargs.get("is_checkpoint_format", args[0] if args else True)
    if not isinstance(is_checkpoint_format, bool):
        raise RequestError("is_checkpoint_format must be a boolean", field="kwargs.is_checkpoint_format")
    await serving.llm.start_weight_update(is_checkpoint_format)
