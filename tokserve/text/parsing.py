"""Parses an answer's text into content, reasoning and tool calls while it arrives.

Streams and whole answers use the same parser: it reads forward and waits for more text where it needs it, so its output
does not depend on how the text was split into pushes.  Text that may be a marker, or the head of a call, is held until
that is decided; a call is reported as soon as its name is known and its arguments begin.  Text that only resembled a
call becomes content.  White space next to a marker belongs to the marker: templates insert it.  A `ToolFormat` says how
a model writes calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import msgspec

from tokserve.text import parameters
from tokserve.text.cursor import Cursor, Markers, Steps

Kind = Literal["content", "reasoning", "call", "arguments"]
ARGUMENTS = ("arguments", "parameters")  # their key in a call that is JSON
SILENT = ("id", "type")  # keys of such a call that are ignored


class Segment(NamedTuple):
    """A piece of an answer.  "call": the beginning of a call, by name; "arguments": more JSON of the last call."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    `opens`: the markers before a call, or before a list of calls.  `closes`: the marker after it, "" if there is none.
    `body`: "json" is an object with name and arguments, or a list of them; "named" is a name, an optional `call_id`
    before an id, an optional `separator`, and the arguments as an object; "xml" is `<function=NAME>` around
    `<parameter=KEY>` elements.  `bare`: calls may also come first without a marker, with ";" or nothing between them.
    `frames`: the markers before and after all calls, which are skipped.
    """

    name: str
    opens: tuple[str, ...] = ()
    closes: str = ""
    body: Literal["json", "named", "xml"] = "json"
    separator: str = ""
    call_id: str = ""
    bare: bool = False
    frames: tuple[str, ...] = ()

    def markers(self) -> tuple[str, ...]:
        return tuple(mark for mark in (*self.opens, self.closes, self.call_id, self.separator, *self.frames) if mark)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning, which can only come first.  `assumed`: it needs no `opens`."""

    name: str
    opens: str
    closes: str
    assumed: bool = False

    def begun(self, prompt: str) -> bool:
        """Whether the answer to a prompt with this end begins inside the reasoning."""
        tail = prompt.rstrip()
        return tail.endswith(self.opens) or (self.assumed and not tail.endswith(self.closes))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How answers to one request are parsed.  `functions`: the JSON schemas of the arguments by name.  `named`: the
    answer is only this function's arguments. `max_calls`: further calls are dropped."""

    tools: ToolFormat | None = None
    thinking: Thinking | None = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    named: str | None = None
    max_calls: int | None = None

    def markers(self) -> tuple[str, ...]:
        """All markers that an answer may contain."""
        thinking = (self.thinking.opens, self.thinking.closes) if self.thinking else ()
        return (*(self.tools.markers() if self.tools else ()), *thinking)


class _CallStatus(Enum):
    """The result of parsing a call."""

    NONE = 0  # not a call, and nothing was reported
    BROKEN = 1  # reported, and incomplete
    WHOLE = 2


_VALUE_END = Markers("\n</parameter>", "</parameter>")


class Parser:
    """Parses one answer.  `inside`: it begins inside the reasoning.  `num_calls`: calls reported so far; `complete`:
    the last of them has all its arguments."""

    def __init__(self, output_format: OutputFormat, *, inside: bool = False) -> None:
        self.num_calls = 0
        self.complete = False
        self._format = output_format
        self._inside = inside
        self._text = Cursor()
        self._out: list[Segment] = []
        self._trim = False  # white space that follows belongs to a marker
        self._has_content = False
        self._steps = self._answer()

    def push(self, text: str, final: bool = False) -> list[Segment]:
        """The segments that are decided now.  `final`: this is the end of the answer."""
        self._text.push(text, final)
        next(self._steps, None)
        out, self._out = self._out, []
        return out

    # output

    def _emit_text(self, kind: Kind, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        self._trim = False
        self._has_content |= kind == "content"
        self._emit(kind, text)

    def _emit(self, kind: Kind, text: str) -> None:
        max_calls = self._format.max_calls
        if kind in ("call", "arguments") and max_calls is not None and self.num_calls > max_calls:
            return
        self._out.append(Segment(kind, text))

    def _content(self, text: str) -> None:
        self._emit_text("content", text)

    def _arguments(self, text: str) -> None:
        if text:
            self._emit("arguments", text)

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self.complete = False
        self._emit("call", name)

    # the answer

    def _answer(self) -> Steps[None]:
        output_format = self._format
        if output_format.thinking is not None:
            yield from self._reasoning(output_format.thinking)
        form = output_format.tools
        if output_format.named is not None:
            yield from self._only_arguments(output_format.named)
        elif form is not None and form.bare:
            yield from self._bare_calls(form)
        if form is None:
            yield from self._text.until(Markers(), self._content)
            return
        markers = Markers(*form.opens, *form.frames)
        while (marker := (yield from self._text.until(markers, self._content))) is not None:
            if marker in form.frames:
                yield from self._after_marker()
            else:
                yield from self._marked_calls(form, marker)

    def _reasoning(self, thinking: Thinking) -> Steps[None]:
        start = self._text.at
        yield from self._text.peek()
        if (yield from self._text.literal(thinking.opens)) is None:
            self._text.at = start
            if not self._inside:
                return
        self._trim = True
        yield from self._text.until(Markers(thinking.closes), lambda text: self._emit_text("reasoning", text))
        self._trim = True

    def _only_arguments(self, name: str) -> Steps[None]:
        start = self._text.at
        if (yield from self._text.peek()) != "{":
            self._text.at = start
            return
        self._begin_call(name)
        yield from self._streamed()
        yield from self._after_marker()

    def _bare_calls(self, form: ToolFormat) -> Steps[None]:
        while True:
            start = self._text.at
            first = yield from self._text.peek()
            if first == ";" and self.num_calls:
                self._text.at += 1
                first = yield from self._text.peek()
            if not first and self.num_calls:
                return
            if first not in ("{", "["):
                self._text.at = start
                return
            if (yield from self._calls(form)) is _CallStatus.NONE:
                self._content(self._text.since(start))
                return
            self._trim = not self._has_content

    def _marked_calls(self, form: ToolFormat, marker: str) -> Steps[None]:
        gap, start = self._text.gap, self._text.at
        end = yield from self._calls(form)
        if end is _CallStatus.NONE:
            self._content(gap + marker + self._text.since(start))
            return
        if form.closes and end is _CallStatus.BROKEN:  # skip the invalid rest
            marker_found = yield from self._text.until(Markers(form.closes, *form.opens), lambda text: None)
            if marker_found in form.opens:
                self._text.at -= len(marker_found)
        elif form.closes:
            behind = self._text.at
            yield from self._text.peek()
            if (yield from self._text.literal(form.closes)) is None:
                self._text.at = behind
        yield from self._after_marker()

    def _after_marker(self) -> Steps[None]:
        """After a marker: white space that ends the answer, or begins its content, is not part of the content."""
        self._trim = not self._has_content
        start = self._text.at
        if (yield from self._text.peek()):
            self._text.at = start

    def _calls(self, form: ToolFormat) -> Steps[_CallStatus]:
        first = yield from self._text.peek()
        if form.body == "xml":
            return (yield from self._element())
        if first == "{" or (form.body == "json" and first != "["):
            return (yield from self._json_call(form))
        if first != "[":
            return (yield from self._named_call(form))
        self._text.at += 1
        before = self.num_calls
        while True:
            end = yield from self._json_call(form)
            if end is not _CallStatus.WHOLE:
                return self._broken_or_none(before)
            behind = yield from self._text.peek()
            if behind not in (",", "]"):
                return _CallStatus.BROKEN
            self._text.at += 1
            if behind == "]":
                return _CallStatus.WHOLE

    def _broken_or_none(self, before: int) -> _CallStatus:
        return _CallStatus.BROKEN if self.num_calls > before else _CallStatus.NONE

    # JSON

    def _json_call(self, form: ToolFormat) -> Steps[_CallStatus]:
        """{"name": ..., "arguments": {...}} in any order."""
        if (yield from self._text.peek()) != "{":
            return _CallStatus.NONE
        before, name, held = self.num_calls, "", ""
        mark = "{"
        while mark != "}":
            self._text.at += 1
            key = yield from self._text.string()
            if key is None or (yield from self._text.peek()) != ":":
                return self._broken_or_none(before)
            self._text.at += 1
            if key == "name" and not name:
                name = (yield from self._text.string()) or ""
                if not name or (form.bare and name not in self._format.functions):
                    return self._broken_or_none(before)
            elif key in ARGUMENTS and not held:
                if name and (yield from self._text.peek()) == "{":
                    held = "reported"
                    self._begin_call(name)
                    if not (yield from self._streamed()):
                        return _CallStatus.BROKEN
                elif not (held := (yield from self._held_arguments())):
                    return self._broken_or_none(before)
            elif key not in SILENT or (yield from self._text.string()) is None:
                return self._broken_or_none(before)
            mark = yield from self._text.peek()
            if mark not in (",", "}"):
                return self._broken_or_none(before)
        self._text.at += 1
        if self.num_calls == before:
            if not name:
                return _CallStatus.NONE
            self._begin_call(name)
            self._arguments(held or "{}")
            self.complete = True
        return _CallStatus.WHOLE

    def _named_call(self, form: ToolFormat) -> Steps[_CallStatus]:
        """NAME, the id that the model gives the call, the separator, and {...}."""
        name = yield from self._text.word()
        if not name:
            return _CallStatus.NONE
        if form.call_id and (yield from self._text.literal(form.call_id)) is not None:
            yield from self._text.word()
        if form.separator:
            yield from self._text.literal(form.separator)
        if (yield from self._text.peek()) != "{":
            return _CallStatus.NONE
        self._begin_call(name)
        return _CallStatus.WHOLE if (yield from self._streamed()) else _CallStatus.BROKEN

    def _held_arguments(self) -> Steps[str]:
        """Arguments before the name, or as JSON text in a string, or null; "" if they are not valid."""
        first = yield from self._text.peek()
        if first == "{":
            return (yield from self._text.object(None)) or ""
        if first == "n":
            return "{}" if (yield from self._text.literal("null")) else ""
        text = (yield from self._text.string()) or ""
        return text if text.lstrip().startswith("{") and _is_json(text) else ""

    def _streamed(self) -> Steps[bool]:
        """Report arguments as they arrive; returns whether they are complete."""
        self.complete = (yield from self._text.object(self._arguments)) is not None
        return self.complete

    # elements

    def _element(self) -> Steps[_CallStatus]:
        """<function=NAME>, <parameter=KEY> elements, </function>."""
        if (yield from self._text.literal("<function=")) is None:
            return _CallStatus.NONE
        name = yield from self._text.word()
        if not name or (yield from self._text.literal(">")) is None:
            return _CallStatus.NONE
        properties = (self._format.functions.get(name) or {}).get("properties")
        before = "{"
        while True:
            yield from self._text.peek()
            mark = yield from self._text.literal("<parameter=", "</function>")
            if mark is None:
                return _CallStatus.NONE if before == "{" else _CallStatus.BROKEN
            key = ""
            if mark == "<parameter=":
                key = yield from self._text.word()
                if not key or (yield from self._text.literal(">")) is None:
                    return _CallStatus.NONE if before == "{" else _CallStatus.BROKEN
            if before == "{":
                self._begin_call(name)
            if not key:
                self._arguments("{}" if before == "{" else "}")
                self.complete = True
                return _CallStatus.WHOLE
            self._arguments(f"{before}{parameters.encoded(key)}: ")
            before = ", "
            yield from self._text.literal("\n")
            schema = properties.get(key) if isinstance(properties, dict) else None
            if not (yield from self._value(schema if isinstance(schema, dict) else {})):
                return _CallStatus.BROKEN

    def _value(self, schema: dict[str, Any]) -> Steps[bool]:
        """Report a parameter's text as JSON."""
        if parameters.is_text(schema):
            self._arguments('"')
            report = lambda text: self._arguments(parameters.encoded(text)[1:-1])  # noqa: E731
            end = yield from self._text.until(_VALUE_END, report, exact=True)
            if end is not None:
                self._arguments('"')
            return end is not None
        parts: list[str] = []
        if (yield from self._text.until(_VALUE_END, parts.append, exact=True)) is None:
            return False
        self._arguments(parameters.json_of("".join(parts), schema))
        return True


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
    return True
