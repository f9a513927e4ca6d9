"""The request fields for structured outputs: `structured_outputs` itself, and OpenAI's `response_format`.

Both become `StructuredOutputs`, which `params` validates and the engine compiles.  Names of other servers and obsolete
names are refused with the name to use.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokserve.base.errors import LONGEST_SHOWN, RequestError, invalid
from tokserve.client.form_defaults import FormDefaults
from tokserve.protocol.params import StructuredOutputs
from tokserve.server.compat import IGNORED_OPTIONS, OTHER_NAMES
from tokserve.server.http import body, errors

PARTS = {  # of structured_outputs, by names that they have elsewhere
    "json": ("guided_json", "json_schema"),
    "regex": ("guided_regex", "regex"),
    "choice": ("guided_choice",),
    "grammar": ("guided_grammar", "ebnf", "grammar"),
    "json_object": ("guided_json_object",),
}


class _JsonSchemaField(msgspec.Struct, forbid_unknown_fields=True):
    """response_format.json_schema.  Outputs always match the schema; with `strict` its objects are closed."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormatField(msgspec.Struct, forbid_unknown_fields=True):
    """response_format.  `schema`: as llama.cpp, Together and Fireworks have it, beside the type; `strict` and `name`
    too."""

    type: str
    json_schema: _JsonSchemaField | None = None
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


def refuse_other_names(name: str, value: Any, prefix: str = "") -> None:
    """Raise for a field with one of `OTHER_NAMES`, naming the field to use."""
    if name in OTHER_NAMES and value is not None and value not in OTHER_NAMES[name]:
        part = next((f".{part}" for part, names in PARTS.items() if name in names), "")
        raise RequestError(
            f"{prefix}{name} is not supported by this server; use {prefix}structured_outputs{part}",
            field=prefix + name,
            code="unsupported",
        )


def drop_ignored_fields(value: dict[Any, Any], path: str) -> dict[Any, Any]:
    """The options without nulls and ignored fields; refuses unsupported ones."""
    for name, no_effect in IGNORED_OPTIONS.items():
        errors.refuse_unsupported(f"{path}.{name}", value.get(name), no_effect)
    return {name: field for name, field in value.items() if field is not None and name not in IGNORED_OPTIONS}


def read_parameter(name: str, value: Any, prefix: str) -> Any:
    """The value of a sampling parameter: of structured outputs, without nulls and ignored fields.  Raises RequestError
    for the names that other servers have for them."""
    refuse_other_names(name, value, prefix)
    if name == "structured_outputs" and isinstance(value, dict):
        return drop_ignored_fields(value, f"{prefix}{name}")
    return value


def requested_format(
    outputs: dict[str, Any] | None, response_format: dict[str, Any] | None, defaults: FormDefaults
) -> StructuredOutputs | None:
    """The structured outputs of a text route's body.  Raises RequestError naming the field."""
    if outputs is not None:
        if response_format not in (None, {"type": "text"}):
            raise RequestError("give structured_outputs or response_format, not both", field="response_format")
        options = drop_ignored_fields(outputs, "structured_outputs")
        return defaults.apply(body.convert(options, StructuredOutputs, "structured_outputs"))
    if response_format is None:
        return None
    kind = response_format.get("type")
    if isinstance(kind, str) and kind not in ("text", "json_object", "json_schema"):
        words = f"must be text, json_object or json_schema, got {kind[:LONGEST_SHOWN]!r}"
        raise invalid("response_format.type", f"{words} (structured_outputs has other forms)")
    response = body.convert(response_format, _ResponseFormatField, "response_format")
    schema, strict = _schema(response)
    if schema is None:
        return defaults.apply(StructuredOutputs(json_object=True)) if response.type == "json_object" else None
    return defaults.apply(StructuredOutputs(json=schema, disable_additional_properties=strict))


def _schema(response: _ResponseFormatField) -> tuple[dict[str, Any] | None, bool | None]:
    """The schema of a response_format, and whether it is strict."""
    nested = response.json_schema
    if nested is not None and response.schema is not None:
        raise RequestError("give response_format.schema or json_schema, not both", field="response_format.schema")
    if response.type == "json_schema" and nested is None and response.schema is None:
        raise invalid("response_format.json_schema", "is required")
    if response.type == "text" and (nested is not None or response.schema is not None):
        name = "schema" if nested is None else "json_schema"
        raise invalid(f"response_format.{name}", "belongs to the types json_schema and json_object")
    return (response.schema, response.strict) if nested is None else (nested.schema, nested.strict)
