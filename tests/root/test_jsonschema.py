"""JSON schemas: which objects are closed, and which patterns are rewritten."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokserve.protocol import jsonschema

SHUT = {"additionalProperties": False}
A = {"type": "object", "properties": {"a": {}}}
B = {"properties": {"b": {"type": "string"}}}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    jsonschema.close(copy)
    return copy


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, A | SHUT),
        (B, B | SHUT),
        ({"type": "object"}, {"type": "object"} | SHUT),
        ({}, {}),
        ({"type": ["object", "null"]}, {"type": ["object", "null"]} | SHUT),
        ({"type": "string"}, {"type": "string"}),
        (A | {"additionalProperties": {"type": "string"}}, A | {"additionalProperties": {"type": "string"}}),
        (A | {"additionalProperties": True}, A | {"additionalProperties": True}),
        (A | {"unevaluatedProperties": False}, A | {"unevaluatedProperties": False}),
        ({"properties": {"in": A}}, {"properties": {"in": A | SHUT}} | SHUT),
        ({"type": "array", "items": A}, {"type": "array", "items": A | SHUT}),
        ({"prefixItems": [A]}, {"prefixItems": [A | SHUT]}),
        ({"items": [A]}, {"items": [A | SHUT]}),
        ({"patternProperties": {"x": A}}, {"patternProperties": {"x": A | SHUT}}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": A | SHUT}}),
        ({"anyOf": [A, B, {"type": "null"}]}, {"anyOf": [A | SHUT, B | SHUT, {"type": "null"}]}),
        ({"type": "object", "oneOf": [A, B]}, {"type": "object", "oneOf": [A | SHUT, B | SHUT]}),
        ({"allOf": [A], "title": "t"}, {"allOf": [A | SHUT], "title": "t"}),
        # described together: whichever part were closed would forbid the others' properties
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        (A | {"anyOf": [B]}, A | {"anyOf": [B]}),
        (A | {"$ref": "#/$defs/B", "$defs": {"B": B}}, A | {"$ref": "#/$defs/B", "$defs": {"B": B}}),
        ({"allOf": [{"anyOf": [A, B]}, B]}, {"allOf": [{"anyOf": [A, B]}, B]}),
        ({"type": "object", "not": A}, {"type": "object", "not": A}),
        ({"type": "array", "items": {"if": A, "then": B}}, {"type": "array", "items": {"if": A, "then": B}}),
        # what is no schema is left alone
        ({"enum": [{"type": "object"}]}, {"enum": [{"type": "object"}]}),
        (
            {"properties": {"type": {"const": {"properties": 1}}}},
            {"properties": {"type": {"const": {"properties": 1}}}} | SHUT,
        ),
        ({"items": 7, "allOf": "x", "$defs": []}, {"items": 7, "allOf": "x", "$defs": []}),
    ],
    ids=str,
)
def test_close(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected
    assert closed(expected) == expected


def test_a_definition_that_is_a_part_anywhere_stays_open_everywhere() -> None:
    schema = {
        "properties": {"x": {"$ref": "#/$defs/a~1b"}, "y": {"allOf": [{"$ref": "#/$defs/a~1b"}, B]}},
        "$defs": {"a/b": A, "c": A},
    }
    actual = closed(schema)
    assert actual["$defs"] == {"a/b": A, "c": A | SHUT} and actual["additionalProperties"] is False


def test_a_schema_that_refers_to_itself() -> None:
    schema = {"properties": {"next": {"$ref": "#"}}}
    assert closed(schema) == schema | SHUT


def test_deep_and_wide_schemas_are_walked_without_recursion() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    jsonschema.close(deep)
    pointers = [pointer for pointer, _ in jsonschema.walk(deep)]
    assert len(pointers) == 5001
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)} | {"d2000": dict(A)}
    schema = {"allOf": [{"$ref": "#/$defs/d0"}, B], "$defs": chain}
    jsonschema.close(schema)
    assert chain["d2000"] == A


def test_classes_in_patterns() -> None:
    schema: dict[str, Any] = {
        "type": "string",
        "pattern": r"^\d\s$",
        "title": r"\d",
        "enum": [{"pattern": r"\d"}],
        "properties": {"pattern": {"pattern": r"\w"}},
        "patternProperties": {r"^\d": {"pattern": 5}},
    }
    jsonschema.spell_classes(schema, unicode=False)
    assert schema["pattern"] == r"^[0-9][\t\n\x0B\f\r\x20]$" and schema["title"] == r"\d"
    assert schema["enum"] == [{"pattern": r"\d"}] and schema["patternProperties"] == {"^[0-9]": {"pattern": 5}}
    assert schema["properties"] == {"pattern": {"pattern": "[0-9A-Za-z_]"}}
