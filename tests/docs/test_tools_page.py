"""docs/tools.md names every parser, and has a row for every family that docs/models.md serves."""

from __future__ import annotations

import re

from tests.docs.reference import DOCS
from tokserve.config.parsers import REASONING_PARSERS, TOOL_PARSERS
from tokserve.features.chat.tool_formats import THINKING, TOOL_FORMATS

PAGE = (DOCS / "tools.md").read_text()
TOOLS = {form.name: form for form in TOOL_FORMATS}
THOUGHTS = {thinking.name for thinking in THINKING}
NAME = re.compile(r"`([\w.]+)`")


def table(text: str, head: str) -> list[list[str]]:
    """The cells of the rows below this head."""
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_family_has_its_parsers_or_the_reason_why_not() -> None:
    rows = {row[0]: row[1:] for row in table(PAGE, "| family | tool parser |")}
    models = (DOCS / "models.md").read_text()
    assert {row[0] for row in table(models, "| family | architectures |")} <= rows.keys()
    for family, (tools, thinking, forced) in rows.items():
        for cell, known in ((tools, TOOLS.keys()), (thinking, THOUGHTS)):
            names = set(NAME.findall(cell))
            assert names <= known and (names or cell.startswith("no: ")), (family, cell)
        forms = [TOOLS[name] for name in NAME.findall(tools)]
        if forms:
            kinds = {"the object" if form.is_json else "own" for form in forms}
            assert set(forced.split("; ")) == kinds, family
        else:
            assert forced == "JSON" or "no text" in forced, family


def test_every_parser_is_on_the_page_and_an_option() -> None:
    items = set(re.findall(r"^- `([\w.]+)`: ", PAGE, re.M))
    assert items == TOOLS.keys() | THOUGHTS
    in_table = set(NAME.findall("".join("".join(row[1:]) for row in table(PAGE, "| family | tool parser |"))))
    assert TOOLS.keys() | THOUGHTS <= in_table
    assert ("auto", *TOOLS) == TOOL_PARSERS and ("auto", "none", *(row.name for row in THINKING)) == REASONING_PARSERS
