"""Reads the calls of an answer, as a `ToolFormat` describes them, and reports them while they arrive.

A call is reported as soon as its name is known and its arguments begin.  The arguments that are reported are JSON, or
the call is said to be spoiled.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from tokserve.features.chat import parameters
from tokserve.features.chat.cursor import Cursor, Markers, ObjectEnd, Steps
from tokserve.features.chat.json_scanner import object_of
from tokserve.features.chat.output_format import OutputFormat, ToolFormat

ARGUMENTS = ("arguments", "parameters")  # their key in a call that is JSON
SILENT = ("id", "type", "index")  # keys of such a call that are ignored
STRAY = "}],;"  # what a model may write too much of after a call
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class CallStatus(Enum):
    """The result of reading calls."""

    NONE = 0  # no call, and nothing was reported
    BROKEN = 1  # reported; what follows is not as the format has it
    WHOLE = 2


class CallSink(Protocol):
    """Takes what is read of calls."""

    num_begun: int  # calls

    def begin_call(self, name: str) -> None:
        """A call begins."""

    def add_arguments(self, text: str) -> None:
        """More JSON of its arguments."""

    def spoil_call(self) -> None:
        """Its arguments are not JSON, or lack their end."""

    def end_call(self) -> None:
        """Its arguments are complete, unless it is spoiled."""

    def between_calls(self) -> bool:
        """Another call may begin here.  Returns whether the text up to here became content."""


class CallReader:
    """Reads the calls at `cursor`, of one format.  A call of a format that is not marked is one of a known function."""

    def __init__(self, cursor: Cursor, output_format: OutputFormat, form: ToolFormat, sink: CallSink) -> None:
        self._text = cursor
        self._functions = output_format.functions
        self._exact = output_format.exact
        self._form = form
        self._sink = sink
        self._ends = Markers(*filter(None, (form.closes, *form.opens)))  # of a call that is not JSON
        closes = form.closes or FUNCTION_END
        self._value_ends = Markers(
            "\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END, "\n" + closes, closes
        )

    def calls(self, *, known: bool = False) -> Steps[CallStatus]:
        """What comes after a marker, up to the marker that ends it.  `known`: only calls of known functions are."""
        form = self._form
        first = yield from self._text.peek()
        if form.body == "xml":
            return (yield from self._several(lambda: self._element(known), FUNCTION))
        if first == "[":
            return (yield from self._list())
        if first == "{" or form.body == "json":
            return (yield from self._several(self._json_call, "{"))
        return (yield from self._named_call())

    def only_arguments(self, name: str) -> Steps[None]:
        """The arguments of a call of `name` that is not written."""
        self._sink.begin_call(name)
        yield from self._streamed()

    def _broken_or_none(self, before: int) -> CallStatus:
        return CallStatus.BROKEN if self._sink.num_begun > before else CallStatus.NONE

    def _several(self, read: Callable[[], Steps[CallStatus]], begins: str) -> Steps[CallStatus]:
        """One call or more, one after the other.  `begins`: what each begins with."""
        status = yield from read()
        while status is CallStatus.WHOLE:
            end, before = self._text.at, self._sink.num_begun
            if not (yield from self._is_next(begins)):
                break
            if self._sink.between_calls():
                end = self._text.at
            status = yield from read()
            if status is CallStatus.NONE and self._sink.num_begun == before:
                self._text.at = end
                break
        else:
            return status
        return CallStatus.WHOLE

    def _is_next(self, begins: str) -> Steps[bool]:
        """Whether `begins` comes next, after brackets and separators that belong to no call: these are read if it, a
        marker or the end follows."""
        start = self._text.at
        while (first := (yield from self._text.peek())) and first in STRAY and not self._exact:
            self._text.at += 1
        stop = self._text.at
        if (yield from self._text.literal(begins)) is not None:
            self._text.at = stop
            return True
        others = tuple(filter(None, (self._form.closes, *self._form.opens)))
        if not first or (others and (yield from self._text.literal(*others)) is not None):
            self._text.at = stop
        elif not self._text.is_cut(*others):
            self._text.at = start
        return False

    # JSON

    def _list(self) -> Steps[CallStatus]:
        self._text.at += 1
        before = self._sink.num_begun
        while True:
            status = yield from self._json_call()
            if status is not CallStatus.WHOLE:
                return self._broken_or_none(before)
            behind = yield from self._text.peek()
            if behind == ",":
                self._text.at += 1
                behind = "," if (yield from self._text.peek()) != "]" else "]"
            if behind == "]":
                self._text.at += 1
                yield from self._is_next("{")
                return CallStatus.WHOLE
            if behind != ",":
                return CallStatus.BROKEN
            self._sink.between_calls()

    def _json_call(self) -> Steps[CallStatus]:
        """{"name": ..., "arguments": {...}} in any order."""
        if (yield from self._text.peek()) != "{":
            return CallStatus.NONE
        before, name, held = self._sink.num_begun, "", ""
        mark = "{"
        while mark != "}":
            self._text.at += 1
            key = yield from self._text.string()
            if key is None or (yield from self._text.peek()) != ":":
                return self._broken_or_none(before)
            self._text.at += 1
            if key == "name" and not name:
                name = (yield from self._text.string()) or ""
                if not name or (self._form.bare and name not in self._functions):
                    return self._broken_or_none(before)
            elif key in ARGUMENTS and not held:
                if name and (yield from self._text.peek()) == "{":
                    held = "reported"
                    self._sink.begin_call(name)
                    if (yield from self._streamed()) is ObjectEnd.OPEN:
                        return CallStatus.BROKEN
                elif not (held := (yield from self._held_arguments())):
                    return self._broken_or_none(before)
            elif key not in SILENT or not (yield from self._text.scalar()):
                return self._broken_or_none(before)
            mark = yield from self._text.peek()
            if mark not in (",", "}"):
                return self._broken_or_none(before)
        self._text.at += 1
        if self._sink.num_begun == before:
            if not name:
                return CallStatus.NONE
            self._sink.begin_call(name)
            self._sink.add_arguments(held or "{}")
            self._sink.end_call()
        return CallStatus.WHOLE

    def _named_call(self) -> Steps[CallStatus]:
        """NAME, the id that the model gives the call, the separator, and {...}."""
        form = self._form
        name = yield from self._text.word()
        if not name:
            return CallStatus.NONE
        if form.call_id and (yield from self._text.literal(form.call_id)) is not None:
            yield from self._text.word()
        if form.separator:
            yield from self._text.literal(form.separator)
        if (yield from self._text.peek()) != "{":
            return CallStatus.NONE
        self._sink.begin_call(name)
        if (yield from self._streamed()) is ObjectEnd.OPEN:
            return CallStatus.BROKEN
        yield from self._is_next("{")
        return CallStatus.WHOLE

    def _held_arguments(self) -> Steps[str]:
        """Arguments before the name, or as JSON text in a string, or null; "" if they are not valid."""
        first = yield from self._text.peek()
        if first == "{":
            return (yield from self._text.object()) or ""
        if first == "n":
            return "{}" if (yield from self._text.literal("null")) else ""
        text = yield from self._text.string()
        if text is None:
            return ""
        return (object_of(text) or "") if text.strip() else "{}"

    def _streamed(self) -> Steps[ObjectEnd]:
        """Report arguments as they arrive."""
        sink = self._sink
        end = yield from self._text.arguments(sink.add_arguments, sink.spoil_call, self._ends)
        if end is not ObjectEnd.OPEN:
            sink.end_call()
        return end

    # elements

    def _element(self, known: bool) -> Steps[CallStatus]:
        """<function=NAME>, <parameter=KEY> elements, </function>, which may be missing before what ends all calls."""
        if (yield from self._text.literal(FUNCTION)) is None:
            return CallStatus.NONE
        name = yield from self._name()
        if not name or (known and name not in self._functions):
            return CallStatus.NONE
        properties = (self._functions.get(name) or {}).get("properties")
        properties = properties if isinstance(properties, dict) else {}
        ends = (FUNCTION_END,) if self._exact else (FUNCTION_END, FUNCTION, *filter(None, [self._form.closes]))
        keys: set[str] = set()
        while True:
            yield from self._text.peek()
            mark = yield from self._text.literal(PARAMETER, *ends)
            key = (yield from self._name()) if mark == PARAMETER else ""
            if mark is None or (mark == PARAMETER and not key):
                return CallStatus.BROKEN if keys else CallStatus.NONE
            if not keys:
                self._sink.begin_call(name)
            if not key:
                self._text.at -= 0 if mark == FUNCTION_END else len(mark)
                self._sink.add_arguments("}" if keys else "{}")
                self._sink.end_call()
                return CallStatus.WHOLE
            self._sink.add_arguments(f"{', ' if keys else '{'}{parameters.encoded(key)}: ")
            keys.add(key)
            yield from self._text.literal("\n")
            if not (yield from self._value(key, properties, keys)):
                return CallStatus.BROKEN

    def _name(self) -> Steps[str]:
        """A name and the ">" after it; "" if there is none."""
        yield from self._text.peek()
        quote = yield from self._text.literal('"', "'")
        name = yield from self._text.word()
        if quote is not None and (yield from self._text.literal(quote)) is None:
            return ""
        yield from self._text.peek()
        return name if (yield from self._text.literal(">")) is not None else ""

    def _value(self, key: str, properties: dict[str, Any], keys: set[str]) -> Steps[bool]:
        """Report a parameter's text as JSON.  `keys`: of the parameters so far.  False: it does not end."""
        schema = properties.get(key)
        schema = schema if isinstance(schema, dict) else {}
        parts: list[str] = []
        report = parts.append
        if is_text := parameters.is_text(schema):
            self._sink.add_arguments('"')
            report = lambda text: self._sink.add_arguments(parameters.encoded(text)[1:-1])  # noqa: E731
        has_end_tag = False
        while True:
            mark = yield from self._text.until(self._value_ends, report, exact=True)
            if mark is None:
                return False
            if (yield from self._ends_value(mark, properties, keys)):
                break
            if has_end_tag and self._form.closes and mark.endswith(self._form.closes):
                self._text.at -= len(self._form.closes)
                report(mark.removesuffix(self._form.closes))
                return False
            has_end_tag |= mark.endswith(PARAMETER_END)
            report(mark)
        self._sink.add_arguments('"' if is_text else parameters.json_of("".join(parts), schema))
        return True

    def _ends_value(self, mark: str, properties: dict[str, Any], keys: set[str]) -> Steps[bool]:
        """Whether a tag ends the value: the end tag does before what may follow it; where that was forgotten, so does
        the tag of another parameter of the function, the end of the function before that of all calls, or the end of
        all calls before another function's."""
        start = self._text.at
        if self._exact:
            return mark.endswith(PARAMETER_END)
        if mark.endswith(PARAMETER):
            key = yield from self._name()
            ends = bool(key) and key not in keys and (key in properties or not properties)
            self._text.at = start - (len(PARAMETER) if ends else 0)
            return ends
        first = yield from self._text.peek()
        closes = tuple(filter(None, [self._form.closes]))
        if mark.endswith(PARAMETER_END):
            tags = (PARAMETER, FUNCTION_END, FUNCTION, *closes)
            ends = not first or (yield from self._text.literal(*tags)) is not None or self._text.is_cut(*tags)
            self._text.at = start
            return ends
        if closes and mark.endswith(closes):
            ends = yield from self._another_opens()
            self._text.at = start - (len(closes[0]) if ends else 0)
            return ends
        ends = mark.endswith(FUNCTION_END) and bool(closes) and (yield from self._text.literal(*closes)) is not None
        self._text.at = start - (len(FUNCTION_END) if ends else 0)
        return ends

    def _another_opens(self) -> Steps[bool]:
        """Whether the marker of calls comes next, and then a function."""
        if not self._form.opens or (yield from self._text.literal(*self._form.opens)) is None:
            return False
        yield from self._text.peek()
        return (yield from self._text.literal(FUNCTION)) is not None
