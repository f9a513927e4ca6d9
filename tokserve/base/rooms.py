"""The table of rooms: the packages that add capabilities to the core.

The core finds a room by its import string here and imports no other module of it.  The module of a room holds `ROOM`,
which names what the room adds, by import strings again: "tokserve.features.x.routes:ENDPOINTS" is imported when a
server needs its routes.  A room whose package is absent adds nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

ROOMS: dict[str, str] = {  # module of the room, by its name; routes of a later one replace those of an earlier one
    "chat": "tokserve.features.chat.room",
    "observe": "tokserve.features.observe.room",
    "weights": "tokserve.features.weights.room",
    "images": "tokserve.features.images.room",
    "kv": "tokserve.features.kv.room",
    "fairness": "tokserve.features.fairness.room",
    "grammar": "tokserve.features.grammar.room",
    "speculation": "tokserve.features.speculation.room",
    "lora": "tokserve.features.lora.room",
    "recurrent": "tokserve.families.recurrent.room",
    "profiler": "tokserve.features.profiler.room",
    "pooling": "tokserve.features.pooling.room",
    "mixtures": "tokserve.families.mixtures.room",
    "groups": "tokserve.features.groups.room",
    "masks": "tokserve.features.masks.room",
    "label_scores": "tokserve.features.label_scores.room",
    "openai": "tokserve.dialects.openai.room",
    "anthropic": "tokserve.dialects.anthropic.room",
    "trainers": "tokserve.dialects.trainers.room",
    "sagemaker": "tokserve.dialects.sagemaker.room",
    "sglang": "tokserve.dialects.sglang.room",
    "sessions": "tokserve.features.sessions.room",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a room adds to the core.  Each field but `needs` and `paths` is an import string, or "" for nothing.

    `options`: a Struct whose fields are options of `tokserve serve`, in a group with the room's name.
    `check`: a function of a resolved `Config` that raises StartError for options that do not fit.
    `endpoints`: a tuple of `server.endpoint.Endpoint`.
    `text_endpoints`: the same for routes that need a tokenizer; a tokens-only server does not import them.
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
    `address` and an asynchronous `close`, or None.
    `commands`: a tuple of `protocol.commands.AdminCommand`.
    `engine`, `runner`: a function that makes the room's feature of an engine or of a model runner, or None.
    `columns`: a tuple of `protocol.columns.ColumnSpec` and `ValueSpec`.
    """

    options: str = ""
    check: str = ""
    endpoints: str = ""
    text_endpoints: str = ""
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
    commands: str = ""
    engine: str = ""
    runner: str = ""
    columns: str = ""


@cache
def rooms() -> dict[str, Room]:
    """The rooms that are present, by name, in the order of the table."""
    return {name: room for name, module in ROOMS.items() if (room := _room(module)) is not None}


def contributions(kind: str) -> Iterator[tuple[str, Any]]:
    """(name of a room, what it adds) for each room that adds something of this kind, a field of `Room`."""
    for name, room in rooms().items():
        if place := getattr(room, kind):
            yield name, imported(place)


def imported(place: str) -> Any:
    """The object at "package.module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _room(module: str) -> Room | None:
    package = module.rpartition(".")[0]
    try:
        if importlib.util.find_spec(package) is None:
            return None
    except ModuleNotFoundError:  # a folder above is absent
        return None
    room = importlib.import_module(module).ROOM
    assert isinstance(room, Room)
    return room
