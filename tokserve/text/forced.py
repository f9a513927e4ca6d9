"""What an output must be that is to have tool calls, so that `parsing` reads them back.

A forced call is a form of output like any other, so it works with every model: a named function's answer is its
arguments, and "required" is a JSON list of {"name", "parameters"}, since the model must say which.  How bodies of
requests ask for it is not known here, nor who makes outputs keep to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.params import StructuredOutputs

Functions = Mapping[str, dict[str, Any]]  # the JSON schemas of the arguments, by name
SPACES = r"\x20?"  # between the parts of a forced call: as JSON is mostly written, and no way for a weak model to idle
OPEN_ENDED = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}


def arguments(schema: dict[str, Any]) -> StructuredOutputs:
    """The arguments of a function with this schema, and nothing else."""
    return _json(_closed(schema))


def list_of_calls(functions: Functions, *, parallel: bool) -> StructuredOutputs:
    """[{"name": ..., "parameters": ...}, ...], one of them if they are not `parallel`."""
    return _json(_list_of(functions, "parameters", parallel))


def _json(schema: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(json=schema, whitespace_pattern=SPACES)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, and hold nothing that the schema does not name unless it says that they may."""
    closed = {} if OPEN_ENDED & schema.keys() else {"additionalProperties": False}
    return schema | closed | {"type": "object"}


def _list_of(functions: Functions, key: str, parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls with their arguments under `key`."""
    call = _any_of(functions, key)
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}


def _any_of(functions: Functions, key: str) -> dict[str, Any]:
    """The schema of one call."""
    places = {name: f"function{i}" for i, name in enumerate(functions)}
    calls = [
        {
            "type": "object", "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{place}"}},
            "required": ["name", key], "additionalProperties": False,
        }
        for name, place in places.items()
    ]  # fmt: skip
    definitions = {place: _moved(_closed(functions[name]), f"#/$defs/{place}") for name, place in places.items()}
    return {"anyOf": calls, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """A schema that is part of another at `place`: its references begin there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(each, place) for name, each in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved
