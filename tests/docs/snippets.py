"""The code blocks of the documentation, and what the comment in front of a block says about it.

`<!-- not run: REASON -->` is on a block that belongs to a framework, needs other hardware or is an extract;
`<!-- server: FLAGS -->` names the options of the server that a block is run against.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.reference import DOCS

ROOT = DOCS.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "tokserve/rl/README.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
]
BLOCK = re.compile(r"^(?:<!-- ([^\n]*?) -->\n)?```(\w*)\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Snippet:
    """A code block: where it is, its language, its text and the comment in front of it."""

    page: str
    line: int
    language: str
    text: str
    note: str

    @property
    def is_run(self) -> bool:
        return not self.note.startswith("not run: ")

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of the server that it needs."""
        return tuple(self.note.removeprefix("server: ").split()) if self.note.startswith("server: ") else ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets() -> Iterator[Snippet]:
    """All code blocks of the documentation."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            note, language, code = block.groups(default="")
            line = text.count("\n", 0, block.start()) + 1
            yield Snippet(path.relative_to(ROOT).as_posix(), line, language, code, note)


def commands(script: str) -> list[list[str]]:
    """The words of each command of a script, without comments and documents within it."""
    lines = re.sub(r"<<(\w+)\n.*?\n\1$", "", re.sub(r"\\\n", " ", script), flags=re.M | re.S)
    result, pending = [], ""
    for line in lines.splitlines():
        pending += line + "\n"
        try:
            result.append(shlex.split(pending, comments=True))
        except ValueError:  # a quotation that goes on
            continue
        pending = ""
    return [words for words in result if words]


@dataclass(frozen=True)
class Request:
    """What a curl sends; `path` has its query."""

    method: str
    path: str
    headers: dict[str, str]
    body: str | None


def requests(script: str) -> list[Request]:
    """The requests of the curls in a script."""
    return [_request(words) for words in commands(script) if words[0] == "curl"]


def _request(words: list[str]) -> Request:
    following = dict(itertools.pairwise(words))
    body = following.get("-d")
    headers = [after for word, after in itertools.pairwise(words) if word == "-H"]
    url = next(word for word in words if re.match(r"(http://)?(127\.0\.0\.1|localhost):\d+/", word))
    method = following.get("-X", "GET" if body is None else "POST")
    named = {name: value.strip() for name, _, value in (header.partition(":") for header in headers)}
    return Request(method, re.sub(r"^(http://)?[^/]*", "", url), named, body)
