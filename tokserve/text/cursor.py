"""Reads a text forward while it arrives: the next character, literal, word, marker, JSON string or JSON object.

Every step waits for the text that it needs, so results do not depend on how the text was split into pushes.  Steps are
generators: `yield from` them.  JSON is parsed only as far as needed to find the end of a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cached_property
from typing import TypeVar

import msgspec

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text
_WORD = re.compile(r"[\w.:-]*")
_SPACE = re.compile(r"[ \t\r\n]*")
_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


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

    def push(self, text: str, final: bool) -> None:
        """Append to the text.  `final`: this is its end."""
        self._text += text
        self._final = final

    def since(self, start: int) -> str:
        """The text from `start` to `at`, without white space at its end, which is put back."""
        text = self._text[start : self.at].rstrip()
        self.at = start + len(text)
        return text

    def _more(self) -> Steps[bool]:
        """Wait for more text.  False: the text has ended."""
        if self._final:
            return False
        yield
        return True

    def _discard(self) -> None:
        """Discard the text before `at`: it is not read again."""
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
        """Emit the text up to a marker, and read it; None: there is none.  `exact`: emit white space before it, too."""
        while True:
            match = markers.find(self._text, self.at)
            end = match.start() if match else markers.safe(self._text, self.at)
            if self._final and not match:
                end = len(self._text)
            elif not exact:
                end = self.at + len(self._text[self.at : end].rstrip())
            emit(self._text[self.at : end])
            if match:
                self.gap = self._text[end : match.start()]
                self.at = match.end()
                return match.group()
            self.at = end
            self._discard()
            if not (yield from self._more()):
                return None

    def object(self, emit: Callable[[str], None] | None) -> Steps[str | None]:
        """Read the JSON object that comes next: passed to `emit` as it arrives, or returned; None: it does not end."""
        depth, inside, at = 0, False, self.at
        while True:
            while match := (_IN_STRING if inside else _OUTSIDE).search(self._text, at):
                at = match.end()
                match match.group():
                    case "\\":
                        at += 1
                    case '"':
                        inside = not inside
                    case "{" | "[":
                        depth += 1
                    case _:
                        depth -= 1
                if depth == 0:
                    text = self._text[self.at : at]
                    self.at = at
                    if emit is None:
                        return text
                    emit(text)
                    return ""
            at = max(at, len(self._text))
            if emit is not None:
                emit(self._text[self.at :])
                at -= len(self._text)
                self.at = len(self._text)
                self._discard()
            if not (yield from self._more()):
                self.at = len(self._text)
                return None

    def string(self) -> Steps[str | None]:
        """Read the JSON string that comes next; None: there is none."""
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
                        return msgspec.json.decode(text, type=str)
                    except (msgspec.DecodeError, UnicodeError):
                        return None
                at += 1
            at = max(at, len(self._text))
            if not (yield from self._more()):
                self.at = len(self._text)
                return None
