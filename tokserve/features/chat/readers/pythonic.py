"""Reads calls in Python's notation, `NAME(KEY=VALUE, ...)`, and reports their keywords as JSON.

Values are literals of Python or JSON.  An argument without a keyword has no name, so a text with one is no call.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

import msgspec

from tokserve.features.chat import parameters
from tokserve.features.chat.cursor import Cursor, Steps
from tokserve.features.chat.output_format import OutputFormat, ToolFormat
from tokserve.features.chat.readers.sink import CallSink, CallStatus

MAX_LITERAL = 1 << 20  # characters of one value
WORDS = {"true": True, "false": False, "null": None}  # of JSON


class PythonicReader:
    """Reads one call at the `cursor`.  A call of a `form` that is not marked is one of a known function."""

    def __init__(self, cursor: Cursor, output_format: OutputFormat, form: ToolFormat, sink: CallSink) -> None:
        self._text = cursor
        self._functions = output_format.functions
        self._only_known = form.bare
        self._sink = sink

    def call(self) -> Steps[CallStatus]:
        """The name and the keywords.  They are reported one by one; one that is no literal spoils the call."""
        name = yield from self._text.word()
        if not name or (self._only_known and name not in self._functions):
            return CallStatus.NONE
        if (yield from self._text.literal("(")) is None:
            return CallStatus.NONE
        keys: set[str] = set()
        first = yield from self._text.peek()
        while first != ")":
            key = yield from self._text.word()
            yield from self._text.peek()
            if not key or key in keys or (yield from self._text.literal("=")) is None:
                return CallStatus.BROKEN if keys else CallStatus.NONE
            if not keys:
                self._sink.begin_call(name)
            self._sink.add_arguments(f"{', ' if keys else '{'}{parameters.encoded(key)}: ")
            keys.add(key)
            yield from self._text.peek()
            text = yield from self._text.expression()
            if text is None:
                return CallStatus.BROKEN
            value = json_of(text)
            if value is None:
                self._sink.spoil_call()
            self._sink.add_arguments(text if value is None else value)
            first = yield from self._text.peek()
            if first == ",":
                self._text.at += 1
                first = yield from self._text.peek()
            elif first != ")":
                return CallStatus.BROKEN
        self._text.at += 1
        if not keys:
            self._sink.begin_call(name)
        self._sink.add_arguments("}" if keys else "{}")
        self._sink.end_call()
        return CallStatus.WHOLE


def json_of(text: str) -> str | None:
    """The JSON of a literal of Python or JSON; None: it is none.  Line breaks in a string stand for themselves."""
    if len(text) > MAX_LITERAL:
        return None
    for source in (text, text.replace("\r", "\\r").replace("\n", "\\n")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of an escape that Python does not have
                value = _value(ast.parse(source, mode="eval").body)
            as_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
            as_json.encode()
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, Warning):
            continue
        return as_json
    return _plain_json(text)


def _plain_json(text: str) -> str | None:
    """The text if it is JSON: its escapes are not Python's."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return text


def _value(node: ast.expr) -> Any:
    """The value of a literal.  Raises ValueError for anything else, and for a value that JSON does not have."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = [
            (_value(key) if key else None, _value(value)) for key, value in zip(node.keys, node.values, strict=True)
        ]
        if all(isinstance(key, str) for key, _ in pairs) and len(dict(pairs)) == len(pairs):
            return dict(pairs)
    raise ValueError
