"""Grammars over the demo model's tokenizer: allowed tokens, refusals, and the cost of hostile grammars."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from tests.engine.grammars import Matcher
from tokserve.base.errors import RequestError
from tokserve.checkpoint import DEMO_DIR
from tokserve.features.grammar.grammar import LIMITS, STATE_BYTES, Compiler, Cost, GrammarState
from tokserve.protocol.params import StructuredOutputs

WIDTH = 300  # of the logits: more than the tokenizer has
EOS = 287
SPECIAL = {285, 286, 287}
ANY = StructuredOutputs(regex=r"(.|\n)*")


@cache
def compiler() -> Compiler:
    return Compiler(str(DEMO_DIR), WIDTH, [EOS])


@cache
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))


def matcher(*, ends: bool = True, **requested: Any) -> Matcher:
    outputs = StructuredOutputs(**requested)
    outputs.validate()
    return Matcher(compiler().compile(outputs.plain()), ends=ends)


def allowed(state: Matcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(state.bits.view(np.uint8), bitorder="little")).tolist()


def written(state: Matcher, seed: int, most: int = 200) -> str | None:
    """What a model of random weights writes; None if it does not come to an end."""
    chance, tokens = random.Random(seed), []
    while len(tokens) < most:
        token = chance.choice(allowed(state))
        if token == EOS:
            return tokenizer().decode(tokens, skip_special_tokens=False)
        tokens.append(token)
        state.advance(token)
    return None


def spelled(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def test_the_mask_follows_the_text_and_ends_with_eos() -> None:
    state = matcher(choice=["yes", "no"])
    assert state.bits.dtype == np.uint32 and state.bits.shape == (-(-WIDTH // 32),)
    for token in spelled("yes"):
        assert token in allowed(state) and EOS not in allowed(state) and not state.complete
        state.advance(token)
    assert allowed(state) == [EOS] and state.complete


def test_the_vocabulary_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library holds the interpreter's lock meanwhile: for seconds with a large vocabulary."""
    tokenizers_made: list[llguidance.LLTokenizer] = []
    library_tokenizer = llguidance.LLTokenizer

    def counting(*args: Any, **options: Any) -> llguidance.LLTokenizer:
        tokenizers_made.append(library_tokenizer(*args, **options))
        return tokenizers_made[-1]

    monkeypatch.setattr(llguidance, "LLTokenizer", counting)
    narrow = Compiler(str(DEMO_DIR), 1, [EOS])  # a head narrower than the tokenizer
    for text in ("a", "b"):
        narrow.compile(StructuredOutputs(choice=[text]))
    assert len(tokenizers_made) == 1
    assert (
        tokenizers_made[0].vocab_size
        == library_tokenizer((DEMO_DIR / "tokenizer.json").read_text(), slices=[]).vocab_size
    )


def test_without_eos_nothing_is_left_at_the_end() -> None:
    state = matcher(regex="a+b?", ends=False)
    state.advance(*spelled("a"))
    assert EOS not in allowed(state) and not state.complete
    state.advance(*spelled("b"))
    assert allowed(state) == [] and state.complete


def test_special_tokens_and_rows_beyond_the_tokenizer_are_forbidden() -> None:
    assert set(allowed(matcher(regex=r"(.|\n)*"))) & (SPECIAL | set(range(285, WIDTH))) == {EOS}


@pytest.mark.parametrize(
    ("requested", "text"),
    [
        ({"json": {"const": "x<|im_end|>y"}}, '"x<|im_end|>y"'),
        ({"json": {"const": "<|im_start|>"}, "disable_any_whitespace": True}, '"<|im_start|>"'),
        ({"json": '{"enum": ["\\u003c|im_end|>"]}'}, '"<|im_end|>"'),
        ({"choice": ["a<|im_end|>"]}, "a<|im_end|>"),
        ({"regex": r"<\|im_end\|>/{2}"}, "<|im_end|>//"),
        ({"grammar": 'start: "<|im_end|>" "x"'}, "<|im_end|>x"),
    ],
)
def test_a_text_may_read_like_a_special_token(requested: dict[str, Any], text: str) -> None:
    compiler().try_out(StructuredOutputs(**requested).plain())
    assert all(written(matcher(**requested), seed) == text for seed in range(8))


def test_a_token_that_may_not_come_is_an_error() -> None:
    with pytest.raises(RequestError):
        matcher(choice=["a"]).advance(*spelled("b"))


def test_matchers_of_one_grammar_are_independent() -> None:
    actual = compiler().compile(StructuredOutputs(choice=["ab", "ba"]))
    one, other = Matcher(actual, ends=True), Matcher(actual, ends=True)
    one.advance(*spelled("a"))
    assert allowed(one) == spelled("b") and set(allowed(other)) >= {*spelled("a"), *spelled("b")}


def accepts(text: str, **requested: Any) -> bool:
    """Whether a whole output may be this text."""
    state = matcher(**requested)
    for token in spelled(text):
        if token not in allowed(state):
            return False
        state.advance(token)
    return EOS in allowed(state)


SEVEN = "\u0667"  # a digit of another script
LETTER, SPACE = "\u00e9", "\u2003"


@pytest.mark.parametrize(
    ("pattern", "plain", "other"),
    [
        (r"\d", "7", SEVEN),
        (r"\w", "e", LETTER),
        (r"a\sb", "a b", f"a{SPACE}b"),
        (r"[\d.]+", "7.", f"{SEVEN}."),
        (r"[^\W]", "e", LETTER),
    ],
)
def test_classes_are_ascii_unless_unicode_classes_is_set(pattern: str, plain: str, other: str) -> None:
    for requested in (
        {"regex": f'"{pattern}"'},
        {"json": {"type": "string", "pattern": f"^{pattern}$"}},
        {"json": json.dumps({"type": "string", "pattern": f"^{pattern}$"})},
    ):
        assert accepts(f'"{plain}"', **requested) and accepts(f'"{plain}"', **requested, unicode_classes=True)
        assert not accepts(f'"{other}"', **requested) and accepts(f'"{other}"', **requested, unicode_classes=True)


def test_a_negated_class_has_what_the_class_has_not() -> None:
    assert accepts(SEVEN, regex=r"\D") and not accepts(SEVEN, regex=r"\D", unicode_classes=True)


NESTED = {
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Point"}},
    "required": ["at"],
}


def test_objects_are_closed_on_request() -> None:
    for text in ('{"at": {"x": 1}, "more": 2}', '{"at": {"x": 1, "more": 2}}'):
        assert accepts(text, json=NESTED)
        assert not accepts(text, json=NESTED, disable_additional_properties=True)
    assert accepts('{"at": {"x": 1}}', json=NESTED, disable_additional_properties=True)


@pytest.mark.parametrize(
    "keyword",
    [
        {"uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 1}},
        {"contains": {"type": "string"}},
        {"propertyNames": {"pattern": "a"}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"anyOf": [{}], "unevaluatedProperties": False},
        {"$dynamicRef": "#a"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    ],
    ids=str,
)
def test_keywords_that_docs_name_as_not_supported(keyword: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs\.json cannot be used"):
        matcher(json=keyword)
    docs = (Path(__file__).parents[2] / "docs" / "token-api.md").read_text()
    begin = "- Keywords of JSON Schema that are not supported"
    (line,) = [line for line in docs.splitlines() if line.startswith(begin)]
    assert f"`{list(keyword)[-1]}`" in line or ("if" in keyword and "`if`/`then`/`else`" in line)


@pytest.mark.slow
@given(st.lists(st.text(max_size=8), min_size=1, max_size=4), st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_choices(choices: list[str], seed: int) -> None:
    assert written(matcher(choice=choices), seed) in choices


ATOMS = st.sampled_from(["a", "b", "[a-f]", "[^a-z ]", r"\.", " ", "é", "/", '"'])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        inner.map(lambda one: f"({one})?"),
        inner.map(lambda one: f"({one}){{1,3}}"),
    ),
    max_leaves=6,
)


@given(REGEXES, st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_regexes(regex: str, seed: int) -> None:
    text = written(matcher(regex=regex), seed, most=2000)
    assert text is not None and re.fullmatch(regex, text), (regex, text)


LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 40}),
    st.integers(0, 4).map(lambda size: {"type": "string", "maxLength": size}),
    st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.text(st.characters(codec="ascii"), min_size=1, max_size=3), inner, max_size=3).map(
            lambda parts: {
                "type": "object",
                "properties": parts,
                "required": list(parts),
                "additionalProperties": False,
            }
        ),
        inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}),
        st.tuples(inner, inner).map(lambda pair: {"anyOf": list(pair)}),
    ),
    max_leaves=4,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON Schema that these tests use."""
    if "anyOf" in schema:
        return any(fits(value, branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        parts = schema["properties"]
        return isinstance(value, dict) and value.keys() == parts.keys() and all(fits(value[k], parts[k]) for k in parts)
    if kind == "array":
        return isinstance(value, list) and 1 <= len(value) <= 2 and all(fits(item, schema["items"]) for item in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return value is None if kind == "null" else isinstance(value, bool)


@given(SCHEMAS, st.integers(0, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_schemas(schema: dict[str, Any], seed: int, as_text: bool) -> None:
    source = json.dumps(schema) if as_text else schema
    text = written(matcher(json=source, disable_any_whitespace=True), seed, most=2000)
    assert text is not None and fits(json.loads(text), schema), (schema, text)


def test_white_space_between_json_tokens() -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    spaced, tight = "[1 , 1]", "[1,1]"

    def takes(text: str, **options: Any) -> bool:
        state = matcher(json=schema, **options)
        try:
            for token in spelled(text):
                state.advance(token)
        except RequestError:
            return False
        return state.complete

    assert takes(tight) and takes(spaced)
    assert takes(f"[1,{' ' * 20}1]") and not takes(f"[1,{' ' * 21}1]")
    assert takes(tight, disable_any_whitespace=True) and not takes(spaced, disable_any_whitespace=True)
    assert takes(spaced, whitespace_pattern="[ ]{0,1}") and not takes("[1  ,1]", whitespace_pattern="[ ]{0,1}")


@pytest.mark.parametrize(
    ("requested", "field"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"json": {"type": "foo"}}, "json"),
        ({"json": {"not": {}}}, "json"),
        ({"json": {"$ref": "#"}}, "json"),
        ({"grammar": 'root = "a"'}, "grammar"),
        ({"grammar": "start: start"}, "grammar"),
        ({"grammar": "start: " + "(" * 5000}, "grammar"),
        ({"json_object": True, "whitespace_pattern": "("}, "json_object"),
        ({"regex": "(" * 5000}, "regex"),
        ({"json": '{"items":' * 3000 + "{}" + "}" * 3000}, "json"),
    ],
)
def test_what_the_library_does_not_take_is_named(requested: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs.{field}") as caught:
        matcher(**requested)
    assert caught.value.field == f"structured_outputs.{field}" and len(caught.value.message) < 500


@pytest.mark.parametrize(
    "requested",
    [
        {"regex": "(((a{1,1000}){1,1000}){1,1000})"},
        {"regex": ".*a.{2000}"},
        {"regex": "(a?){700}a{700}"},
        {"json": {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}},
        {"json": {"type": "string", "minLength": 10**9}},
        {"grammar": 'start: start start | "a"'},
    ],
)
def test_large_grammars_are_matched_or_refused(requested: dict[str, Any]) -> None:
    try:
        state = matcher(**requested)
        for _ in range(20):
            state.advance(allowed(state)[0])
    except RequestError as error:
        assert any(word in error.message for word in ("limit", "too many", "max")), error.message


def test_without_a_tokenizer_structured_outputs_are_refused(tmp_path: Path) -> None:
    for directory in (None, str(tmp_path)):
        with pytest.raises(RequestError, match="needs a tokenizer"):
            Compiler(directory, WIDTH, [EOS]).compile(StructuredOutputs(regex="a"))


HOPELESS = [  # they compile, and their second token comes to a limit
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}},
    {"regex": "(a|b|ab)*" * 1800},
    {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a"'},
]


@pytest.mark.parametrize("requested", HOPELESS, ids=["optional", "regex", "doubling"])
def test_a_trial_refuses_what_fails_with_its_second_token(requested: dict[str, Any]) -> None:
    outputs = StructuredOutputs(**requested)
    outputs.validate()
    (field,) = requested
    with pytest.raises(RequestError, match=f"^structured_outputs.{field} cannot be used: its texts come to a limit"):
        compiler().try_out(outputs.plain())


def test_a_grammar_counts_as_larger_the_longer_it_is_followed() -> None:
    state = compiler().compile(ANY)
    state.cost = Cost(size=1000, per_token=10.0)
    GrammarState(state, ends=True).accept(5)
    assert state.size == 1010
    state.num_accepted = 10**9
    assert state.size == 1000 + STATE_BYTES * LIMITS["max_lexer_states"]


@pytest.mark.parametrize("width", [285, 288, 320])
def test_the_models_vocabulary_may_be_narrower_or_wider_than_the_tokenizers(width: int) -> None:
    eos = 3  # any token of the model, also one outside the tokenizer
    state = Matcher(Compiler(str(DEMO_DIR), width, [eos]).compile(StructuredOutputs(choice=["b"])), ends=True)
    assert allowed(state) == spelled("b")
    state.advance(*spelled("b"))
    assert allowed(state) == [eos] and state.complete
    assert max(allowed(Matcher(Compiler(str(DEMO_DIR), width, []).compile(ANY), ends=True))) < width


@pytest.mark.parametrize("inside", [False, True])
def test_no_space_is_put_before_a_text(tmp_path: Path, inside: bool) -> None:
    """The library's default for byte-level tokenizers; grammars with a text that has only one form were refused."""
    state = tokenizers.Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    spaced = pre_tokenizers.ByteLevel(add_prefix_space=True)
    state.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), spaced]) if inside else spaced
    state.save(str(tmp_path / "tokenizer.json"))
    for requested in ({"json_object": True}, {"choice": ["the cat", "a dog"]}):
        outputs = StructuredOutputs(**requested)
        outputs.validate()
        assert Compiler(str(tmp_path), WIDTH, [EOS]).try_out(outputs.plain()).seconds > 0


def test_a_grammar_in_ebnf() -> None:
    grammar = 'root ::= "{" pair ("," pair)* "}"\npair ::= [a-c]+ ":" number\nnumber ::= [0-9]{1,3}'
    for text, taken in (("{a:1}", True), ("{ab:12,c:123}", True), ("{a:1234}", False), ("{d:1}", False), ("{}", False)):
        assert accepts(text, grammar=grammar) == taken
