"""Stop strings as one automaton (Aho-Corasick): the cost of a search depends on the text, not on their number."""

from __future__ import annotations

from collections.abc import Iterable

import ahocorasick


class Reasoning:
    """Where in an output that arrives in parts stop strings count: in one that begins with `opens`, white space aside,
    they do after `closes`; "" begins every output."""

    def __init__(self, opens: str, closes: str) -> None:
        self._opens = opens
        self._closes = closes
        self.begun = not opens  # the output begins with it

    def end(self, text: str, *, final: bool) -> tuple[int, bool]:
        """The position up to which stop strings do not count, and whether they do from there on.  `text`: the output
        from the last position on."""
        if not self.begun:
            start = text.lstrip()
            if not start.startswith(self._opens):
                undecided = self._opens.startswith(start) and not final
                return 0, not undecided
            self.begun = True
        at = text.find(self._closes)
        if at >= 0:
            return at + len(self._closes), True
        cut = next(n for n in range(len(self._closes) - 1, -1, -1) if text.endswith(self._closes[:n]))
        return len(text) - (0 if final else cut), False


class StopStrings:
    """Strings to find in a text that arrives in parts.  Searching does not change it: several outputs share one."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._automaton = ahocorasick.Automaton()
        self._longest = 0
        for string in strings:
            self._automaton.add_word(string, len(string))
            self._longest = max(self._longest, len(string))
        if self._longest:
            self._automaton.make_automaton()

    def __bool__(self) -> bool:
        return self._longest > 0

    def find(self, text: str, floor: int) -> tuple[int, int] | None:
        """Begin and end of the match that ends first after `floor` characters; of those that end together, the
        longest."""
        if not self._longest:
            return None
        for last, length in self._automaton.iter(
            text, max(0, floor - self._longest + 1)
        ):  # longest first at each position
            if last >= floor:
                return last + 1 - length, last + 1
        return None

    def safe(self, text: str) -> int:
        """The position up to which no character of `text` can belong to a match that is not complete."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if self._automaton.match(text[begin:]):  # a prefix of some string
                return begin
        return len(text)
