"""The JSON of a call's parameter that a model writes as plain text, in a format without types.

The parameter's schema says which types the text may have.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any
from urllib.parse import unquote

import msgspec

from tokserve.features.chat.json_scanner import object_of

AS_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write such values
MAX_ALTERNATIVES = 256  # schemas of a parameter that are looked at
MAX_REFERENCES = 8  # that follow one another
NO_DEFINITIONS: dict[str, Any] = {}
MAX_LITERAL = 1 << 16  # characters of a list or object in Python's notation
TYPE_OF_KEYWORDS = {  # a schema without a type that has one of these is written for values of this type
    "properties": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "required": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "uniqueItems": "array",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
}
_WRONG_ESCAPE = re.compile(r"\\[^\\'\"abfnrtvx0-7NuU]")  # Python warns of it
_NOT_ONLY_A_TYPE = {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"}


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """The schema with what its reference, or its only `allOf`, says.  `root`: has the definitions.  A reference to
    nothing stays."""
    for _ in range(MAX_REFERENCES):
        combined, ref = schema.get("allOf"), schema.get("$ref")
        if isinstance(ref, str):
            name, target = "$ref", _target(ref, root)
        else:
            name, target = "allOf", combined[0] if isinstance(combined, list) and len(combined) == 1 else None
        if not isinstance(target, dict):
            break
        schema = target | {key: value for key, value in schema.items() if key != name}
    return schema


def _target(ref: str, root: dict[str, Any]) -> Any:
    """What a reference within the schema names; None: nothing."""
    target: Any = root
    if not ref.startswith("#/"):
        return None
    for part in unquote(ref[2:]).split("/"):
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target


def is_text(schema: dict[str, Any]) -> bool:
    """Whether a parameter is a string, whatever its text is."""
    return (schema.get("type") or _implied_type(schema)) == "string" and not _NOT_ONLY_A_TYPE & schema.keys()


def json_of(text: str, schema: dict[str, Any], root: dict[str, Any] = NO_DEFINITIONS) -> str:
    """A parameter as JSON: a string, unless the schema has another type that the text can be.  `root`: the schema of
    all parameters."""
    values = schema.get("enum", [schema.get("const")])
    if isinstance(values, list) and text in values:
        return encoded(text)
    plain = text.strip()
    plain = plain.lower() if schema.get("type") == "boolean" else AS_PYTHON.get(plain, plain)
    try:
        plain = _escaped(plain)
        value = msgspec.json.decode(plain)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        value, plain = _python_literal(plain)
        if value is None:
            return encoded(text)
    types = _types(schema, root)
    return plain if types is None or not types.isdisjoint(_types_of(value)) else encoded(text)


def encoded(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _escaped(text: str) -> str:
    """The JSON of a text that is JSON but for raw control characters in its strings; another text as it is."""
    begin = '{"":'
    whole = object_of(f"{begin}{text}}}") if text[:1] in ("[", "{") else None
    return text if whole is None else whole[len(begin) : -1]


def _python_literal(text: str) -> tuple[list[Any] | dict[str, Any] | None, str]:
    """A list or an object in Python's notation, and its JSON; None: the text is neither."""
    if text[:1] not in ("[", "{") or len(text) > MAX_LITERAL or _WRONG_ESCAPE.search(text):
        return None, text
    try:
        value = ast.literal_eval(text)
        as_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
        same = json.loads(as_json) == value and isinstance(value, list | dict)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None, text
    return (value, as_json) if same else (None, text)


def _implied_type(schema: dict[str, Any]) -> str:
    return next((kind for keyword, kind in TYPE_OF_KEYWORDS.items() if keyword in schema), "string")


def _types(schema: dict[str, Any], root: dict[str, Any]) -> set[str] | None:
    """The types that a schema names, in alternatives too; None: it allows any, or does not say."""
    types: set[str] = set()
    pending: list[Any] = [schema]
    looked_at = 0
    while pending:
        one, looked_at = pending.pop(), looked_at + 1
        if not isinstance(one, dict) or looked_at + len(pending) > MAX_ALTERNATIVES:
            return None
        one = resolved(one, root)
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
        elif not _NOT_ONLY_A_TYPE & one.keys() and (implied := _implied_type(one)) != "string":
            types.add(implied)
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
