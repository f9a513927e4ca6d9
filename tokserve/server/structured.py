"""The request fields for structured outputs: `structured_outputs` itself, and OpenAI's `response_format`.

Both become `StructuredOutputs`; what that may hold is decided in `params`, and whether a grammar compiles in the
engine.  Other servers' and obsolete names are refused with a pointer to this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokserve.errors import RequestError
from tokserve.params import StructuredOutputs
from tokserve.server import body, errors

# obsolete and other servers' names, with the values that have no effect (null never has one)
OTHER_NAMES: Mapping[str, tuple[Any, ...]] = {
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "guided_json_object": (False,),
    "guided_decoding": (), "guided_decoding_backend": (), "guided_whitespace_pattern": (), "regex": (), "ebnf": (),
    "json_schema": (),
}  # fmt: skip
# options of other servers, with the values that have no effect
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "disable_fallback": (False,), "disable_additional_properties": (False,), "structural_tag": (), "_backend": (),
    "_backend_was_auto": (False,),
}  # fmt: skip


class _JsonSchema(msgspec.Struct):
    """response_format.json_schema.  An output always keeps to the schema, strict or not."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None


def refuse_other_names(name: str, value: Any, prefix: str = "") -> None:
    """Raise for a field with one of `OTHER_NAMES`, naming the field to use."""
    if name in OTHER_NAMES and value is not None and value not in OTHER_NAMES[name]:
        raise RequestError(
            f"{prefix}{name} is not supported by this server; use {prefix}structured_outputs",
            field=prefix + name, code="unsupported",
        )  # fmt: skip


def without_habits(value: dict[Any, Any], at: str) -> dict[Any, Any]:
    """The options without nulls and those that have no effect; refuses unsupported ones."""
    for name, idle in _UNSUPPORTED.items():
        errors.refuse_unsupported(f"{at}.{name}", value.get(name), idle)
    return {name: each for name, each in value.items() if each is not None and name not in _UNSUPPORTED}


def asked(outputs: dict[str, Any] | None, response_format: dict[str, Any] | None) -> StructuredOutputs | None:
    """The form of output that a text route's body asks for.  Raises RequestError naming the field."""
    if outputs is not None:
        if response_format not in (None, {"type": "text"}):
            raise RequestError("give structured_outputs or response_format, not both", field="response_format")
        return body.convert(without_habits(outputs, "structured_outputs"), StructuredOutputs, "structured_outputs")
    if response_format is None:
        return None
    given = body.convert(response_format, _ResponseFormat, "response_format")
    if given.type == "json_schema":
        if given.json_schema is None:
            raise RequestError("response_format.json_schema is required", field="response_format.json_schema")
        return StructuredOutputs(json=given.json_schema.schema)
    if given.type not in ("text", "json_object"):
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, got {given.type[:errors.SHOWN]!r}",
            field="response_format.type",
        )  # fmt: skip
    return StructuredOutputs(json_object=True) if given.type == "json_object" else None
