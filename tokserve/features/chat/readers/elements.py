"""Reads a call whose arguments are elements, one per parameter, and reports their texts as JSON.

`Tags` says which tags a format has.  A parameter's text has no type: its schema says which type it has, or the tag.
"""

from __future__ import annotations

from typing import Any

from tokserve.features.chat import parameters
from tokserve.features.chat.cursor import Cursor, Markers, Steps
from tokserve.features.chat.output_format import OutputFormat, ToolFormat
from tokserve.features.chat.readers.sink import CallSink, CallStatus

TYPES = {' string="true"': True, ' string="false"': False}  # attributes of a tag that says whether a value is a string


class ElementReader:
    """Reads one call of a `form` with tags at the `cursor`."""

    def __init__(self, cursor: Cursor, output_format: OutputFormat, form: ToolFormat, sink: CallSink) -> None:
        self._text = cursor
        self._functions = output_format.functions
        self._exact = output_format.exact
        self._sink = sink
        self._tags = tags = form.tags
        self._closes = form.closes
        self._opens = form.opens
        self._ends = tuple(filter(None, (tags.function_end, tags.function, form.closes)))  # of a call, or the next one
        closes = form.closes or tags.function_end
        padded = ("\n" + tags.parameter_end, "\n" + closes) if tags.padded else ()
        breaks = tuple("\n" + tag for tag in (tags.parameter, tags.function_end) if tag)
        self._value_ends = Markers(*padded, tags.parameter_end, *breaks, closes)
        self._is_string: bool | None = None  # what the tag of the last parameter says
        self._root: dict[str, Any] = {}  # the schema of the function that is called

    def element(self, known: bool) -> Steps[CallStatus]:
        """The name, an element per parameter, and the end, which may be missing before what ends all calls.  `known`:
        only a call of a known function is one."""
        tags = self._tags
        if tags.function and (yield from self._text.literal(tags.function)) is None:
            return CallStatus.NONE
        name = (yield from self._name(">")) if tags.function else (yield from self._text.word())
        if not name or (known and name not in self._functions):
            return CallStatus.NONE
        self._root = self._functions.get(name) or {}
        properties = parameters.resolved(self._root, self._root).get("properties")
        properties = properties if isinstance(properties, dict) else {}
        ends = (tags.function_end,) if self._exact and tags.function_end else self._ends
        keys: set[str] = set()
        while True:
            yield from self._text.peek()
            mark = yield from self._text.literal(tags.parameter, *ends)
            key = (yield from self._key()) if mark == tags.parameter else ""
            if mark is None or (mark == tags.parameter and not key):
                return CallStatus.BROKEN if keys else CallStatus.NONE
            if not keys:
                self._sink.begin_call(name)
            if not key:
                self._text.at -= 0 if mark == tags.function_end else len(mark)
                self._sink.add_arguments("}" if keys else "{}")
                self._sink.end_call()
                return CallStatus.WHOLE
            self._sink.add_arguments(f"{', ' if keys else '{'}{parameters.encoded(key)}: ")
            keys.add(key)
            if tags.padded:
                yield from self._text.literal("\n")
            if not (yield from self._value(key, properties, keys)):
                return CallStatus.BROKEN

    def _name(self, end: str) -> Steps[str]:
        """A name and what comes after it; "" if there is none."""
        yield from self._text.peek()
        quote = yield from self._text.literal('"', "'")
        name = yield from self._text.word()
        if quote is not None and (yield from self._text.literal(quote)) is None:
            return ""
        self._is_string = None
        if self._tags.typed:
            self._is_string = TYPES.get((yield from self._text.literal(*TYPES)) or "")
        yield from self._text.peek()
        return name if (yield from self._text.literal(end)) is not None else ""

    def _key(self) -> Steps[str]:
        """The name of a parameter, up to its value; "" if there is none."""
        key = yield from self._name(self._tags.key_end)
        if key and self._tags.value:
            yield from self._text.peek()
            if (yield from self._text.literal(self._tags.value)) is None:
                return ""
        return key

    def _value(self, key: str, properties: dict[str, Any], keys: set[str]) -> Steps[bool]:
        """Report a parameter's text as JSON.  `keys`: of the parameters so far.  False: it does not end."""
        schema = properties.get(key)
        schema = parameters.resolved(schema, self._root) if isinstance(schema, dict) else {}
        is_text = parameters.is_text(schema) if self._is_string is None else self._is_string
        schema = schema if self._is_string is None else {}  # where the tag has said that it is any other JSON
        parts: list[str] = []
        report = parts.append
        if is_text:
            self._sink.add_arguments('"')
            report = lambda text: self._sink.add_arguments(parameters.encoded(text)[1:-1])  # noqa: E731
        has_end_tag = False
        while True:
            mark = yield from self._text.until(self._value_ends, report, exact=True)
            if mark is None:
                return False
            if (yield from self._ends_value(mark, properties, keys)):
                break
            if has_end_tag and self._closes and mark.endswith(self._closes):
                self._text.at -= len(self._closes)
                report(mark.removesuffix(self._closes))
                return False
            has_end_tag |= mark.endswith(self._tags.parameter_end)
            report(mark)
        self._sink.add_arguments('"' if is_text else parameters.json_of("".join(parts), schema, self._root))
        return True

    def _ends_value(self, mark: str, properties: dict[str, Any], keys: set[str]) -> Steps[bool]:
        """Whether a tag ends the value: the end tag does before what may follow it; where that was forgotten, so does
        the tag of another parameter of the function, the end of the function before that of all calls, or the end of
        all calls before another function's."""
        start, tags = self._text.at, self._tags
        if self._exact:
            return mark.endswith(tags.parameter_end)
        if mark.endswith(tags.parameter):
            stated = self._is_string
            key = yield from self._key()
            self._is_string = stated
            ends = bool(key) and key not in keys and (key in properties or not properties)
            self._text.at = start - (len(tags.parameter) if ends else 0)
            return ends
        first = yield from self._text.peek()
        closes = tuple(filter(None, [self._closes]))
        if mark.endswith(tags.parameter_end):
            following = (tags.parameter, *self._ends)
            ends = not first or (yield from self._text.literal(*following)) is not None or self._text.is_cut(*following)
            self._text.at = start
            return ends
        if closes and mark.endswith(closes):
            ends = (not first and not tags.function_end) or (yield from self._another_opens())
            self._text.at = start - (len(closes[0]) if ends else 0)
            return ends
        ends = (
            mark.endswith(tags.function_end) and bool(closes) and (yield from self._text.literal(*closes)) is not None
        )
        self._text.at = start - (len(tags.function_end) if ends else 0)
        return ends

    def _another_opens(self) -> Steps[bool]:
        """Whether the marker of calls comes next, and then a function."""
        if not self._opens or (yield from self._text.literal(*self._opens)) is None:
            return False
        yield from self._text.peek()
        tag = self._tags.function
        return not tag or (yield from self._text.literal(tag)) is not None
