"""Reads calls of Gemma's models, `NAME{KEY:VALUE,...}`, and reports their arguments as JSON while they arrive.

A string stands between two markers, which have no other use, so it needs no escapes.  Numbers, lists and objects are
written as in JSON, the names in objects without quotes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.features.chat import parameters
from tokserve.features.chat.cursor import Cursor, Markers, Steps
from tokserve.features.chat.json_scanner import object_of
from tokserve.features.chat.output_format import OutputFormat, ToolFormat
from tokserve.features.chat.readers.sink import CallSink, CallStatus

MAX_DEPTH = 64
NO_SCHEMA: Mapping[str, Any] = {}


class QuotedReader:
    """Reads one call of a `form` at the `cursor`."""

    def __init__(self, cursor: Cursor, output_format: OutputFormat, form: ToolFormat, sink: CallSink) -> None:
        self._text = cursor
        self._functions = output_format.functions
        self._sink = sink
        self._quote = form.quote
        self._quotes = Markers(form.quote)
        self._key_ends = Markers(":", "}", *filter(None, [form.closes]))
        self._atom_ends = Markers(",", "}", "]", *filter(None, [form.closes]))

    def call(self) -> Steps[CallStatus]:
        """The name and the arguments.  A value that is none of those above spoils the call."""
        name = yield from self._text.word()
        if not name or (yield from self._text.peek()) != "{":
            return CallStatus.NONE
        self._sink.begin_call(name)
        properties = (self._functions.get(name) or {}).get("properties")
        if not (yield from self._object(0, properties if isinstance(properties, dict) else NO_SCHEMA)):
            return CallStatus.BROKEN
        self._sink.end_call()
        return CallStatus.WHOLE

    def _object(self, depth: int, properties: Mapping[str, Any]) -> Steps[bool]:
        """Report an object; False: it does not end, or is not one."""
        self._text.at += 1
        keys: set[str] = set()
        self._sink.add_arguments("{")
        first = yield from self._text.peek()
        while first != "}":
            key = yield from self._key()
            if not key or key in keys:
                return False
            self._sink.add_arguments(f"{', ' if keys else ''}{parameters.encoded(key)}: ")
            keys.add(key)
            schema = properties.get(key)
            if not (yield from self._value(depth + 1, schema if isinstance(schema, dict) else NO_SCHEMA)):
                return False
            first = yield from self._text.peek()
            if first == ",":
                self._text.at += 1
                first = yield from self._text.peek()
            elif first != "}":
                return False
        self._text.at += 1
        self._sink.add_arguments("}")
        return True

    def _list(self, depth: int) -> Steps[bool]:
        self._text.at += 1
        self._sink.add_arguments("[")
        is_first = True
        first = yield from self._text.peek()
        while first != "]":
            self._sink.add_arguments("" if is_first else ", ")
            is_first = False
            if not (yield from self._value(depth + 1, NO_SCHEMA)):
                return False
            first = yield from self._text.peek()
            if first == ",":
                self._text.at += 1
                first = yield from self._text.peek()
            elif first != "]":
                return False
        self._text.at += 1
        self._sink.add_arguments("]")
        return True

    def _key(self) -> Steps[str]:
        """A name and the colon after it; "" if there is none."""
        parts: list[str] = []
        if (yield from self._text.literal(self._quote)) is not None:
            ended = yield from self._text.until(self._quotes, parts.append, exact=True)
            colon = ended and (yield from self._text.peek()) == ":"
            self._text.at += 1 if colon else 0
            return "".join(parts) if colon else ""
        ended = yield from self._text.until(self._key_ends, parts.append, exact=True)
        return "".join(parts).strip() if ended == ":" else ""

    def _value(self, depth: int, schema: Mapping[str, Any]) -> Steps[bool]:
        first = yield from self._text.peek()
        if depth > MAX_DEPTH or not first:
            return False
        if (yield from self._text.literal(self._quote)) is not None:
            self._sink.add_arguments('"')
            report = lambda text: self._sink.add_arguments(parameters.encoded(text)[1:-1])  # noqa: E731
            if (yield from self._text.until(self._quotes, report, exact=True)) is None:
                return False
            self._sink.add_arguments('"')
            return True
        if first == "{":
            properties = schema.get("properties")
            return (yield from self._object(depth, properties if isinstance(properties, dict) else NO_SCHEMA))
        if first == "[":
            return (yield from self._list(depth))
        parts: list[str] = []
        mark = yield from self._text.until(self._atom_ends, parts.append, exact=True)
        if mark is None:
            return False
        self._text.at -= len(mark)
        self._atom("".join(parts).strip(), schema)
        return True

    def _atom(self, text: str, schema: Mapping[str, Any]) -> None:
        """A number or a word of JSON or Python; a text without markers, where the schema says that it is one."""
        word = parameters.AS_PYTHON.get(text, text)
        if object_of(f'{{"":{word}}}') is not None:
            self._sink.add_arguments(word)
        elif text and schema.get("type") == "string":
            self._sink.add_arguments(parameters.encoded(text))
        else:
            self._sink.spoil_call()
            self._sink.add_arguments(text)
