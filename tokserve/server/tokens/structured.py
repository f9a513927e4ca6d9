"""The request fields for structured outputs: `structured_outputs` itself, and OpenAI's `response_format`.

Both become `StructuredOutputs`, which `params` validates and the engine compiles.  Names of other servers and obsolete
names are refused with the name to use.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokserve.client.form_defaults import FormDefaults
from tokserve.errors import LONGEST_SHOWN, RequestError, invalid
from tokserve.params import SamplingParams, StructuredOutputs
from tokserve.server.compat import IGNORED_OPTIONS, OTHER_NAMES
from tokserve.server.http import body, errors


class _JsonSchemaField(msgspec.Struct):
    """response_format.json_schema.  Outputs always match the schema; with `strict` its objects are closed."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormatField(msgspec.Struct):
    type: str
    json_schema: _JsonSchemaField | None = None


def refuse_other_names(name: str, value: Any, prefix: str = "") -> None:
    """Raise for a field with one of `OTHER_NAMES`, naming the field to use."""
    if name in OTHER_NAMES and value is not None and value not in OTHER_NAMES[name]:
        raise RequestError(
            f"{prefix}{name} is not supported by this server; use {prefix}structured_outputs",
            field=prefix + name, code="unsupported",
        )  # fmt: skip


def drop_ignored_fields(value: dict[Any, Any], path: str) -> dict[Any, Any]:
    """The options without nulls and ignored fields; refuses unsupported ones."""
    for name, no_effect in IGNORED_OPTIONS.items():
        errors.refuse_unsupported(f"{path}.{name}", value.get(name), no_effect)
    return {name: field for name, field in value.items() if field is not None and name not in IGNORED_OPTIONS}


def with_default(params: SamplingParams, defaults: FormDefaults) -> SamplingParams:
    """The parameters with what their structured outputs do not say."""
    if params.structured_outputs is None:
        return params
    return msgspec.structs.replace(params, structured_outputs=defaults.apply(params.structured_outputs))


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
    response = body.convert(response_format, _ResponseFormatField, "response_format")
    if response.type == "json_schema":
        if response.json_schema is None:
            raise invalid("response_format.json_schema", "is required")
        schema = response.json_schema
        return defaults.apply(StructuredOutputs(json=schema.schema, disable_additional_properties=schema.strict))
    if response.type not in ("text", "json_object"):
        kind = response.type[:LONGEST_SHOWN]
        raise invalid("response_format.type", f"must be text, json_object or json_schema, got {kind!r}")
    return defaults.apply(StructuredOutputs(json_object=True)) if response.type == "json_object" else None
