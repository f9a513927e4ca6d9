"""A JSON schema as a grammar needs it: without annotations and keywords that say nothing.

What is left and cannot be enforced is refused with its place, as a `SchemaError`; the engine's library has the last
word on the rest.  Where it would allow other values than the schema says (numbers beyond its integers, bounds that are
excluded, days that do not exist), the schema is written in another way.  Loops instead of recursion: a schema may be
nested deeply.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import msgspec

from tokserve.protocol.jsonschema import Schema, inner_schemas, walk
from tokserve.protocol.regex import DATES_AND_TIMES
from tokserve.protocol.schema_logic import Exclusions, by_pointer, has_no_finite_value

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
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
EXACT = 1 << 53  # the library's numbers are float64: it tells integers apart up to here, ...
INT64 = 1 << 63  # ... and rounds larger ones, and cuts them to this range
LARGEST = INT64 - 1024  # the largest float64 below
PRECISION = 1e-14  # of the bounds of floats: the library writes them with 15 digits
ABOVE_ZERO = 1e-20  # for the smallest number above 0: of more digits, the library's expressions would be long
MOST_BYTES = 1 << 20  # of a schema as it comes
LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")


class SchemaError(ValueError):
    """A schema cannot be used.  The text follows the name of its field; it names the place as a JSON pointer."""

    def __init__(self, reason: str, pointer: str = "") -> None:
        super().__init__(f"cannot be used: {reason} (at #{pointer})" if pointer else reason)


def reduced(schema: Schema | str, *, suited: bool = True) -> Schema:
    """A copy of the schema, an object or its JSON text, that allows the same values.  Raises SchemaError.

    `suited`: written for the engine's library, which may make it longer.
    """
    try:
        copy = _reduced(_parsed(schema))
        if suited:
            _suit_library(copy)
        return copy
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
    exclusions, names_itself = Exclusions(schemas), any("$id" in schema for schema in schemas.values())
    for pointer, schema in schemas.items():
        _check(pointer, schema, names_itself)
        branches = schema.get("oneOf")
        if isinstance(branches, list):
            _any_of(pointer, schema, branches, exclusions)
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


def _check(pointer: str, schema: Schema, names_itself: bool) -> None:
    """Raise for what cannot be enforced here.  `names_itself`: an `$id` may be what references name."""
    for name in UNSUPPORTED:
        if name in schema:
            raise SchemaError(f"{name} cannot be enforced", f"{pointer}/{name}")
    for name in ("const", "enum"):
        if name in schema:
            _check_integers(schema[name], f"{pointer}/{name}")
    ref = schema.get("$ref")
    if isinstance(ref, str) and not ref.startswith("#") and not names_itself:
        raise SchemaError("only references within the schema (#/...) are followed", f"{pointer}/$ref")
    for pattern in (schema.get("pattern"), *(_keys(schema.get("patternProperties")))):
        if isinstance(pattern, str) and LOOK_AROUND.search(pattern):
            raise SchemaError(f"a pattern with look-ahead or look-behind cannot be enforced: {pattern[:80]}", pointer)


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _any_of(pointer: str, schema: Schema, branches: list[Any], exclusions: Exclusions) -> None:
    """Write a oneOf as an anyOf, which it is if its branches exclude one another."""
    if not exclusions.hold(branches):
        raise SchemaError(
            "a value may match several branches of a oneOf, and that cannot be excluded: use anyOf", f"{pointer}/oneOf"
        )
    del schema["oneOf"]
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": branches}]
    else:
        schema["anyOf"] = branches


def _suit_library(root: Schema) -> None:
    """Write what the engine's library takes in another way than JSON Schema does so that it takes it in the same way,
    or more narrowly."""
    schemas = [schema for _, schema in walk(root)]
    for schema in schemas:
        for names, sign in ((LOWER, 1), (UPPER, -1)):
            _round_bounds(schema, names, sign)
        _spell_format(schema)
    # the library merges schemas that describe one value, so that the bounds of any two may meet
    for names, others, sign in ((LOWER, UPPER, 1), (UPPER, LOWER, -1)):
        ends = sorted({sign * schema[n] for schema in schemas for n in others if _is_number(schema.get(n))})
        for schema in schemas:
            _open_bound(schema, names, sign, ends)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_integers(value: Any, pointer: str) -> None:
    """Raise for a constant with an integer that the library would write as another one."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, list | dict):
            pending += inner.values() if isinstance(inner, dict) else inner
        elif isinstance(inner, int) and abs(inner) > EXACT and inner != INT64 - 1:
            if abs(inner) >= INT64 or int(float(inner)) != inner:
                raise SchemaError(f"{inner} is beyond the integers that a grammar can tell apart", pointer)
        elif inner == -INT64:  # the library does not come to an end
            raise SchemaError(f"{inner:.0f} is beyond the integers that a grammar can tell apart", pointer)


def _round_bounds(schema: Schema, names: tuple[str, str], sign: int) -> None:
    """Write bounds beyond the library's integers so that it takes them for no wider ones.  `sign`: 1 for lower bounds;
    upper ones are lower bounds of the negated value."""
    for name in names:
        value = schema.get(name)
        if not _is_number(value) or abs(value) <= EXACT:
            continue
        if sign * value < -LARGEST:
            is_known = sign < 0 and schema.get("type") == "integer"  # the library cuts it to the largest of 64 bits
            schema[name] = value if is_known else -sign * LARGEST
        elif isinstance(value, int) and abs(value) < INT64:
            rounded = int(float(value))
            schema[name] = rounded if sign * rounded >= sign * value else int(math.nextafter(rounded, sign * math.inf))


def _spell_format(schema: Schema) -> None:
    pattern = DATES_AND_TIMES.get(schema.get("format", ""))
    if pattern is not None:
        del schema["format"]
        if schema.setdefault("pattern", pattern) != pattern:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]


def _open_bound(schema: Schema, names: tuple[str, str], sign: int, ends: Sequence[float]) -> None:
    """Write a bound that is excluded as the number beside it, if it is an integer and another bound, farther from 0,
    comes before the next one: there the library includes it (more than 0 and at most 0.5 may be 0).  As in
    `_round_bounds`; `ends`: the bounds of the other kind, times `sign`."""
    plain, excluded = names
    value = schema.get(excluded)
    if not _is_number(value) or value % 1 or sign * value < 0:
        return
    next_end = bisect_right(ends, sign * value)
    if next_end == len(ends) or ends[next_end] >= sign * value + 1:
        return
    beside = sign * ABOVE_ZERO if value == 0 else value * (1 + PRECISION)
    del schema[excluded]
    if not _is_number(schema.get(plain)) or sign * schema[plain] < sign * beside:
        schema[plain] = beside
