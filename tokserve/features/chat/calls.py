"""Reads the calls of an answer, as a `ToolFormat` describes them, and reports them while they arrive.

A call is reported as soon as its name is known and its arguments begin.  The arguments that are reported are JSON, or
the call is said to be spoiled.
"""

from __future__ import annotations

from collections.abc import Callable

from tokserve.features.chat.cursor import Cursor, Markers, ObjectEnd, Steps
from tokserve.features.chat.json_scanner import object_of
from tokserve.features.chat.output_format import OutputFormat, ToolFormat
from tokserve.features.chat.readers.elements import ElementReader
from tokserve.features.chat.readers.pythonic import PythonicReader
from tokserve.features.chat.readers.quoted import QuotedReader
from tokserve.features.chat.readers.sink import CallSink, CallStatus

ARGUMENTS = ("arguments", "parameters")  # their key in a call that is JSON
SILENT = ("id", "type", "index", "tool_call_id")  # keys of such a call that are ignored
STRAY = "}],;"  # what a model may write too much of after a call
FUNCTIONS = "functions."  # before the name in an id that a model gives its call


class CallReader:
    """Reads the calls at `cursor`, of one format.  A call of a format that is not marked is one of a known function."""

    def __init__(self, cursor: Cursor, output_format: OutputFormat, form: ToolFormat, sink: CallSink) -> None:
        self._text = cursor
        self._functions = output_format.functions
        self._exact = output_format.exact
        self._form = form
        self._sink = sink
        self._ends = Markers(*filter(None, (form.closes, *form.opens)))  # of a call that is not JSON
        parts = cursor, output_format, form, sink
        self._elements = ElementReader(*parts)
        self._pythonic = PythonicReader(*parts)
        self._other = form.reader(*parts) if form.reader else QuotedReader(*parts) if form.quote else None

    def calls(self, *, known: bool = False) -> Steps[CallStatus]:
        """What comes after a marker, up to the marker that ends it.  `known`: only calls of known functions are."""
        form = self._form
        yield from self._before()
        first = yield from self._text.peek()
        if form.body == "elements":
            return (yield from self._several(lambda: self._elements.element(known), form.tags.function))
        if self._other is not None:
            status: CallStatus = yield from self._other.call()
            return status
        if form.body == "named" and form.bare:
            return (yield from self._named_call())
        if first == "[":
            return (yield from self._list())
        if first == "{" or form.body == "json":
            return (yield from self._several(self._json_call, "{"))
        if form.body == "pythonic":
            status = yield from self._several(self._pythonic.call, "")
            yield from self._after()
            return status
        return (yield from self._named_call())

    def _before(self) -> Steps[None]:
        """What stands between the marker and the name, if all of it is there."""
        start = self._text.at
        for part in self._form.before:
            yield from self._text.peek()
            if (yield from self._text.literal(part)) is None:
                self._text.at = start
                return

    def _after(self) -> Steps[None]:
        """What stands after the arguments, if it is there."""
        after, start = self._form.after, self._text.at
        if after:
            yield from self._text.peek()
            if (yield from self._text.literal(after)) is None and not self._text.is_cut(after):
                self._text.at = start

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
        read, begins = self._json_call, "{"
        if self._form.body == "pythonic" and (yield from self._text.peek()) != "{":
            read, begins = self._pythonic.call, ""
        while True:
            start = self._text.at
            status = yield from read()
            if status is not CallStatus.WHOLE:
                self._text.at = start if status is CallStatus.NONE and self._sink.num_begun > before else self._text.at
                return self._broken_or_none(before)
            behind = yield from self._text.peek()
            if behind == ",":
                self._text.at += 1
                behind = "," if (yield from self._text.peek()) != "]" else "]"
            if behind == "]":
                self._text.at += 1
                yield from self._after()
                if begins:
                    yield from self._is_next(begins)
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
            if key == self._form.keys[0] and not name:
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
        call_id = name if form.has_ids else ""
        name = _name_in(call_id) if form.has_ids else name
        if not name or (form.bare and name not in self._functions):
            return CallStatus.NONE
        if form.call_id and (yield from self._text.literal(form.call_id)) is not None:
            yield from self._text.word()
        if form.separator:
            yield from self._text.literal(form.separator)
        if (yield from self._text.peek()) != "{":
            return CallStatus.NONE
        self._sink.begin_call(name, call_id)
        if (yield from self._streamed()) is ObjectEnd.OPEN:
            return CallStatus.BROKEN
        yield from self._after()
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


def _name_in(call_id: str) -> str:
    """The function's name in an id `functions.NAME:NUMBER`."""
    name, colon, number = call_id.removeprefix(FUNCTIONS).rpartition(":")
    return name if colon and number.isdecimal() else call_id.removeprefix(FUNCTIONS)
