"""Grammars of JSON schemas allow no other values than the schemas: numbers near bounds, large integers, dates."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from typing import Any

import pytest

from tests.engine.grammars import Matcher
from tests.engine.test_grammar import EOS, allowed, compiler, matcher, spelled
from tokserve.base.errors import RequestError
from tokserve.protocol.params import StructuredOutputs

NUMBER, INTEGER, STRING = {"type": "number"}, {"type": "integer"}, {"type": "string"}
INT64 = 2**63
ENDS = (-100, -2, -1.5, -1, -0.5, 0, 0.25, 1, 1.5, 2, 100, 100.5)


def grammar(schema: dict[str, Any]) -> Any:
    outputs = StructuredOutputs(json=schema)
    outputs.validate()
    return compiler().compile(outputs.plain())


def accepts(compiled: Any, text: str) -> bool:
    state = Matcher(compiled, ends=True)
    for token in (token for letter in text for token in spelled(letter)):
        if token not in allowed(state):
            return False
        state.advance(token)
    return EOS in allowed(state)


def test_numbers_are_within_their_bounds_wherever_these_are() -> None:
    for low, high in itertools.combinations(ENDS, 2):
        if high - low > 2:  # the library does not err there, and it takes time
            continue
        for lower, upper in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            compiled = grammar(NUMBER | {lower: low, upper: high})
            for text in {f"{end}{zeros}" for end in (low, high) for zeros in ("", ".0" if end % 1 == 0 else "0")}:
                value = Fraction(text)
                is_within = (value > low or (value == low and lower == "minimum")) and (
                    value < high or (value == high and upper == "maximum")
                )
                assert is_within or not accepts(compiled, text), (lower, low, upper, high, text)
            assert accepts(compiled, str(low + (high - low) / 2)), (lower, low, upper, high)


def test_bounds_of_schemas_that_are_merged_are_those_of_one() -> None:
    compiled = grammar({"allOf": [{"$ref": "#/$defs/positive"}, {"maximum": 0.5}], "$defs": {"positive": POSITIVE}})
    assert [accepts(compiled, text) for text in ("0", "0.1", "0.5", "0.51")] == [False, True, True, False]


POSITIVE = NUMBER | {"exclusiveMinimum": 0}


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        (INTEGER | {"minimum": -INT64, "maximum": INT64 - 1}, [0, -5, INT64 - 1, 1024 - INT64], [INT64, -INT64 - 1]),
        (INTEGER | {"minimum": 0, "maximum": 2**64 - 1}, [0, INT64 - 1], [-1, 2**64]),
        (INTEGER | {"minimum": 1 - 2**53, "maximum": 2**53 - 1}, [0, 2**53 - 1, 1 - 2**53], [2**53, -(2**53)]),
        (INTEGER | {"minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
        (INTEGER | {"exclusiveMaximum": -(2**53) - 1}, [-(2**53) - 4], [-(2**53)]),
        (NUMBER | {"minimum": -3.4e38, "maximum": 3.4e38}, [0, 1.5, -1e3], []),
        ({"const": 2**53 + 2}, [2**53 + 2], [2**53]),
        ({"enum": [INT64 - 1, "a"]}, [INT64 - 1, "a"], [INT64]),
        (STRING | {"format": "date"}, ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29"]),
        (
            STRING | {"format": "date"},
            ["0004-02-29", "2024-04-30"],
            ["2024-02-30", "2024-04-31", "2024-13-01"],
        ),
        (STRING | {"format": "date", "pattern": "^2"}, ["2024-02-29"], ["1999-12-31", "2023-02-29"]),
        ({"format": "date"}, ["2024-02-29", 5], ["2023-02-29"]),
        (STRING | {"format": "time"}, ["23:59:59Z", "00:00:00.5+05:30", "12:00:00z"], ["12:00:60Z", "24:00:00Z"]),
        (STRING | {"format": "date-time"}, ["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29T12:00:60Z"]),
    ],
    ids=str,
)
def test_a_grammar_has_the_values_of_its_schema(schema: dict[str, Any], values: list[Any], others: list[Any]) -> None:
    compiled = grammar(schema)
    for value in values + others:
        assert accepts(compiled, json.dumps(value)) == (value in values), value


@pytest.mark.parametrize("value", [2**53 + 1, INT64, -INT64, 1 - INT64, 2**64 - 1, float(-INT64)])
def test_integers_that_a_grammar_would_round_are_refused_with_their_place(value: int | float) -> None:
    for schema, place in (({"const": value}, "const"), ({"enum": [1, {"id": [value]}]}, "enum")):
        with pytest.raises(
            RequestError, match=rf"{int(value)} is beyond the integers .* \(at #/properties/id/{place}\)"
        ):
            matcher(json={"type": "object", "properties": {"id": schema}})
