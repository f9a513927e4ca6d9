"""Reads one JSON object strictly while it arrives, and escapes what its strings have unescaped.

A raw control character inside a string can only mean itself, so it is escaped and nothing is lost.  Everything else
that is not JSON is an error where it stands: it is not guessed what was meant.  So is what JSON allows and no client
can hold: a lone surrogate, a number that is not finite, thousands of digits, very deep nesting.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum
from typing import Any

MAX_DEPTH = 256
MAX_DIGITS = 4096  # characters of a number; Python reads integers of at most 4300 digits
_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_SAMPLES = (r"\n", r"\u0000", r"\ud8a0\udc00")  # of escapes
_LONGEST_ESCAPE = len(_SAMPLES[-1])
_ATOM = re.compile(r"[-+.0-9a-zA-Z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_CLOSES = {"{": "}", "[": "]"}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.DOTALL)  # a string, perhaps open, or a bracket or comma


class Scan(Enum):
    """How far an object has been read."""

    OPEN = 0
    WHOLE = 1
    INVALID = 2


class _Next(Enum):
    """What may come next."""

    OBJECT = 0  # the object itself
    VALUE = 1
    FIRST_ITEM = 2  # a value, or the end of the list
    KEY = 3
    FIRST_KEY = 4  # a key, or the end of the object
    COLON = 5
    END = 6  # of the list or object, or a comma


class JsonScanner:
    """One object.  `state`: how far it has been read; `closers`: the brackets that are still to come, the outermost
    first; `in_string`: the position is inside a string."""

    def __init__(self) -> None:
        self.state = Scan.OPEN
        self.closers: list[str] = []
        self.in_string = False
        self._next = _Next.OBJECT
        self._after_string = _Next.END

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read on at `at`.  Returns where it stopped, and the JSON up to there.  An open object stops before a number,
        word or escape that more text may continue."""
        out: list[str] = []
        while self.state is Scan.OPEN and at < len(text):
            if self.in_string:
                end, piece = self._string(text, at)
            else:
                end = self._structure(text, at)
                piece = text[at:end]
            if end == at:
                break
            out.append(piece)
            at = end
        return at, "".join(out)

    def _fail(self, at: int) -> int:
        self.state = Scan.INVALID
        return at

    def _string(self, text: str, at: int) -> tuple[int, str]:
        """The next part of a string."""
        if plain := _PLAIN.match(text, at):
            return plain.end(), plain.group()
        if text[at] == '"':
            self.in_string = False
            self._next = self._after_string
            return at + 1, '"'
        if text[at] != "\\":
            return at + 1, json.dumps(text[at])[1:-1]
        if escape := _ESCAPE.match(text, at):
            return escape.end(), escape.group()
        may_go_on = len(text) - at < _LONGEST_ESCAPE and _may_become_escape(text[at:])
        return (at if may_go_on else self._fail(at)), ""

    def _structure(self, text: str, at: int) -> int:
        """The next bracket, comma, colon, quote, number, word or white space."""
        space = _SPACE.match(text, at)
        if space is not None and space.end() > at:
            return space.end()
        char, expected = text[at], self._next
        if self.closers and char == self.closers[-1] and expected in (_Next.FIRST_KEY, _Next.FIRST_ITEM, _Next.END):
            self.closers.pop()
            self._next = _Next.END
            if not self.closers:
                self.state = Scan.WHOLE
            return at + 1
        match expected:
            case _Next.OBJECT:
                return self._open(at) if char == "{" else self._fail(at)
            case _Next.KEY | _Next.FIRST_KEY:
                return self._quote(at, _Next.COLON) if char == '"' else self._fail(at)
            case _Next.COLON:
                self._next = _Next.VALUE
                return at + 1 if char == ":" else self._fail(at)
            case _Next.END:
                self._next = _Next.KEY if self.closers[-1] == "}" else _Next.VALUE
                return at + 1 if char == "," else self._fail(at)
        if char == '"':
            return self._quote(at, _Next.END)
        return self._open(at, char) if char in _CLOSES else self._atom(text, at)

    def _open(self, at: int, bracket: str = "{") -> int:
        if len(self.closers) == MAX_DEPTH:
            return self._fail(at)
        self.closers.append(_CLOSES[bracket])
        self._next = _Next.FIRST_KEY if bracket == "{" else _Next.FIRST_ITEM
        return at + 1

    def _quote(self, at: int, after: _Next) -> int:
        self.in_string, self._after_string = True, after
        return at + 1

    def _atom(self, text: str, at: int) -> int:
        """A number, or a word: only a complete one is read."""
        atom = _ATOM.match(text, at)
        assert atom is not None
        word = atom.group()
        if atom.end() == len(text) and len(word) <= MAX_DIGITS:
            return at
        number = len(word) <= MAX_DIGITS and _NUMBER.fullmatch(word)
        if word not in _WORDS and not (number and (word.lstrip("-").isdigit() or math.isfinite(float(word)))):
            return self._fail(at)
        self._next = _Next.END
        return atom.end()


def _may_become_escape(begun: str) -> bool:
    """Whether more text can make this an escape."""
    return any(_ESCAPE.fullmatch(begun + sample[len(begun) :]) for sample in _SAMPLES)


def object_of(text: str) -> str | None:
    """The JSON of a text that is an object, with white space around it; None: it is none."""
    begin = len(text) - len(text.lstrip())
    scanner = JsonScanner()
    end, json_text = scanner.read(text, begin)
    return json_text if scanner.state is Scan.WHOLE and not text[end:].strip() else None


def complete_members(text: str) -> dict[str, Any]:
    """The members of an object whose text was cut off, without the last one unless its value cannot go on: a number may
    have more digits, and what an open string, list or object has so far is not its value."""
    depth, ends = 0, [0]  # where a member is complete
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in ("{", "["):
            depth += 1
        elif token in ("}", "]"):
            depth -= 1
        elif token == "," and depth == 1:
            ends.append(match.start())
    whole = text.rstrip()
    if whole.endswith(('"', "}", "]", *_WORDS)):
        ends.append(len(whole))
    for end in ends[:-3:-1]:
        try:
            return dict(json.loads(text[:end] + "}"))
        except ValueError:  # a key without a value, or an open string
            continue
    return {}
