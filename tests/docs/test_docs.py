"""The documentation: generated pages are current, links lead somewhere, and every error code is explained."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.reference import DOCS, PAGES
from tests.sources import nodes
from tokserve.base import errors
from tokserve.server.http import protocol

ROOT = DOCS.parent
FILES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
]
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: python -m tests.docs.reference"


def _anchors(text: str) -> set[str]:
    """What a link may name in a page: its headings, as GitHub and mkdocs make anchors of them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("**", "")
        anchors.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return anchors


def _broken(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    broken = []
    for link in (first or second for first, second in LINK.findall(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path if not name else (path.parent / name)
        # GitHub keeps a dash at the end of an anchor, mkdocs does not
        is_there = target.exists() and not anchor.endswith("-")
        if not is_there or (anchor and target.suffix == ".md" and anchor not in _anchors(target.read_text())):
            broken.append(f"{path.relative_to(ROOT)}: {link}")
    return broken


def test_links_lead_somewhere() -> None:
    assert not [link for path in FILES for link in _broken(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_bodies_are_sent_as_json(path: Path) -> None:
    """curl with -d alone declares the body as a form, which the server refuses."""
    commands = re.findall(r"^curl .* -d .*$", path.read_text(), re.M)
    assert not [one for one in commands if "-H 'Content-Type: application/json'" not in one]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("*.md")}
    assert pages == set(re.findall(r"^ +- .*?: ([\w-]+\.md)$", navigation, re.M))


def test_every_error_code_is_explained() -> None:
    listed = subprocess.run(
        ["grep", "-rhoE", r"\bcode ?= ?\"[a-z_]+\"", ROOT / "tokserve", "--include=*.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    codes = set(re.findall(r'"([a-z_]+)"', listed.stdout))
    explained = (DOCS / "troubleshooting.md").read_text()
    assert not {code for code in codes if f"`{code}`" not in explained}


def raised_codes() -> Iterator[tuple[str, int]]:
    """The codes that the package raises, as (code, status), where both are in the source."""
    statuses = {name: kind.status for name, kind in (vars(errors) | vars(protocol)).items() if hasattr(kind, "status")}
    statuses["invalid"] = errors.RequestError.status
    for path in (ROOT / "tokserve").rglob("*.py"):
        for call in nodes(path):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in statuses:
                for keyword in call.keywords:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        yield str(keyword.value.value), statuses[call.func.id]


def test_error_codes_are_explained_with_their_status() -> None:
    explained = set()
    for row in re.findall(r"^\| (\d{3}.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.M):
        for part in row.split(";"):
            named = re.findall(r"`(\w+)`", part)
            explained |= {(code, int(status)) for code in named for status in re.findall(r"\b\d{3}\b", part)}
    raised = set(raised_codes())
    assert len(raised) > 40 and not raised - explained


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_decisions_have_numbers_of_their_own() -> None:
    """Files that two branches add get the same number easily; the title has the file's number."""
    files = sorted((DOCS / "decisions").glob("*.md"))
    numbers = [path.name[:3] for path in files]
    assert len(numbers) > 50 and sorted(set(numbers)) == numbers
    assert [path.read_text().partition(": ")[0] for path in files] == [f"# {number}" for number in numbers]
