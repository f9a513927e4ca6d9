"""Reads a text forward while it arrives: the next character, literal, word, marker, JSON string or JSON object.

Every step waits for the text that it needs, so results do not depend on how the text was split into pushes.  Steps are
generators: `yield from` them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from enum import Enum
from functools import cached_property
from typing import TypeVar

import msgspec

from tokserve.features.chat.json_scanner import JsonScanner, Scan

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text
_WORD = re.compile(r"[\w.:-]*")
_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'["\\]')
_CONTROLS = re.compile(r"[\x00-\x1f]")
_ATOM = re.compile(r"[-+.\w]*")
_NOT_PLAIN = re.compile(r"""["'()\[\]{},]""")  # what ends an expression, or may hide its end
_QUOTE_OR_ESCAPE = re.compile(r"""["'\\]""")


class ObjectEnd(Enum):
    """How far an object was read."""

    WHOLE = 0
    CLOSED = 1  # it is not JSON; its brackets are closed
    OPEN = 2  # the text, or the call, ended within it


class Markers:
    """Texts to search for in a text that is still arriving."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._longest = max(map(len, texts), default=0)
        self._first = frozenset(text[0] for text in texts)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._texts)) if self._texts else r"(?!)")

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first match from `at` on.  The first character of a marker occurs nowhere else in any: none overlap."""
        return self._pattern.search(text, at)

    def safe(self, text: str, at: int) -> int:
        """The position up to which no character of `text` can belong to an incomplete marker."""
        for begin in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[begin] in self._first and any(mark.startswith(text[begin:]) for mark in self._texts):
                return begin
        return len(text)


class Cursor:
    """A position in a text.  `at` may be set back to an earlier value, unless text was passed to `emit` since.  A step
    without a result leaves `at` where it stopped.  `gap`: the white space before the last marker found."""

    def __init__(self) -> None:
        self.at = 0
        self.gap = ""
        self._text = ""  # the part that may be read again
        self._final = False
        self._kept: list[str] = []  # the text since `keep`, as far as it was discarded
        self._kept_from: int | None = None

    def push(self, text: str, final: bool) -> None:
        """Append to the text.  `final`: this is its end."""
        self._text += text
        self._final = final

    def since(self, start: int) -> str:
        """The text from `start` to `at`, without white space at its end, which is put back."""
        text = self._text[start : self.at].rstrip()
        self.at = start + len(text)
        return text

    def keep(self, start: int) -> None:
        """Keep the text from `start` on for `kept`."""
        self._kept, self._kept_from = [], start

    def keep_no_more(self) -> None:
        self._kept, self._kept_from = [], None

    def kept(self) -> str:
        """The text from where `keep` began to `at`."""
        assert self._kept_from is not None
        return "".join(self._kept) + self._text[self._kept_from : self.at]

    def _more(self) -> Steps[bool]:
        """Wait for more text.  False: the text has ended."""
        if self._final:
            return False
        yield
        return True

    def _discard(self) -> None:
        """Discard the text before `at`: it is not read again."""
        if self._kept_from is not None:
            self._kept.append(self._text[self._kept_from : self.at])
            self._kept_from = 0
        self._text = self._text[self.at :]
        self.at = 0

    def peek(self) -> Steps[str]:
        """The next character that is not white space; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self.at)
            assert space is not None
            self.at = space.end()
            if self.at < len(self._text):
                return self._text[self.at]
            if not (yield from self._more()):
                return ""

    def literal(self, *texts: str) -> Steps[str | None]:
        """Read the one of `texts` that comes next; None: none does."""
        longest = max(map(len, texts))
        while True:
            rest = self._text[self.at : self.at + longest]
            for text in texts:
                if rest.startswith(text):
                    self.at += len(text)
                    return text
            if not any(text.startswith(rest) for text in texts) or not (yield from self._more()):
                return None

    def is_cut(self, *texts: str) -> bool:
        """Whether the text has ended within one of `texts`, which is then read."""
        rest = self._text[self.at :]
        cut = self._final and bool(rest) and any(text.startswith(rest) for text in texts)
        if cut:
            self.at = len(self._text)
        return cut

    @property
    def at_end(self) -> bool:
        """Whether all of the text has been read, and no more comes."""
        return self._final and self.at == len(self._text)

    def word(self) -> Steps[str]:
        """Read the letters that come next; "" if the text ends with them."""
        start, at = self.at, self.at
        while True:
            word = _WORD.match(self._text, at)
            assert word is not None
            at = word.end()
            if at < len(self._text):
                self.at = at
                return self._text[start:at]
            if not (yield from self._more()):
                self.at = at
                return ""

    def until(self, markers: Markers, emit: Callable[[str], None], *, exact: bool = False) -> Steps[str | None]:
        """Emit the text up to a marker, and read it; None: there is none.  `exact`: emit white space before it, too,
        and nothing of a marker that is cut off."""
        while True:
            match = markers.find(self._text, self.at)
            end = match.start() if match else markers.safe(self._text, self.at)
            if self._final and not match and not exact:
                end = len(self._text)
            elif not exact:
                end = self.at + len(self._text[self.at : end].rstrip())
            emit(self._text[self.at : end])
            if match:
                self.gap = self._text[end : match.start()]
                self.at = match.end()
                return match.group()
            self.at = len(self._text) if self._final else end
            self._discard()
            if not (yield from self._more()):
                return None

    def object(self) -> Steps[str | None]:
        """Read the JSON object that comes next, and return it; None: there is none."""
        scanner, parts, at = JsonScanner(), [], self.at
        while True:
            at, piece = scanner.read(self._text, at)
            parts.append(piece)
            if scanner.state is Scan.WHOLE:
                self.at = at
                return "".join(parts)
            if scanner.state is Scan.INVALID or not (yield from self._more()):
                self.at = at if scanner.state is Scan.INVALID else len(self._text)
                return None

    def arguments(self, emit: Callable[[str], None], spoil: Callable[[], None], markers: Markers) -> Steps[ObjectEnd]:
        """Emit the JSON object that comes next while it arrives.  What is not JSON is emitted as it is, up to the
        bracket that seems to end it, or to one of `markers`, which is not read; before that, `spoil` is called."""
        scanner = JsonScanner()
        while True:
            self.at, piece = scanner.read(self._text, self.at)
            emit(piece)
            if scanner.state is Scan.WHOLE:
                return ObjectEnd.WHOLE
            if scanner.state is Scan.INVALID:
                spoil()
                return (yield from self._not_json(emit, markers, _Brackets(scanner)))
            self._discard()
            if not (yield from self._more()):
                emit(self._text[self.at :])
                self.at = len(self._text)
                return ObjectEnd.OPEN

    def _not_json(self, emit: Callable[[str], None], markers: Markers, brackets: _Brackets) -> Steps[ObjectEnd]:
        while True:
            match = markers.find(self._text, self.at)
            stop = match.start() if match else markers.safe(self._text, self.at)
            if self._final and not match:
                stop = len(self._text)
            end = brackets.end(self._text, self.at, stop)
            emit(self._text[self.at : end or stop])
            self.at = end or stop
            if end or match:
                return ObjectEnd.CLOSED if end else ObjectEnd.OPEN
            self._discard()
            if not (yield from self._more()):
                return ObjectEnd.OPEN

    def string(self) -> Steps[str | None]:
        """Read the JSON string that comes next, which may have raw control characters; None: there is none."""
        if (yield from self.peek()) != '"':
            return None
        at = self.at + 1
        while True:
            while match := _IN_STRING.search(self._text, at):
                at = match.end()
                if match.group() == '"':
                    text = self._text[self.at : at]
                    self.at = at
                    try:
                        return msgspec.json.decode(_CONTROLS.sub(_escape, text), type=str)
                    except (msgspec.DecodeError, UnicodeError):
                        return None
                at += 1
            at = max(at, len(self._text))
            if not (yield from self._more()):
                self.at = len(self._text)
                return None

    def expression(self) -> Steps[str | None]:
        """Read the expression of Python that comes next, up to a comma or a closing bracket that is not in it; None:
        the text ends before."""
        scanner, at = _Expression(), self.at
        while True:
            at = scanner.read(self._text, at)
            if scanner.is_whole:
                text = self._text[self.at : at].rstrip()
                self.at = at
                return text
            if not (yield from self._more()):
                self.at = len(self._text)
                return None

    def scalar(self) -> Steps[bool]:
        """Read the JSON string, number or word that comes next; returns whether there is one."""
        if (yield from self.peek()) == '"':
            return (yield from self.string()) is not None
        start, at = self.at, self.at
        while True:
            atom = _ATOM.match(self._text, at)
            assert atom is not None
            self.at = at = atom.end()
            if at < len(self._text) or not (yield from self._more()):
                return at > start


class _Expression:
    """Finds the end of an expression of Python.  `is_whole`: it has been found."""

    def __init__(self) -> None:
        self.is_whole = False
        self._depth = 0
        self._quote = ""  # of the string at the position

    def read(self, text: str, at: int) -> int:
        """Read on at `at`; returns where it stopped: at the end, or before quotes or an escape that may go on."""
        while at < len(text):
            if self._quote:
                end = self._string(text, at)
                if end == at:
                    return at
                at = end
                continue
            match = _NOT_PLAIN.search(text, at)
            if match is None:
                return len(text)
            at, char = match.start(), match.group()
            if char in "\"'":
                if len(text) - at < 3 and text[at:] in (char, 2 * char):
                    return at
                self._quote = 3 * char if text.startswith(3 * char, at) else char
                at += len(self._quote)
            elif char in "([{":
                self._depth += 1
                at += 1
            elif self._depth:
                self._depth -= char != ","
                at += 1
            else:
                self.is_whole = True
                return at
        return at

    def _string(self, text: str, at: int) -> int:
        """The end of what is in the string, or of the string."""
        for match in _QUOTE_OR_ESCAPE.finditer(text, at):
            begin = match.start()
            if match.group() == "\\":
                if begin + 1 == len(text):
                    return begin
                return begin + 2
            if text.startswith(self._quote, begin):
                end = begin + len(self._quote)
                self._quote = ""
                return end
            if self._quote.startswith(text[begin:]):
                return begin
        return len(text)


class _Brackets:
    """Finds the end of an object that is not JSON, from where `scanner` failed."""

    def __init__(self, scanner: JsonScanner) -> None:
        self._depth = len(scanner.closers)
        self._in_string = scanner.in_string
        self._escaped = False

    def end(self, text: str, at: int, stop: int) -> int | None:
        """The position after the last bracket, if it is before `stop`."""
        for index in range(at, stop):
            char = text[index]
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string and char in "{}[]":
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return index + 1
        return None


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]
