"""JSON schemas of structured outputs: walks them, closes objects, and replaces character classes in patterns.

Only keywords whose values are schemas are followed, so a property called "pattern" is not taken for a pattern.  Loops
instead of recursion: a schema may be nested deeply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from tokserve.protocol.regex import explicit_classes

_SINGLE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# keywords whose schemas describe the same object as the schema that they are in
_ALTERNATIVES = ("anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else", "not", "dependentSchemas")
_SAYS_WHAT_ELSE = ("additionalProperties", "unevaluatedProperties")

Schema = dict[str, Any]


def walk(root: Schema) -> Iterator[tuple[str, Schema]]:
    """(JSON pointer, schema) of all schemas in a schema, itself first.  They may be changed where they are."""
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        pointer, schema = pending.pop()
        if isinstance(schema, dict):
            pending += list(inner_schemas(pointer, schema))
            yield pointer, schema


def close(root: Schema) -> None:
    """Set additionalProperties to false in the schema of every object that does not define it.

    Objects that several schemas describe together (properties beside anyOf, an allOf of two) stay open: each schema
    would forbid the properties of the others.
    """
    schemas = dict(walk(root))
    pending = [part for pointer, schema in schemas.items() for part in _parts(pointer, schema)]
    parts: set[str] = set()
    while pending:
        pointer = pending.pop()
        if pointer not in parts and pointer in schemas:
            parts.add(pointer)
            pending += _members(pointer, schemas[pointer])
    for pointer, schema in schemas.items():
        if pointer not in parts and _is_object(schema) and not _members(pointer, schema):
            schema["additionalProperties"] = False


def spell_classes(root: Schema, *, unicode: bool) -> None:
    """Replace the classes in all patterns; see `regex`."""
    for _, schema in walk(root):
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = explicit_classes(schema["pattern"], unicode=unicode)
        by_pattern = schema.get("patternProperties")
        if isinstance(by_pattern, dict):
            spelled = {explicit_classes(name, unicode=unicode): inner for name, inner in by_pattern.items()}
            schema["patternProperties"] = spelled


def inner_schemas(pointer: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, value) of the schemas directly in a schema; a value need not be one."""
    for name in _SINGLE:
        if name in schema:
            yield f"{pointer}/{name}", schema[name]
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{pointer}/{name}/{i}", inner) for i, inner in enumerate(schema[name]))
    for name in _BY_NAME:
        if isinstance(schema.get(name), dict):
            for key, inner in schema[name].items():
                yield f"{pointer}/{name}/{key.replace('~', '~0').replace('/', '~1')}", inner


def _is_object(schema: Schema) -> bool:
    kinds = schema.get("type")
    named = "properties" in schema or kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return named and not any(name in schema for name in _SAYS_WHAT_ELSE)


def _members(pointer: str, schema: Schema) -> list[str]:
    """Pointers to the schemas that describe the same object as this one."""
    names = [name for name in ("allOf", *_ALTERNATIVES, *_CONDITIONS) if name in schema]
    pointers = [inner for inner, _ in inner_schemas(pointer, {name: schema[name] for name in names})]
    target = schema.get("$ref")
    return pointers + ([unquote(target[1:])] if isinstance(target, str) and target.startswith("#") else [])


def _parts(pointer: str, schema: Schema) -> list[str]:
    """The members that describe only a part of the object."""
    conditions = {name: schema[name] for name in _CONDITIONS if name in schema}
    whole = [schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
    count = sum(len(inner) for inner in whole) + sum(name in schema for name in ("$ref", *_ALTERNATIVES))
    has_properties = "properties" in schema or "patternProperties" in schema
    if conditions or count + has_properties > 1:
        return _members(pointer, schema)
    return []
