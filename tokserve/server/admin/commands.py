"""The routes of admin commands, under vLLM's names, made from their declarations in `admin`.

Parameters come in the body (JSON or msgpack) or in the query; the body wins.  Each route is one command of the engine,
which decides whether its state allows it, so every front end can serve the route.  `auth` checks the caller.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import EngineDead, RequestError, invalid
from tokserve.protocol import commands
from tokserve.server import reply_types
from tokserve.server.http import body
from tokserve.server.http.workers import off_loop
from tokserve.server.serving import Serving

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[Serving, Request], Awaitable[Response]]
BLANK = 1 << 10  # so many bytes of white space count as no body
MAX_CORPUS_OUTPUTS = 4096  # of one call; a group keeps far fewer
ID_BYTES = 4


class PauseBody(commands.Pause, forbid_unknown_fields=True):
    """vLLM's older name for mode wait as well."""

    wait_for_inflight_requests: bool = False

    def __post_init__(self) -> None:
        if self.wait_for_inflight_requests:
            self.mode = "wait"


class SleepBody(commands.Sleep, forbid_unknown_fields=True):
    """`tags` (SkyRL's) are ignored."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


class ResetPrefixCacheBody(commands.ResetPrefixCache, forbid_unknown_fields=True):
    """vLLM's other options are ignored: running requests keep their KV pages."""

    reset_running_requests: bool = False
    reset_connector: bool = False


class AddDraftCorpusBody(msgspec.Struct, forbid_unknown_fields=True):
    """Outputs, as ids, that are drafts for requests of a group with the same model and cache salt."""

    draft_group: str
    token_ids: list[list[int]]
    model: str | None = None
    cache_salt: str = ""


class UnloadAdapterBody(commands.UnloadAdapter, forbid_unknown_fields=True):
    """`lora_int_id` (vLLM's) is ignored."""

    lora_int_id: int | None = None


class WorkerCallBody(commands.WorkerCall, forbid_unknown_fields=True):
    """`timeout`: seconds that the reply may take."""

    timeout: float | None = None


async def read_arguments(serving: Serving, request: Request, kind: type[T], *, strict: bool = True) -> T:
    """The parameters from query and body; `strict`: texts of the body are not converted to numbers."""
    query, sent, size = await query_and_body(serving, request, kind)
    return await off_loop(request, size, lambda: body.convert(query | sent, kind, strict=strict))


async def query_and_body(
    serving: Serving, request: Request, kind: type[msgspec.Struct]
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The parameters in the query, those in the body, and the body's size in bytes; there may be no body.

    Names in the query that `kind` does not know are ignored: proxies may add some.  Its texts are converted to the
    types of the parameters; values of the body are not.
    """
    query = request.query_params
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        if name in query:
            text = query.getlist(name) if name == "tags" else query[name]
            values[name] = body.convert(text, field.type, name, known=(), strict=False)
    raw = await serving.bodies.read(request)
    if len(raw) <= BLANK and not bytes(raw).strip():
        return values, {}, len(raw)
    sent = await serving.bodies.decode(request, raw)
    if sent is not None and not isinstance(sent, dict):
        raise RequestError("the body must be an object")
    return values, sent or {}, len(raw)


def handler_of(command: commands.AdminCommand, kind: type[msgspec.Struct]) -> Handler:
    """The handler of a command's routes: parameters go to the engine, and its reply to the client."""

    async def handle(serving: Serving, request: Request) -> Response:
        params = await read_arguments(serving, request, kind)
        fields = msgspec.structs.fields(command.parameters)
        args = {field.encode_name: getattr(params, field.name) for field in fields}
        reply = await serving.llm.call(command.name, **args)
        return body.reply(request, reply if isinstance(reply, dict) else {"success": reply})

    handle.__doc__ = f"POST {command.routes[0]}: {command.text}"
    return handle


async def add_draft_corpus(serving: Serving, request: Request) -> Response:
    """POST /add_draft_corpus: keep outputs as drafts"""
    params = await read_arguments(serving, request, AddDraftCorpusBody)
    count = len(params.token_ids)
    if count > MAX_CORPUS_OUTPUTS:
        raise invalid("token_ids", f"must have at most {MAX_CORPUS_OUTPUTS} outputs, got {count}")
    vocab_size = serving.llm.ready.vocab_size
    size = ID_BYTES * sum(map(len, params.token_ids))
    packed = await off_loop(request, size, lambda: _packed_outputs(params.token_ids, vocab_size))
    await serving.model.find(params.model)
    reply = await serving.llm.add_draft_corpus(
        params.draft_group, packed, lora_name=serving.model.adapter(params.model), cache_salt=params.cache_salt
    )
    return body.reply(request, reply)


def _packed_outputs(outputs: list[list[int]], vocab_size: int) -> list[bytes]:
    for index, ids in enumerate(outputs):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            field = f"token_ids[{index}]"
            raise RequestError(f"{field} has an id that is not in the vocabulary", field=field)
    return [array("i", ids).tobytes() for ids in outputs]


async def load_lora_adapter(serving: Serving, request: Request) -> Response:
    """POST /v1/load_lora_adapter: load an adapter"""
    params = await read_arguments(serving, request, commands.LoadAdapter)
    loaded = await serving.llm.load_lora_adapter(params.lora_name, params.lora_path, params.load_inplace)
    message = f"Success: LoRA adapter '{params.lora_name}' loaded"
    return body.reply(request, {"success": True, "message": message} | loaded)


async def unload_lora_adapter(serving: Serving, request: Request) -> Response:
    """POST /v1/unload_lora_adapter: unload an adapter when its requests have ended"""
    params = await read_arguments(serving, request, UnloadAdapterBody)
    await serving.llm.unload_lora_adapter(params.lora_name)
    message = f"Success: LoRA adapter '{params.lora_name}' unloaded"
    return body.reply(request, {"success": True, "message": message, "lora_name": params.lora_name})


async def call_worker(serving: Serving, request: Request, params: WorkerCallBody) -> Response:
    """Call a method of the worker extension."""
    if params.timeout is not None and not 0 < params.timeout <= commands.LONGEST_RPC:
        raise invalid("timeout", f"must be above 0 and at most {commands.LONGEST_RPC:g} seconds")
    try:
        results = await serving.llm.collective_rpc(params.method, params.timeout, params.args, params.kwargs)
    except TimeoutError:
        raise EngineDead(f"{params.method} has not returned for {params.timeout:g} s", code="engine_hung") from None
    return body.reply(request, {"results": results})


# where a route takes more than its command, or answers with more
BODIES: dict[str, type[msgspec.Struct]] = {
    "pause": PauseBody,
    "sleep": SleepBody,
    "reset_prefix_cache": ResetPrefixCacheBody,
    "add_draft_corpus": AddDraftCorpusBody,
    "unload_lora_adapter": UnloadAdapterBody,
    "collective_rpc": WorkerCallBody,
}
HANDLERS: dict[str, Handler] = {
    "add_draft_corpus": add_draft_corpus,
    "load_lora_adapter": load_lora_adapter,
    "unload_lora_adapter": unload_lora_adapter,
}


class CommandRoute(NamedTuple):
    """A POST route of a command; `body` None: it has no parameters.  `reply`: its type."""

    path: str
    handler: Handler
    body: type[msgspec.Struct] | None
    reply: Any


def routes(**handlers: Handler) -> list[CommandRoute]:
    """Every route of a command.  `handlers`: by name of the command, in the place of its own."""
    table = []
    for command in commands.COMMANDS.values():
        if not command.routes:
            continue
        kind = BODIES.get(command.name, command.parameters)
        handler = (HANDLERS | handlers).get(command.name) or handler_of(command, kind)
        reply = reply_types.OF_COMMANDS[command.name]
        table += [
            CommandRoute(path, handler, kind if kind.__struct_fields__ else None, reply) for path in command.routes
        ]
    return table
