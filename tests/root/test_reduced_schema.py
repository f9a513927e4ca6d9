"""JSON schemas as grammars need them (serving-faults F8, F9): what says nothing goes, what cannot be is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokserve.base.errors import RequestError
from tokserve.protocol.params import StructuredOutputs
from tokserve.protocol.reduced_schema import SchemaError, reduced
from tokserve.protocol.schema_logic import Exclusions, by_pointer

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
OBJECT = {"type": "object", "properties": {"a": INTEGER}}
SAYS_NOTHING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "array", "uniqueItems": False, "items": STRING}, {"type": "array", "items": STRING}),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
    ({"type": "array", "minContains": 0}, {"type": "array"}),
    ({"type": "array", "minContains": 2, "maxContains": 3}, {"type": "array"}),
    ({"type": "array", "contains": STRING, "minContains": 0}, {"type": "array"}),
    ({"type": "object", "dependentRequired": {}, "dependentSchemas": {}}, {"type": "object"}),
    ({"type": "object", "dependentRequired": {"a": []}, "dependencies": {"a": True}}, {"type": "object"}),
    ({"unevaluatedProperties": True, "unevaluatedItems": {}}, {}),
    ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
    ({"type": "object", "uniqueItems": True, "contains": STRING}, {"type": "object"}),
    ({"type": ["string", "null"], "dependentRequired": {"a": ["b"]}}, {"type": ["string", "null"]}),
    ({"then": STRING, "else": NULL}, {}),
    ({"if": STRING}, {}),
    ({"if": STRING, "then": {}, "else": True}, {}),
    ({"not": False, **STRING}, STRING),
    ({"$dynamicAnchor": "node", **STRING}, STRING),
    *(({**STRING, "format": f}, STRING) for f in ("path", "password", "binary", "byte", "uri-reference", "regex", "")),
    ({"type": "integer", "format": "int32"}, INTEGER),
    ({**STRING, "format": "uuid"}, {**STRING, "format": "uuid"}),
    ({**STRING, "title": "T", "description": "d", "examples": ["a"], "default": "a", "$comment": "c"}, STRING),
    ({**OBJECT, "unevaluatedProperties": False}, {**OBJECT, "additionalProperties": False}),
    ({"anyOf": [{**STRING, "title": "A"}, {**NULL, "title": "B"}]}, {"anyOf": [STRING, NULL]}),
    # names of properties, and values, are no keywords
    (
        {"type": "object", "properties": {"title": {**STRING, "title": "T"}, "format": STRING, "not": NULL}},
        {"type": "object", "properties": {"title": STRING, "format": STRING, "not": NULL}},
    ),
    ({"enum": [{"title": "T", "format": "x"}]}, {"enum": [{"title": "T", "format": "x"}]}),
    # programs write null for what they do not use
    ({"type": "object", "properties": None, "required": None, "additionalProperties": None}, {"type": "object"}),
    ({"type": None, "enum": None, "items": None, "$ref": None, "const": None}, {"const": None}),
]


@pytest.mark.parametrize(("schema", "expected"), SAYS_NOTHING, ids=str)
def test_what_says_nothing_is_dropped(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    text = json.dumps(schema)
    assert reduced(schema) == expected and json.dumps(schema) == text
    outer = {"type": "object", "properties": {"x": {"type": "array", "items": schema}}, "$defs": {"y/z": schema}}
    inner = {"type": "object", "properties": {"x": {"type": "array", "items": expected}}, "$defs": {"y/z": expected}}
    assert reduced(json.dumps(outer)) == inner


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "/uniqueItems"),
    ({"type": "array", "contains": STRING}, "contains", "/contains"),
    ({"not": STRING}, "not", "/not"),
    ({"if": STRING, "then": {"minLength": 2}}, "if", "/if"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames", "/propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "/dependentRequired"),
    ({"anyOf": [OBJECT], "unevaluatedProperties": False}, "unevaluatedProperties", "/unevaluatedProperties"),
    ({"$ref": "http://example.com/x.json"}, "references within the schema", "/$ref"),
    ({"$ref": "other.json#/$defs/a"}, "references within the schema", "/$ref"),
    ({**STRING, "pattern": "a(?=b)"}, "look-ahead", ""),
    ({**STRING, "pattern": r"\\(?<!b)"}, "look-ahead", ""),
    ({"patternProperties": {"(?!a)": {}}}, "look-ahead", ""),
    ({"oneOf": [STRING, {**STRING, "minLength": 2}]}, "use anyOf", "/oneOf"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "use anyOf", "/oneOf"),
    ({"properties": []}, "properties must be an object", "/properties"),
    ({"properties": {"a": "string"}}, "a schema must be an object, true or false", "/properties/a"),
    ({"additionalProperties": "no"}, "a schema must be an object, true or false", "/additionalProperties"),
    ({"anyOf": [None]}, "a schema must be an object, true or false", "/anyOf/0"),
    ({"required": "a"}, "required must be a list", "/required"),
    ({"required": [1]}, "required must be a list of strings", "/required"),
    ({"type": "STRING"}, "type must be one of array, boolean, integer,", "/type"),
    ({"type": ["string", 3]}, "type must be one of", "/type"),
    ({"enum": "a"}, "enum must be a list", "/enum"),
    ({"minimum": "1"}, "minimum must be a number", "/minimum"),
    ({"minLength": -1}, "minLength must be an integer of at least 0", "/minLength"),
    ({"maxItems": 1.5}, "maxItems must be an integer of at least 0", "/maxItems"),
    ({"pattern": 3}, "pattern must be a string", "/pattern"),
]


@pytest.mark.parametrize(("schema", "reason", "place"), REFUSED, ids=str)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: dict[str, Any], reason: str, place: str) -> None:
    with pytest.raises(SchemaError, match=r"^cannot be used: ") as caught:
        reduced({"type": "object", "properties": {"a b": {"type": "array", "items": schema}}})
    assert reason in str(caught.value) and f"(at #/properties/a b/items{place})" in str(caught.value)
    with pytest.raises(RequestError) as error:
        StructuredOutputs(json=schema).validate()
    assert error.value.field == "structured_outputs.json" and reason in error.value.message


def test_a_schema_that_demands_nothing_allows_any_json() -> None:
    for schema in ({}, "{}", {"title": "Anything"}, {"type": None}):
        StructuredOutputs(json=schema).validate()
        assert StructuredOutputs(json=schema).plain().json == "{}"


def test_look_around_is_told_from_what_resembles_it() -> None:
    for pattern in (r"\(?=", r"(?:a)=", "(?i)a", "(a)?=b", r"[(]?<=", r"\\\(?!"):
        assert reduced({**STRING, "pattern": pattern})["pattern"] == pattern


def tagged(kind: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": kind} | more, "required": ["kind"]}


DEFINITIONS = {
    "X": OBJECT,
    "S": STRING,
    "N": {"anyOf": [NULL, {"$ref": "#/$defs/S"}]},
    "A": tagged({"const": "a"}),
    "Loop": {"$ref": "#/$defs/Loop"},
    "B": {"allOf": [tagged({"enum": ["b", "c"]}), {"title": "more"}]},
}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("branches", "disjoint"),
    [
        ([STRING, NULL], True),
        ([NULL, ref("X")], True),
        ([STRING, ref("X"), INTEGER], True),
        ([ref("S"), ref("X")], True),
        ([ref("N"), INTEGER], True),
        ([ref("N"), STRING], False),
        ([{"type": ["string", "null"]}, INTEGER], True),
        ([{"type": ["string", "null"]}, ref("N")], False),
        ([INTEGER, {"type": "number"}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": 1}, {"const": 2}], True),
        ([{"const": "a"}, {"enum": ["b", 1]}], True),
        ([{"enum": ["a", "b"]}, {"enum": ["b"]}], False),
        ([{"const": True}, {"const": 1}], True),
        ([{"const": [1]}, STRING], True),
        ([{"enum": ["a"]}, STRING], False),
        ([tagged({"const": "a"}), tagged({"const": "b"})], True),
        ([ref("A"), ref("B")], True),
        ([tagged({"const": "a"}), tagged(STRING)], False),
        ([tagged(INTEGER), tagged(STRING)], True),
        ([{"properties": {"kind": {"const": 1}}, "required": ["kind"]}, tagged({"const": 2})], False),
        ([{"type": "object", "properties": {"kind": {"const": 1}}}, tagged({"const": 2})], False),
        ([ref("Loop"), STRING], False),
        ([ref("Nowhere"), STRING], False),
        ([True, STRING], False),
        ([False, STRING], True),
        ([{}, NULL], False),
        ([OBJECT, {"type": "array"}], True),
        ([STRING], True),
        ([], True),
    ],
    ids=str,
)
def test_branches_that_exclude_one_another(branches: list[Any], disjoint: bool) -> None:
    root = {"oneOf": branches, "$defs": DEFINITIONS}
    assert Exclusions(by_pointer(root)).hold(branches) == disjoint
    if disjoint:
        assert reduced(root) == {"anyOf": branches, "$defs": reduced({"$defs": DEFINITIONS})["$defs"]}
    else:
        with pytest.raises(SchemaError, match="use anyOf"):
            reduced(root)


def test_a_one_of_beside_an_any_of_is_a_part_of_an_all_of() -> None:
    schema = {"oneOf": [STRING, NULL], "anyOf": [STRING, INTEGER], "allOf": [{"minLength": 1}]}
    expected = {"anyOf": [STRING, INTEGER], "allOf": [{"minLength": 1}, {"anyOf": [STRING, NULL]}]}
    assert reduced(schema) == expected


def needs(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: ref(name)}, "required": [name]}


@pytest.mark.parametrize(
    "schema",
    [
        {**ref("a"), "$defs": {"a": needs("b"), "b": needs("a")}},
        {**ref("a"), "$defs": {"a": ref("a")}},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "array", "minItems": 2, "prefixItems": [STRING, {"$ref": "#"}]},
        {"anyOf": [ref("a"), ref("b")], "$defs": {"a": needs("a"), "b": {"allOf": [STRING, ref("a")]}}},
        {"type": "object", "properties": {"a/b~c": {"$ref": "#"}}, "required": ["a/b~c"]},
    ],
    ids=str,
)
def test_a_schema_without_a_finite_value_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="no finite value"):
        reduced(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": {"$ref": "#"}}},
        {"type": "object", "properties": {"x": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["x"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#"}, NULL]}},
        {"type": ["object", "null"], "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"anyOf": [ref("a"), NULL], "$defs": {"a": needs("a")}},
        {"$ref": "#/somewhere/else"},
        {"$ref": "#anchor"},
        {"type": "object", "required": ["free"]},
        {},
        {"enum": [1], "properties": {"x": {"$ref": "#"}}},
    ],
    ids=str,
)
def test_a_schema_with_a_finite_value_passes(schema: dict[str, Any]) -> None:
    assert reduced(schema) == schema


def test_the_limit_counts_what_the_grammar_needs() -> None:
    many = {f"p{i}": {**STRING, "description": "x" * 900, "title": f"P {i}"} for i in range(100)}
    StructuredOutputs(json={"type": "object", "properties": many}).validate()
    plain = StructuredOutputs(json={"type": "object", "properties": many}).plain()
    assert isinstance(plain.json, str) and len(plain.json) < 4000
    with pytest.raises(RequestError, match="at most 65536 bytes without its annotations"):
        StructuredOutputs(json={"enum": ["x" * 900 + str(i) for i in range(100)]}).validate()
    with pytest.raises(RequestError, match="at most 1048576 bytes"):
        StructuredOutputs(json={"description": "x" * (1 << 20)}).validate()


def test_the_limit_does_not_count_what_is_spelled_out_for_the_library() -> None:
    days = {f"day{i}": {**STRING, "format": "date-time"} for i in range(1000)}
    plain = StructuredOutputs(json={"type": "object", "properties": days})
    plain.validate()
    assert len(str(plain.plain().json)) > 1 << 16


def chain(length: int, name: str) -> dict[str, Any]:
    """Definitions that each name the next one twice."""
    links = {f"l{i}": {name: [ref(f"l{i + 1}"), ref(f"l{i + 1}")]} for i in range(length)}
    return links | {f"l{length}": STRING}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [ref("a"), ref("b")], "$defs": {n: {"anyOf": [ref("a"), ref("b")]} for n in "ab"}},
        {"oneOf": [ref("l0"), ref("l0")], "$defs": chain(30, "anyOf")},
        {"oneOf": [ref("l0"), STRING], "$defs": chain(30, "allOf")},
        {"oneOf": [{**OBJECT, "minProperties": i} for i in range(1000)]},
        {"oneOf": [{**OBJECT, "properties": {f"p{i}": {"const": i}}, "required": [f"p{i}"]} for i in range(1000)]},
        {"oneOf": [NULL, STRING, STRING]},
        {"oneOf": [{"const": 1}, {"enum": [2, 3]}, {"enum": [3, 4]}]},
    ],
    ids=["circle", "chain", "chain of allOf", "many", "tags of their own", "types", "constants"],
)
def test_proofs_that_would_take_hours_are_given_up(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="use anyOf"):
        reduced(schema)


def two_tags(kind: int, version: int) -> dict[str, Any]:
    tags = {"k": {"const": kind}, "v": {"const": version}}
    return {**OBJECT, "properties": tags, "required": ["k", "v"]}


def test_long_unions_and_chains_pass_in_time() -> None:
    """All requests of a front end wait for it; in quadratic time, these would take it minutes."""
    kinds = {f"K{i}": tagged({"const": i}) for i in range(400)}
    for schema in (
        {"oneOf": [{"const": i} for i in range(4000)]},
        {"oneOf": [ref(name) for name in kinds], "$defs": kinds},
        {"oneOf": [NULL, *(ref(name) for name in kinds), STRING], "$defs": kinds},
        {"oneOf": [*({"const": i} for i in range(2000)), STRING, NULL]},
        {"oneOf": [{"const": i} for i in range(2000)] + [{"const": str(i)} for i in range(2000)]},
        {"oneOf": [two_tags(i % 20, i // 20) for i in range(400)]},
        {"oneOf": [two_tags(i, 0) for i in range(300)] + [{**OBJECT, "properties": {"k": STRING}, "required": ["k"]}]},
        {"$ref": "#/$defs/l0", "$defs": {f"l{i}": ref(f"l{i + 1}") for i in range(1500)} | {"l1500": STRING}},
    ):
        assert "oneOf" not in reduced(schema)


def test_deep_schemas_are_refused_or_pass() -> None:
    schema: dict[str, Any] = {**STRING, "title": "T"}
    for _ in range(100):
        schema = {"type": "array", "items": schema, "title": "T"}
    assert "title" not in json.dumps(reduced(schema))
    with pytest.raises(SchemaError, match="nested too deeply"):
        reduced('{"items":' * 100_000 + "{}" + "}" * 100_000)
