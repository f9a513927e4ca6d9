"""The JSON of a call's parameter that a model writes as plain text, in a format without types.

The parameter's schema says which types the text may have.
"""

from __future__ import annotations

from typing import Any

import msgspec

AS_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write such values
MAX_ALTERNATIVES = 256  # schemas of a parameter that are looked at
_NOT_ONLY_A_TYPE = {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"}


def is_text(schema: dict[str, Any]) -> bool:
    """Whether a parameter is a string, whatever its text is."""
    return schema.get("type", "string") == "string" and not _NOT_ONLY_A_TYPE & schema.keys()


def json_of(text: str, schema: dict[str, Any]) -> str:
    """A parameter as JSON: a string, unless the schema has another type that the text can be."""
    values = schema.get("enum", [schema.get("const")])
    if isinstance(values, list) and text in values:
        return encoded(text)
    plain = text.strip()
    plain = plain.lower() if schema.get("type") == "boolean" else AS_PYTHON.get(plain, plain)
    try:
        value = msgspec.json.decode(plain)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return encoded(text)
    types = _types(schema)
    return plain if types is None or not types.isdisjoint(_types_of(value)) else encoded(text)


def encoded(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _types(schema: dict[str, Any]) -> set[str] | None:
    """The types that a schema names, in alternatives too; None: it allows any, or does not say."""
    types: set[str] = set()
    pending: list[Any] = [schema]
    while pending:
        one = pending.pop()
        if not isinstance(one, dict) or len(pending) > MAX_ALTERNATIVES:
            return None
        named = one.get("type")
        alternatives, values = one.get("anyOf", one.get("oneOf")), one.get("enum", [one.get("const")])
        if isinstance(named, str):
            types.add(named)
        elif isinstance(named, list):
            types.update(name for name in named if isinstance(name, str))
        elif isinstance(alternatives, list):
            pending += alternatives
        elif isinstance(values, list) and ("enum" in one or "const" in one):
            types.update(name for value in values for name in _types_of(value))
        else:
            return None
    return types


def _types_of(value: Any) -> tuple[str, ...]:
    """The names of a value's type in JSON schemas."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number", "integer") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)
