"""Grammar rules of the part of a call between the markers, in the notation of each format.

Arguments that are JSON follow their schema.  In the other notations a function's arguments are its properties, in
their order; a schema that does not name them cannot be expressed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokserve.features.chat.grammars.lark import embedded, in_regex, literal, spelled, up_to
from tokserve.features.chat.grammars.members import Member, demanded, sequence
from tokserve.features.chat.grammars.schemas import (
    DEFINITIONS,
    OPEN_ENDED,
    Functions,
    NotExpressible,
    Schema,
    any_of,
    closed,
    list_of,
    named_properties,
    parse_schema,
    resolve_ref,
)
from tokserve.features.chat.output_format import ToolFormat
from tokserve.text.tokenizer import Tokenizer

_NAME = re.compile(r"[\w.:-]+")
ANY_NAME = "/[A-Za-z0-9_.-]+/"  # of a parameter that no schema names; other letters are not read back in all forms
NO_TEXT = ["number", "boolean", "null", "array", "object"]
NUMBER = "/[0-9]{1,3}/"  # of a call, in an id
PYTHON = {True: "True", False: "False", None: "None"}
ANY = "any text"  # instead of a rule: a string without bounds
Alternatives = list[tuple[bool, str]]  # the ways to write a value: whether each is a string, and its rule or ANY


class CallBodies:
    """Rules of calls in one format, for one tokenizer.  `white`: white space between the parts of JSON.

    `extra`: rules that the others need.
    """

    def __init__(self, form: ToolFormat, tokenizer: Tokenizer, white: dict[str, Any]) -> None:
        self.extra: dict[str, str] = {}
        self._form = form
        self._tokenizer = tokenizer
        self._white = white
        self._definitions: dict[tuple[str, str], Alternatives] = {}  # by function and reference
        self._value = ""  # what matches an element's value that is any text, and its end

    def body(self, functions: Functions, max_calls: int | None) -> str:
        """The right side of the rule for what stands between two markers: one call, or several where a format groups
        them.  Raises NotExpressible."""
        form = self._form
        if form.body == "json":
            schema = list_of(functions, form.keys, max_calls) if form.listed else any_of(functions, form.keys)
            return self._around(self._json(schema))
        write: dict[str, Callable[[str, dict[str, Any]], str]] = {
            "named": self._named,
            "elements": self._element,
            "pythonic": self._pythonic,
            "quoted": self._quoted,
            "channels": self._message,
        }
        calls = [write[form.body](name, schema) for name, schema in functions.items()]
        if form.body == "named" and not form.closes and not form.bare:  # the format of Mistral's first models
            calls.append(self._json(list_of(functions, form.keys, max_calls)))
        if not form.grouped:
            return self._around(" | ".join(calls))
        self.extra["item"] = " | ".join(calls)
        often = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
        separator = '", "' if form.listed else r'"\n"'
        several = "item" if max_calls == 1 else f"item ({separator} item){often}"
        return self._around(f'"[" {several} "]"' if form.listed else several)

    def _around(self, body: str) -> str:
        """The body with what a format writes before the name and after the arguments."""
        form = self._form
        if not form.before and not form.after:
            return body
        before = " ".join(self._spelled(part) for part in form.before)
        if form.before and form.body in ("pythonic", "json"):
            before += r' "\n"'
        after = literal("\n" + form.after) if form.after else ""
        return f"{before} ({body}) {after}"

    def _spelled(self, text: str) -> str:
        return spelled(text, self._tokenizer)

    def _json(self, schema: dict[str, Any]) -> str:
        return embedded(schema, self._white)

    def _named(self, name: str, schema: dict[str, Any]) -> str:
        """NAME, or an id with a number, a separator, and the arguments as JSON."""
        form = self._form
        separator = self._spelled(form.separator) if form.separator else ""
        if separator and not form.before and not form.after and not form.has_ids and not form.bare:
            separator += "?"
        first = f"{literal(f'functions.{_plain(name)}:')} {NUMBER}" if form.has_ids else literal(_plain(name))
        return f"{first} {separator} {self._json(closed(schema))}"

    def _message(self, name: str, schema: dict[str, Any]) -> str:
        """A message of gpt-oss to a function."""
        header = f"<|channel|>commentary to=functions.{_plain(name)} <|constrain|>json<|message|>"
        return f"{self._spelled(header)} {self._json(closed(schema))}"

    # elements

    def _element(self, name: str, schema: dict[str, Any]) -> str:
        """The name, an element for each property in their order, and the end."""
        tags, parsed = self._form.tags, named_properties(schema, name)
        end_tag = self._spelled(tags.parameter_end)
        self._value, rules = up_to(tags.parameter_end, self._tokenizer, "value")
        self.extra |= rules
        begin = f"{tags.function}{_quoted_name(name, tags.function)}>\n" if tags.function else _plain(name)
        parts = [self._spelled(begin), *([] if tags.function else ['"\\n"?'])]
        padding = r'"\n"' if tags.padded else ""
        after = r'"\n"' if tags.function else r'"\n"?'
        members = []
        for key, inner in demanded(parsed, name).items():
            alternatives = self._alternatives(inner, schema, name)
            if not alternatives:
                raise NotExpressible(f"the parameter {key!r} of {name!r} has no possible value")
            begin = f"{tags.parameter}{_quoted_name(key, tags.parameter)}"
            ways = self._value_ways(alternatives, f"{padding} {end_tag}")
            members.append(Member(f"{self._spelled(begin)} {ways} {after}", key in parsed.required))
        other = ""
        if parsed.additional is not False and (alternatives := self._alternatives(parsed.additional, schema, name)):
            ways = self._value_ways(alternatives, f"{padding} {end_tag}")
            other = f"{self._any_tag()} {ways} {after}"
        parts.append(self._sequence(members, other, "", parsed, name))
        return " ".join([*parts, self._spelled(tags.function_end) if tags.function_end else ""])

    def _any_tag(self) -> str:
        """The tag of a parameter that no schema names, up to the end of the name.  As text it is one lexeme: the lexer
        does not go back where a name begins as another one does."""
        tag = self._form.tags.parameter
        mark = '"' if tag.endswith("name=") else ""
        written = self._spelled(tag)
        if "<[" in written:
            return f"{written} {literal(mark) if mark else ''} {ANY_NAME} {literal(mark) if mark else ''}"
        return f"/{in_regex(tag + mark)}{ANY_NAME[1:-1]}{mark}/"

    def _sequence(self, members: list[Member], other: str, comma: str, parsed: Schema, name: str) -> str:
        """The properties of an object as its schema bounds their number."""
        rule = sequence(members, other, comma, (parsed.min_properties, parsed.max_properties), self.extra)
        if rule is None:
            raise NotExpressible(f"the parameters of {name!r} cannot be as many as minProperties and maxProperties say")
        return rule

    def _value_ways(self, alternatives: Alternatives, end: str) -> str:
        """What comes after a parameter's name: the rest of its tag, one of the values, and the end tag."""
        tags = self._form.tags
        padding = r'"\n"' if tags.padded else ""
        if tags.value:
            head = f'{self._spelled(tags.key_end)} "\\n"? {self._spelled(tags.value)}'
        else:
            head = f"{literal(tags.key_end)} {padding}"
        if not tags.typed:
            rules = [rule for _, rule in alternatives]
            return f"{head} {self._value}" if ANY in rules else f"{head} ({' | '.join(rules)}) {end}"
        ways = []
        for is_string in (True, False):
            rules = [rule for kind, rule in alternatives if kind is is_string]
            attribute = literal(f' string="{"true" if is_string else "false"}"')
            if ANY in rules:
                ways.append(f"{attribute} {head} {self._value}")
            elif rules:
                ways.append(f"{attribute} {head} ({' | '.join(rules)}) {end}")
        return f"({' | '.join(ways)})"

    def _alternatives(self, schema: Any, root: dict[str, Any], name: str) -> Alternatives:
        """The alternatives for the value of a parameter, none for one that is not known yet."""
        if schema is True:
            schema = {}
        parsed = parse_schema(schema, name)
        if parsed.ref is not None:
            return self._definition(parsed.ref, root, name)
        values = parsed.values()
        if values is not None:
            return [(isinstance(one, str), literal(one if isinstance(one, str) else json.dumps(one))) for one in values]
        if parsed.any_of or parsed.one_of:
            inner = [self._alternatives(value, root, name) for value in parsed.any_of or parsed.one_of]
            return [way for alternatives in inner for way in alternatives]
        if "type" not in schema and "allOf" in schema:
            parts = schema["allOf"]
            return self._alternatives(parts[0], root, name) if len(parts) == 1 else [(True, ANY)]
        kinds = parsed.kinds() if "type" in schema else ["string", *NO_TEXT]
        others = [kind for kind in kinds if kind != "string"]
        ways = [(True, ANY)] if "string" in kinds else []
        return ways + ([(False, self._json(_with_definitions(schema | {"type": others}, root)))] if others else [])

    def _definition(self, ref: str, root: dict[str, Any], name: str) -> Alternatives:
        """The alternatives of a definition, as separate rules: a large definition is in the grammar only once."""
        if (name, ref) not in self._definitions:
            self._definitions[name, ref] = []  # a reference back to this definition adds nothing
            alternatives = self._alternatives(resolve_ref(ref, root, name), root, name)
            ways: Alternatives = []
            for is_string in (True, False):
                rules = [rule for kind, rule in alternatives if kind is is_string]
                if ANY in rules:
                    ways.append((is_string, ANY))
                elif rules:
                    rule = f"definition{len(self.extra)}"
                    self.extra[rule] = " | ".join(rules)
                    ways.append((is_string, rule))
            self._definitions[name, ref] = ways
        return self._definitions[name, ref]

    # keywords

    def _pythonic(self, name: str, schema: dict[str, Any]) -> str:
        """NAME(KEY=VALUE, ...)."""
        keywords = self._properties(schema, schema, name, "=", '", "', self._python_value)
        return f"{literal(_plain(name) + '(')} {keywords} {literal(')')}"

    def _quoted(self, name: str, schema: dict[str, Any]) -> str:
        """NAME{KEY:VALUE,...}, with strings between two markers."""
        members = self._members(schema, schema, name, 0)
        return f"{literal(_plain(name) + '{')} {members} {literal('}')}"

    def _properties(
        self,
        schema: dict[str, Any],
        root: dict[str, Any],
        name: str,
        between: str,
        comma: str,
        write: Callable[[Any, dict[str, Any], str, int], str],
        depth: int = 0,
    ) -> str:
        """The properties of an object in their order, then those that it does not name, with commas between them."""
        parsed = named_properties(schema, name)
        members = [
            Member(
                f"{literal(_plain(key) + between)} ({write(inner, root, name, depth)})",
                key in parsed.required,
            )
            for key, inner in demanded(parsed, name).items()
        ]
        allows = parsed.additional is not False
        other = f"{ANY_NAME} {literal(between)} ({write(parsed.additional, root, name, depth)})" if allows else ""
        return self._sequence(members, other, comma, parsed, name)

    def _python_value(self, schema: Any, root: dict[str, Any], name: str, depth: int) -> str:
        """A value as a literal of Python; lists and objects are written as JSON, which the parser reads as well."""
        if schema is True:
            schema = {}
        parsed = parse_schema(schema, name)
        values = parsed.values()
        if values is not None:
            return " | ".join(literal(_as_python(value)) for value in values)
        if parsed.any_of or parsed.one_of:
            return " | ".join(self._python_value(one, root, name, depth) for one in parsed.any_of or parsed.one_of)
        if "type" not in schema and not schema.keys().isdisjoint(OPEN_ENDED):
            return self._json(_with_definitions(schema, root))
        kinds = parsed.kinds() if "type" in schema else ["string", *NO_TEXT]
        words = (["True", "False"] if "boolean" in kinds else []) + (["None"] if "null" in kinds else [])
        others = [kind for kind in kinds if kind not in ("boolean", "null")]
        ways = [literal(word) for word in words]
        return " | ".join(ways + ([self._json(_with_definitions(schema | {"type": others}, root))] if others else []))

    def _members(self, schema: dict[str, Any], root: dict[str, Any], name: str, depth: int) -> str:
        """The members of an object in the notation of Gemma's models."""
        return self._properties(schema, root, name, ":", literal(","), self._quoted_value, depth)

    def _any_quoted(self) -> str:
        """The rule of any value in this notation."""
        if "anything" not in self.extra:
            self.extra["anything"] = ""  # while it is written
            pair = f'{ANY_NAME} ":" anything'
            ways = [self._quoted_kind("string", {}, {}, "", 0), self._json({"type": ["number", "boolean", "null"]})]
            ways += ['"[" (anything ("," anything)*)? "]"', f'"{{" ({pair} ("," {pair})*)? "}}"']
            self.extra["anything"] = " | ".join(ways)
        return "anything"

    def _quoted_value(self, schema: Any, root: dict[str, Any], name: str, depth: int) -> str:
        """A value in the notation of Gemma's models."""
        if schema is True or schema == {}:
            return self._any_quoted()
        if depth > 8 or not isinstance(schema, dict):
            raise NotExpressible(f"the parameters of {name!r} are not defined by their types")
        parsed, quote = parse_schema(schema, name), self._spelled(self._form.quote)
        if parsed.ref is not None or "allOf" in schema:
            raise NotExpressible(f"the parameters of {name!r} have a $ref or an allOf")
        values = parsed.values()
        if values is not None:
            ways = [
                f"{quote} {literal(one)} {quote}" if isinstance(one, str) else literal(json.dumps(one))
                for one in values
            ]
            return " | ".join(ways)
        if parsed.any_of or parsed.one_of:
            inner = parsed.any_of or parsed.one_of
            return " | ".join(f"({self._quoted_value(value, root, name, depth + 1)})" for value in inner)
        if "type" not in schema:
            raise NotExpressible(f"the parameters of {name!r} are not defined by their types")
        kinds = parsed.kinds()
        return " | ".join(self._quoted_kind(kind, schema, root, name, depth) for kind in kinds)

    def _quoted_kind(self, kind: str, schema: dict[str, Any], root: dict[str, Any], name: str, depth: int) -> str:
        quote = self._spelled(self._form.quote)
        if kind == "string":
            text, rules = up_to(self._form.quote, self._tokenizer, "quoted")
            self.extra |= rules
            return f"{quote} {text}"
        if kind == "array":
            item = self._quoted_value(parse_schema(schema, name).items, root, name, depth + 1)
            self.extra[rule := f"item{len(self.extra)}"] = item
            return f'"[" ({rule} ("," {rule})*)? "]"'
        if kind == "object":
            return f"{literal('{')} {self._members(schema, root, name, depth + 1)} {literal('}')}"
        return self._json(schema | {"type": kind})


def _with_definitions(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """The schema with the definitions of the root that it may refer to."""
    needed = DEFINITIONS if '"$ref"' in json.dumps(schema) else ()
    return schema | {key: root[key] for key in needed if key in root}


def _as_python(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return PYTHON[value]
    return json.dumps(value, ensure_ascii=False)


def _plain(name: str) -> str:
    """A name that `parsing` can parse without quotes."""
    if not _NAME.fullmatch(name):
        raise NotExpressible(f"{name!r} is not a name that the format can have")
    return name


def _quoted_name(name: str, tag: str) -> str:
    """A name as it stands in a tag: in quotes where the tag is an attribute."""
    return f'"{_plain(name)}"' if tag.endswith("name=") else _plain(name)
