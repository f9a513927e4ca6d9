"""The table of rooms: the packages that add capabilities to the core.

The core finds a room by its import string here and imports no other module of it.  The module of a room holds `ROOM`,
which names what the room adds, by import strings again: "tokserve.features.x.routes:ENDPOINTS" is imported when a
server needs its routes.  A room whose package is absent adds nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokserve.base.errors import RequestError, StartError

ROOMS: dict[str, str] = {  # module of the room, by its name; routes of a later one replace those of an earlier one
    "chat": "tokserve.features.chat.room",
    "observe": "tokserve.features.observe.room",
    "weights": "tokserve.features.weights.room",
    "images": "tokserve.features.images.room",
    "kv": "tokserve.features.kv.room",
    "fairness": "tokserve.features.fairness.room",
    "grammar": "tokserve.features.grammar.room",
    "speculation": "tokserve.features.speculation.room",
    "draft_heads": "tokserve.features.draft_heads.room",
    "lora": "tokserve.features.lora.room",
    "recurrent": "tokserve.families.recurrent.room",
    "state_space": "tokserve.families.state_space.room",
    "profiler": "tokserve.features.profiler.room",
    "pooling": "tokserve.features.pooling.room",
    "mixtures": "tokserve.families.mixtures.room",
    "groups": "tokserve.features.groups.room",
    "masks": "tokserve.features.masks.room",
    "entropy": "tokserve.features.entropy.room",
    "hidden_states": "tokserve.features.hidden_states.room",
    "label_scores": "tokserve.features.label_scores.room",
    "openai": "tokserve.dialects.openai.room",
    "anthropic": "tokserve.dialects.anthropic.room",
    "trainers": "tokserve.dialects.trainers.room",
    "sagemaker": "tokserve.dialects.sagemaker.room",
    "sglang": "tokserve.dialects.sglang.room",
    "sessions": "tokserve.features.sessions.room",
    "fleet": "tokserve.features.fleet.room",
    "ranks": "tokserve.features.ranks.room",
    "ray": "tokserve.ray.room",
    "gpu": "tokserve.gpu.room",
    "quantization": "tokserve.families.quantization.room",
    "gguf": "tokserve.families.gguf.room",
    "hf": "tokserve.families.hf.room",
    "bench": "tokserve.bench.room",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a room adds to the core.  Fields that are texts, but for `needs`, are import strings, or "" for nothing.

    `requires`: the packages below tokserve that its modules import besides the core ("features.chat"); where one of
    them is absent, so is the room.
    `options`: a Struct whose fields are options of `tokserve serve`, in a group with the room's name.
    `check`: a function of a resolved `Config` that raises StartError for options that do not fit.
    `endpoints`: a tuple of `server.endpoint.Endpoint`.
    `text_endpoints`: the same for routes that need a tokenizer; a tokens-only server does not import them.
    `schemas`: a function of the schemas of /openapi.json by name, and of the names of models or None, that narrows
    those of the room's bodies to what is accepted.
    `errors`: the `ErrorShape` of its text routes, if that is not OpenAI's.
    `needs`: a boolean option; without it the endpoints are not served.  With it they replace others of the same path.
    `paths`: of `text_endpoints`, or with `needs` of all endpoints: where they are not imported, errors refer to them.
    `text_start`: a function of the `Serving` of a new server with a tokenizer; it raises StartError.
    `observers`: a function of a `Serving` that returns a `server.observer.ServerObserver`.
    `reserve`: a function of a `Serving` and the features of a request's prompts that returns one to call at its end.
    `headers`: a function of a request and an AsyncLLM that returns headers of replies to requests for tokens.
    `conversations`: a function of a `Serving` that returns an observer of text conversations, or None.
    `messages`: a function that returns what reads outputs as chat messages; `server.replies.messages` describes it.
    `shared`: a function of a `Config` that returns what the supervisor of several API processes hosts for them, with an
    `address`, an asynchronous `close`, and `on_process_end` for the index of a process that has ended; or None.
    `parameters`: a function of the name and value of a sampling parameter and the prefix of its path, which returns the
    value to read and raises RequestError; it is called for those of a route for tokens.
    `model_files`: a `checkpoint.ModelFiles`.
    `commands`: a tuple of `protocol.commands.AdminCommand`.
    `command_line`: a tuple of `cli.command.Command`.
    `engine`, `runner`: a function that makes the room's feature of an engine or of a model runner, or None.
    `metrics`: a tuple of `protocol.engine_metric.EngineMetric`, over what the room's feature of the engine reports.
    `loaded`: a function of a `Config` and the model that was loaded, called before the KV cache takes the memory that
    is left; what it returns is in `RunnerContext.loaded`.
    `spec`: a function of a `Config`, a config.json, the `DecoderSpec` read from it and the names of the checkpoint's
    tensors, None if weights are drawn, which returns the spec with what the room adds; it raises StartError.
    `draft`: a function of a `Config`, the served model and a function that loads a model from a `Config`, which returns
    the `Draft` that draws drafts, or None.
    `columns`: a tuple of `protocol.columns.ColumnSpec` and `ValueSpec`.
    `parts`: import strings by name, of what an option or a checkpoint makes the core use; `part` looks them up.
    """

    requires: tuple[str, ...] = ()
    options: str = ""
    check: str = ""
    endpoints: str = ""
    text_endpoints: str = ""
    schemas: str = ""
    errors: str = ""
    needs: str = ""
    paths: tuple[str, ...] = ()
    text_start: str = ""
    observers: str = ""
    reserve: str = ""
    headers: str = ""
    conversations: str = ""
    messages: str = ""
    shared: str = ""
    parameters: str = ""
    model_files: str = ""
    commands: str = ""
    command_line: str = ""
    engine: str = ""
    runner: str = ""
    metrics: str = ""
    loaded: str = ""
    spec: str = ""
    draft: str = ""
    columns: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)


@cache
def rooms() -> dict[str, Room]:
    """The rooms that are present, by name, in the order of the table."""
    return {name: room for name, module in ROOMS.items() if (room := _room(module)) is not None}


def contributions(kind: str) -> Iterator[tuple[str, Any]]:
    """(name of a room, what it adds) for each room that adds something of this kind, a field of `Room`."""
    for name, room in rooms().items():
        if place := getattr(room, kind):
            yield name, imported(place)


def part(room: str, name: str) -> Any:
    """What a room has under this name in its `parts`.  Raises StartError if the room is absent."""
    if room not in rooms():
        raise StartError(f"{ROOMS[room].removesuffix('.room')} is not part of this installation, and is needed here")
    return imported(rooms()[room].parts[name])


def require_room(room: str, field: str) -> None:
    """Raise RequestError if a room is absent that a request needs because of this field."""
    if room not in rooms():
        package = ROOMS[room].removesuffix(".room")
        raise RequestError(f"{field} needs {package}, which this server does not have", field=field, code="unsupported")


def request_part(room: str, name: str, field: str) -> Any:
    """What `part` returns, for a request that needs it because of this field.  Raises RequestError."""
    require_room(room, field)
    return part(room, name)


def imported(place: str) -> Any:
    """The object at "package.module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _room(module: str) -> Room | None:
    package = module.rpartition(".")[0]
    if not _is_whole(package, {package}):
        return None
    room = importlib.import_module(module).ROOM
    assert isinstance(room, Room)
    return room


def _is_whole(package: str, seen: set[str]) -> bool:
    """Whether a package is present, and if it is a room, all that it requires.  `seen`: those asked about."""
    try:
        if importlib.util.find_spec(package) is None:
            return False
    except ModuleNotFoundError:  # a folder above is absent
        return False
    if f"{package}.room" not in ROOMS.values():
        return True
    needed = {f"tokserve.{name}" for name in importlib.import_module(f"{package}.room").ROOM.requires} - seen
    seen |= needed
    return all(_is_whole(name, seen) for name in needed)
