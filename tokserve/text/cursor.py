"""A text that is read forward while it arrives: what comes next, up to a marker, a string or an object of JSON.

Every step waits where it must see more, so what it finds does not depend on how the text was cut into pushes.  Steps
are generators: `yield from` them.  This file knows what JSON looks like from afar, and nothing of what is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it must see more text
_WORD = re.compile(r"[\w.:-]*")
_SPACE = re.compile(r"[ \t\r\n]*")
_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class Markers:
    """Texts to look for.  The first character of each is nowhere else in any, so no two can overlap."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._longest = max(map(len, texts), default=0)
        self._first = frozenset(text[0] for text in texts)
        self._pattern = re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first of them from `at` on."""
        return self._pattern.search(text, at)

    def safe(self, text: str, at: int) -> int:
        """The place up to which nothing of `text` can belong to one that is not complete."""
        for begin in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[begin] in self._first and any(mark.startswith(text[begin:]) for mark in self._texts):
                return begin
        return len(text)


class Cursor:
    """A place in a text.  `at` may be set back to where it was, unless something was said since.

    A step that does not find what it looks for stops there: it has read no further than it must, or all there is.

    `gap`: the white space before the marker that was found last.
    """

    def __init__(self) -> None:
        self.at = 0
        self.gap = ""
        self._text = ""  # what is not settled
        self._final = False

    def push(self, text: str, final: bool) -> None:
        """More of the text.  `final`: its end."""
        self._text += text
        self._final = final

    def since(self, start: int) -> str:
        """What has been read from `start` on, but for white space at its end, which is as good as not read."""
        text = self._text[start : self.at].rstrip()
        self.at = start + len(text)
        return text

    def _more(self) -> Steps[bool]:
        """False: this was all."""
        if self._final:
            return False
        yield
        return True

    def _settle(self) -> None:
        """Forget what has been read: from here nobody goes back."""
        self._text = self._text[self.at :]
        self.at = 0

    def peek(self) -> Steps[str]:
        """The next character that is no white space, "" at the end."""
        while True:
            space = _SPACE.match(self._text, self.at)
            assert space is not None
            self.at = space.end()
            if self.at < len(self._text):
                return self._text[self.at]
            if not (yield from self._more()):
                return ""

    def literal(self, *texts: str) -> Steps[str | None]:
        """That one of `texts` which comes next, and go behind it."""
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
        """The letters that come next; "" if nothing stands behind them yet."""
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

    def until(self, markers: Markers, say: Callable[[str], None], *, exact: bool = False) -> Steps[str | None]:
        """Say the text up to a marker, and go behind it; None: there is none.  `exact`: white space before it too."""
        while True:
            found = markers.find(self._text, self.at)
            end = found.start() if found else markers.safe(self._text, self.at)
            if self._final and not found:
                end = len(self._text)
            elif not exact:
                end = self.at + len(self._text[self.at : end].rstrip())
            say(self._text[self.at : end])
            if found:
                self.gap = self._text[end : found.start()]
                self.at = found.end()
                return found.group()
            self.at = end
            self._settle()
            if not (yield from self._more()):
                return None

    def object(self, say: Callable[[str], None] | None) -> Steps[str | None]:
        """The JSON object that comes next, which is said as it arrives, or else returned; None: it has no end."""
        depth, inside, at = 0, False, self.at
        while True:
            while found := (_IN_STRING if inside else _OUTSIDE).search(self._text, at):
                at = found.end()
                match found.group():
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
                    if say is None:
                        return text
                    say(text)
                    return ""
            at = max(at, len(self._text))
            if say is not None:
                say(self._text[self.at :])
                at -= len(self._text)
                self.at = len(self._text)
                self._settle()
            if not (yield from self._more()):
                self.at = len(self._text)
                return None

    def string(self) -> Steps[str | None]:
        """The JSON string that comes next."""
        if (yield from self.peek()) != '"':
            return None
        at = self.at + 1
        while True:
            while found := _IN_STRING.search(self._text, at):
                at = found.end()
                if found.group() == '"':
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
