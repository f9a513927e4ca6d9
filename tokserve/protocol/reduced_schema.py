"""A JSON schema as a grammar needs it: without annotations and keywords that say nothing.

What is left and cannot be enforced is refused with its place, as a `SchemaError`; the engine's library has the last
word on the rest.  Loops instead of recursion: a schema may be nested deeply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from tokserve.protocol.jsonschema import Schema, inner_schemas, walk
from tokserve.protocol.schema_logic import by_pointer, exclude_one_another, has_no_finite_value

ANNOTATIONS = (
    "$comment",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "deprecated",
    "description",
    "example",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
)
FORMATS = frozenset(
    {  # that are enforced; others are annotations
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    }
)
APPLY_TO = {  # keywords that concern values of one type, of those that cannot be enforced
    "array": ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": (
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
        "unevaluatedProperties",
    ),
}
UNSUPPORTED = (
    *APPLY_TO["array"],
    *APPLY_TO["object"],
    "not",
    "if",
    "then",
    "else",
    "$dynamicRef",
    "$recursiveRef",
    "$recursiveAnchor",
)
TRUE: tuple[Any, ...] = (True, {})  # schemas of any value
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
SHAPES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {  # what the values of keywords are
    "an object": (
        lambda value: isinstance(value, dict),
        ("$defs", "definitions", "patternProperties", "properties"),
    ),
    "a list": (
        lambda value: isinstance(value, list),
        ("allOf", "anyOf", "enum", "oneOf", "prefixItems", "required"),
    ),
    "a list of strings": (lambda value: all(isinstance(item, str) for item in value), ("required",)),
    "a string": (lambda value: isinstance(value, str), ("$ref", "pattern")),
    "a number": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        ("maximum", "minimum", "multipleOf"),
    ),
    "an integer of at least 0": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 == value % 1,
        ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"),
    ),
    f"one of {', '.join(TYPES)}, or a list of them": (
        lambda value: all(kind in TYPES for kind in (value if isinstance(value, list) else [value])),
        ("type",),
    ),
}
COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "if")
MOST_BYTES = 1 << 20  # of a schema as it comes
LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")


class SchemaError(ValueError):
    """A schema cannot be used.  The text follows the name of its field; it names the place as a JSON pointer."""

    def __init__(self, reason: str, pointer: str = "") -> None:
        super().__init__(f"cannot be used: {reason} (at #{pointer})" if pointer else reason)


def reduced(schema: Schema | str) -> Schema:
    """A copy of the schema, an object or its JSON text, that allows the same values.  Raises SchemaError."""
    try:
        return _reduced(_parsed(schema))
    except RecursionError:
        raise SchemaError("is nested too deeply") from None


def text_of(schema: Schema) -> str:
    """The schema as short JSON text.  Raises SchemaError."""
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise SchemaError("is nested too deeply") from None


def _parsed(schema: Schema | str) -> Schema:
    try:
        text: bytes | str = schema if isinstance(schema, str) else msgspec.json.encode(schema)
        if len(text) > MOST_BYTES:
            raise SchemaError(f"must have at most {MOST_BYTES} bytes, got {len(text)}")
        if not isinstance(msgspec.json.decode(text), dict):
            raise SchemaError("must be an object, or an object as JSON text")
    except (msgspec.DecodeError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise SchemaError(f"is not JSON: {error}") from None
    parsed: Schema = json.loads(text)
    return parsed


def _reduced(root: Schema) -> Schema:
    for pointer, schema in walk(root):
        _drop(schema)
        _check_shapes(pointer, schema)
    schemas = by_pointer(root)
    for pointer, schema in schemas.items():
        _check(pointer, schema, schemas)
        branches = schema.get("oneOf")
        if isinstance(branches, list):
            _any_of(pointer, schema, branches, schemas)
    if has_no_finite_value(by_pointer(root)):
        raise SchemaError("cannot be used: no finite value matches it, because what it demands contains itself")
    return root


def _drop(schema: Schema) -> None:
    """Drop what says nothing, here and not inside.  Programs write a null for a keyword that they do not use."""
    for name in [name for name, value in schema.items() if value is None and name != "const"]:
        del schema[name]
    for name in ANNOTATIONS:
        schema.pop(name, None)
    if "format" in schema and schema["format"] not in FORMATS:
        del schema["format"]
    kinds = schema.get("type")
    types = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else None
    for kind, names in APPLY_TO.items():
        if types is not None and kind not in types:
            for name in names:
                schema.pop(name, None)
    if "if" not in schema or all(schema.get(name, True) in TRUE for name in ("then", "else")):
        for name in ("if", "then", "else"):
            schema.pop(name, None)
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        for name in ("contains", "minContains", "maxContains"):
            schema.pop(name, None)
    if schema.get("unevaluatedProperties") is False and not any(name in schema for name in COMBINED):
        del schema["unevaluatedProperties"]  # nothing else looks at the properties
        schema.setdefault("additionalProperties", False)
    for name, says_nothing in NO_OPS.items():
        if name in schema and says_nothing(schema):
            del schema[name]


def _all_true(value: Any) -> bool:
    return isinstance(value, dict) and all(inner in TRUE for inner in value.values())


def _demand_nothing(value: Any) -> bool:
    return isinstance(value, dict) and not any(value.values())


NO_OPS: dict[str, Callable[[Schema], bool]] = {  # keywords, and when they say nothing
    "$dynamicAnchor": lambda schema: True,
    "uniqueItems": lambda schema: schema["uniqueItems"] is False or schema.get("maxItems") in (0, 1),
    "dependencies": lambda schema: _all_true(schema["dependencies"]),
    "dependentRequired": lambda schema: _demand_nothing(schema["dependentRequired"]),
    "dependentSchemas": lambda schema: _all_true(schema["dependentSchemas"]),
    "not": lambda schema: schema["not"] is False,
    "propertyNames": lambda schema: schema["propertyNames"] in (*TRUE, {"type": "string"}),
    "unevaluatedItems": lambda schema: schema["unevaluatedItems"] in TRUE,
    "unevaluatedProperties": lambda schema: schema["unevaluatedProperties"] in TRUE,
}


def _check_shapes(pointer: str, schema: Schema) -> None:
    """Raise for a keyword whose value is of another kind than JSON Schema says."""
    for shape, (fits, names) in SHAPES.items():
        for name in names:
            if name in schema and not fits(schema[name]):
                raise SchemaError(f"{name} must be {shape}", f"{pointer}/{name}")
    for inner, value in inner_schemas(pointer, schema):
        if not isinstance(value, dict | bool) and not (isinstance(value, list) and inner == f"{pointer}/items"):
            raise SchemaError("a schema must be an object, true or false", inner)


def _check(pointer: str, schema: Schema, schemas: dict[str, Any]) -> None:
    """Raise for what cannot be enforced here."""
    for name in UNSUPPORTED:
        if name in schema:
            raise SchemaError(f"{name} cannot be enforced", f"{pointer}/{name}")
    ref = schema.get("$ref")
    if isinstance(ref, str) and not ref.startswith("#") and not any("$id" in other for other in schemas.values()):
        raise SchemaError("only references within the schema (#/...) are followed", f"{pointer}/$ref")
    for pattern in (schema.get("pattern"), *(_keys(schema.get("patternProperties")))):
        if isinstance(pattern, str) and LOOK_AROUND.search(pattern):
            raise SchemaError(f"a pattern with look-ahead or look-behind cannot be enforced: {pattern[:80]}", pointer)


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _any_of(pointer: str, schema: Schema, branches: list[Any], schemas: dict[str, Any]) -> None:
    """Write a oneOf as an anyOf, which it is if its branches exclude one another."""
    if not exclude_one_another(branches, schemas):
        raise SchemaError(
            "a value may match several branches of a oneOf, and that cannot be excluded: use anyOf", f"{pointer}/oneOf"
        )
    del schema["oneOf"]
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": branches}]
    else:
        schema["anyOf"] = branches
