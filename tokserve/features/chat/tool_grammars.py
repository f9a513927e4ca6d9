"""Structured outputs that constrain an output to tool calls, in a form that `parsing` can parse.

A forced call is a JSON schema, so it works with every model: for a named function the output is its arguments, for
"required" a JSON list of {"name", "parameters"}.  Where a model may either call or answer in some form, its calls are
in its own format, and one grammar in llguidance's dialect of Lark has both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from tokserve.features.chat.output_format import ToolFormat
from tokserve.protocol import jsonschema
from tokserve.protocol.params import GRAMMAR_BYTES, WHITE, StructuredOutputs
from tokserve.text.tokenizer import Tokenizer

Functions = Mapping[str, dict[str, Any]]  # the JSON schemas of the arguments, by name
SPACES = r"\x20?"  # between the parts of a forced call: more would let a weak model write spaces without end
ONE_SPACE = {"whitespace_pattern": SPACES}
GAP = r"/[ \n]{1,2}/"  # between calls, and between the parts of a call that are not JSON
VALUE = r"/(.|\n)*<\/parameter>/"  # any text up to the first end tag
OPEN_ENDED = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
DEFINITIONS = ("$defs", "definitions")
VALUE_END = r'"\n</parameter>"'
SLASHED = {"/": r"\/", "\n": r"\n"}  # escapes in a regex between slashes
_NAME = re.compile(r"[\w.:-]+")


class NotExpressible(ValueError):
    """The tools cannot be expressed as a grammar."""


def arguments(schema: dict[str, Any]) -> StructuredOutputs:
    """Only the arguments of a function with this schema."""
    return _json(_closed(schema))


def list_of_calls(functions: Functions, *, max_calls: int) -> StructuredOutputs:
    """[{"name": ..., "parameters": ...}, ...] of at most `max_calls` calls."""
    return _json(_list_of(functions, "parameters", max_calls))


def answer_or_calls(
    answer: StructuredOutputs, form: ToolFormat, functions: Functions, tokenizer: Tokenizer, *, max_calls: int
) -> StructuredOutputs:
    """A valid `answer`, or at most `max_calls` calls in the model's format.  Raises `NotExpressible`."""
    # a text may begin either: the lexer needs the same white space in both
    shared = form.bare and answer.kind in ("json", "json_object")
    answer = answer.plain()
    calls = _CallRules(form, tokenizer, _white(answer) if shared else ONE_SPACE)
    return grammar_of({"start": "answer | calls", "answer": rule_of(answer)} | calls.rules(functions, max_calls))


def text_or_calls(form: ToolFormat, functions: Functions, tokenizer: Tokenizer, *, parallel: bool) -> StructuredOutputs:
    """Any text in which everything that begins as a call is a valid call; not for `bare` formats.  Raises
    `NotExpressible`."""
    calls = _CallRules(form, tokenizer, ONE_SPACE)
    return grammar_of(calls.text_with_calls("*" if parallel else "?") | calls.rules(functions, None if parallel else 1))


def grammar_of(rules: Mapping[str, str]) -> StructuredOutputs:
    """The grammar with these rules, of which "start" is one."""
    return StructuredOutputs(grammar="\n".join(f"{name}: {rule}" for name, rule in rules.items()))


def rule_of(answer: StructuredOutputs) -> str:
    """The right side of a rule for structured outputs, which are `plain`."""
    if answer.regex is not None:
        written = re.sub(r"\\.|/|\n", lambda match: SLASHED.get(match[0], match[0]), answer.regex, flags=re.DOTALL)
        return f"/{written or '()'}/"
    if answer.choice is not None:
        return " | ".join(map(literal, answer.choice))
    if answer.grammar is not None:
        return f"%lark {{\n{answer.grammar}\n}}"
    assert not isinstance(answer.json, dict)  # it is plain
    return _embedded(json.loads(answer.json or '{"type": "object"}'), _white(answer))


def _white(form: StructuredOutputs) -> dict[str, Any]:
    """llguidance's options for the white space between the parts of JSON."""
    if form.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITE if form.whitespace_pattern is None else form.whitespace_pattern}


def _embedded(schema: dict[str, Any], white: dict[str, Any]) -> str:
    """A schema inside a grammar; character classes of its patterns mean the same as in `StructuredOutputs`."""
    text = json.dumps(schema | {"x-guidance": white}, ensure_ascii=False)
    if '"pattern' in text:
        copy = json.loads(text)
        jsonschema.spell_classes(copy, unicode=False)
        text = json.dumps(copy, ensure_ascii=False)
    return f"%json {text}"


def token_ranges(ids: Iterable[int]) -> str:
    """Token ids as ranges in Lark's brackets."""
    ranges: list[list[int]] = []
    for token in sorted(ids):
        if ranges and ranges[-1][1] == token - 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return ",".join(f"{first}-{last}" for first, last in ranges)


def literal(text: str) -> str:
    """The text, as a grammar writes one."""
    return json.dumps(text).replace("\x7f", r"\u007f")


class _CallRules:
    """Grammar rules of calls in one format, for one tokenizer.  `white`: white space between the parts of JSON."""

    def __init__(self, form: ToolFormat, tokenizer: Tokenizer, white: dict[str, Any]) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._white = white
        self._definitions: dict[tuple[str, str], list[str] | None] = {}  # alternatives by function and reference
        self._extra_rules: dict[str, str] = {}  # rules of the definitions

    def text_with_calls(self, often: str) -> dict[str, str]:
        """The rule "start", any text with calls in it, and the rules that it needs besides `rules`."""
        begins = [*self._form.frames[:1], *self._form.opens]
        tokens = [token for token in map(self._token, begins) if token is not None]
        if len(tokens) == len(begins):
            return {"start": f"free (calls free){often}", "free": f"<[^{token_ranges(tokens)}]>*"}
        added = token_ranges(self._tokenizer.added_ids)  # a lexer's text contains no added tokens
        others = "(TEXT added)*" if added else ""
        start = {"start": f"{others} (head rest {others}){often} TEXT", "TEXT": r"/(.|\n)*/"}
        return start | {"head[lazy]": f"TEXT {self._marker(begins[0])}"} | ({"added": f"<[{added}]>"} if added else {})

    def rules(self, functions: Functions, max_calls: int | None) -> dict[str, str]:
        """The rules "calls", "rest" (calls after the first marker), and those that they need.  `max_calls` None: any
        number.  Where the format has lists of calls, each call may be a list."""
        form, size, limit = self._form, len(json.dumps(functions)), GRAMMAR_BYTES["grammar"]
        if size > limit:  # the grammar would be larger and be refused later
            raise NotExpressible(f"the functions have {size} bytes, and a grammar at most {limit}")
        opens, closes, *frames = map(self._marker, (form.opens[0], form.closes, *form.frames))
        often = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
        more = "" if max_calls == 1 else f"(gap? call){often}"
        rules = {
            "call": f"{opens} inside",
            "inside": f"gap? body gap? {closes}" if closes else "gap? body",
            "gap": GAP,
            "calls": f"{frames[0] if frames else opens} rest",
            "rest": f"call {more} {frames[1]}" if frames else f"inside {more}",
        }
        if form.bare:
            rules["calls"] += " | body" + ("" if max_calls == 1 else f' (gap? ";" gap? body){often}')
        if form.body == "xml":
            bodies = [self._element(name, schema) for name, schema in functions.items()]
            return rules | {"body": " | ".join(bodies), "value[lazy]": VALUE} | self._extra_rules
        if form.body == "json":
            return rules | {"body": self._json(_any_of(functions, "parameters" if form.bare else "arguments"))}
        separator = f"{self._marker(form.separator)}?" if form.separator else ""
        bodies = [f"{literal(_name(f))} {separator} {self._json(_closed(schema))}" for f, schema in functions.items()]
        if not form.closes:  # the format of Mistral's first models
            bodies.append(self._json(_list_of(functions, "arguments", max_calls)))
        return rules | {"body": " | ".join(bodies)}

    def _marker(self, text: str) -> str:
        token = self._token(text)
        if token is not None:
            return f"<[{token}]>"
        return literal(text) if text else ""

    def _token(self, text: str) -> int | None:
        token = self._tokenizer.id_of(text)
        return token if token in self._tokenizer.added_ids else None

    def _json(self, schema: dict[str, Any]) -> str:
        return _embedded(schema, self._white)

    # elements

    def _element(self, name: str, schema: dict[str, Any]) -> str:
        """<function=NAME>, a <parameter=KEY> element for each property in their order, </function>."""
        parsed = _parse_schema(schema, name)
        if more := OPEN_ENDED & schema.keys() - {"additionalProperties"}:
            raise NotExpressible(f"the parameters of {name!r} are defined by {min(more)} and not by their names")
        parts = [literal(f"<function={_name(name)}>\n")]
        for key, inner in parsed.properties.items():
            alternatives = self._alternatives(inner, schema, name)
            if alternatives == []:
                raise NotExpressible(f"the parameter {key!r} of {name!r} has no possible value")
            value = "value" if alternatives is None else f"({' | '.join(alternatives)}) {VALUE_END}"
            part = f'{literal(f"<parameter={_name(key)}>")} "\\n" {value} "\\n"'
            parts.append(part if key in parsed.required else f"({part})?")
        if parsed.additional:
            parts.append(r'("<parameter=" /[\w.:-]+/ ">\n" value "\n")*')
        return " ".join([*parts, '"</function>"'])

    def _alternatives(self, schema: Any, root: dict[str, Any], name: str) -> list[str] | None:
        """The alternatives for the value of a parameter; None: any text, because it may be a string."""
        if schema is True:
            return None
        parsed = _parse_schema(schema, name)
        if parsed.ref is not None:
            return self._definition(parsed.ref, root, name)
        values = parsed.enum if parsed.const is UNSET else [parsed.const]
        if values is not None:
            return [literal(value if isinstance(value, str) else json.dumps(value)) for value in values]
        if parsed.any_of or parsed.one_of:
            inner = [self._alternatives(value, root, name) for value in parsed.any_of or parsed.one_of]
            return None if None in inner else [way for alternatives in inner for way in alternatives or ()]
        if "string" in parsed.type:
            return None
        needed = DEFINITIONS if '"$ref"' in json.dumps(schema) else ()
        return [self._json(schema | {key: root[key] for key in needed if key in root})]

    def _definition(self, ref: str, root: dict[str, Any], name: str) -> list[str] | None:
        """The alternatives of a definition, as a separate rule: a large definition is in the grammar only once."""
        if (name, ref) not in self._definitions:
            self._definitions[name, ref] = []  # a reference back to this definition adds nothing
            alternatives = self._alternatives(_resolve_ref(ref, root, name), root, name)
            if alternatives:
                rule = f"definition{len(self._extra_rules)}"
                self._extra_rules[rule] = " | ".join(alternatives)
                alternatives = [rule]
            self._definitions[name, ref] = alternatives
        return self._definitions[name, ref]


class _Schema(msgspec.Struct):
    """The keywords of a JSON schema that decide how an element is written."""

    type: str | list[str] = "string"
    properties: dict[str, Any] = {}
    required: list[str] = []
    additional: Any = msgspec.field(name="additionalProperties", default=False)
    enum: list[Any] | None = None
    const: Any = UNSET
    any_of: list[Any] = msgspec.field(name="anyOf", default=[])
    one_of: list[Any] = msgspec.field(name="oneOf", default=[])
    ref: str | None = msgspec.field(name="$ref", default=None)


def _parse_schema(schema: Any, name: str) -> _Schema:
    try:
        return msgspec.convert(schema, _Schema)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise NotExpressible(f"the parameters of {name!r} are not a JSON schema: {error}") from None


def _resolve_ref(ref: str, root: dict[str, Any], name: str) -> Any:
    path = ref.split("/")
    if len(path) == 3 and path[0] == "#" and path[1] in DEFINITIONS:
        definitions = root.get(path[1])
        if isinstance(definitions, dict) and path[2] in definitions:
            return definitions[path[2]]
    raise NotExpressible(f"the parameters of {name!r} refer to {ref}")


def _name(name: str) -> str:
    """A name that `parsing` can parse without quotes."""
    if not _NAME.fullmatch(name):
        raise NotExpressible(f"{name!r} is not a name that the format can have")
    return name


def _json(schema: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(json=schema, whitespace_pattern=SPACES)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has only the properties of `schema`, unless that says otherwise."""
    closed = {} if OPEN_ENDED & schema.keys() else {"additionalProperties": False}
    return schema | closed | {"type": "object"}


def _list_of(functions: Functions, key: str, max_calls: int | None) -> dict[str, Any]:
    """The schema of a list of calls with their arguments under `key`."""
    call = _any_of(functions, key)
    limit = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}


def _any_of(functions: Functions, key: str) -> dict[str, Any]:
    """The schema of one call."""
    pointers = {name: f"#/$defs/{quote(name.replace('~', '~0').replace('/', '~1'))}" for name in functions}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": pointer}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, pointer in pointers.items()
    ]
    definitions = {name: _rebase_refs(_closed(functions[name]), pointer) for name, pointer in pointers.items()}
    return {"anyOf": calls, "$defs": definitions}


def _rebase_refs(schema: Any, pointer: str) -> Any:
    """A schema moved to `pointer` of another schema: its references are rebased."""
    if isinstance(schema, list):
        return [_rebase_refs(value, pointer) for value in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _rebase_refs(value, pointer) for name, value in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = pointer + target[1:]
    return moved
