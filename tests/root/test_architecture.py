"""docs/architecture.md names what exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = [path for path in (ROOT / "tokserve").rglob("*.py") if "demo_model" not in path.parts]
MAX_CARRIERS = 8


def test_a_request_has_at_most_eight_carriers_that_exist_once() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|", TEXT, re.MULTILINE)
    rows = [row for row in rows if "`" in row[1] and ".py" in row[2]]
    assert 0 < len(rows) <= MAX_CARRIERS and [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    for _, carriers, files in rows:
        sources = [ROOT / "tokserve" / name for name in re.findall(r"`([\w/]+\.py)`", files)]
        for carrier in re.findall(r"`(\w+)`", carriers):
            declared = [path for path in FILES if re.search(rf"^class {carrier}\b", path.read_text(), re.MULTILINE)]
            assert len(declared) == 1 and declared[0] in sources, f"{carrier} is declared in {declared}"


def test_every_module_it_names_is_there() -> None:
    packages = "|".join(path.name for path in (ROOT / "tokserve").iterdir() if (path / "__init__.py").is_file())
    names = set(re.findall(rf"`((?:{packages})(?:/\w+)*)/?`", TEXT))
    assert "features/weights" in names
    for name in names:
        path = ROOT / "tokserve" / name
        assert path.with_suffix(".py").is_file() or path.is_dir(), f"docs/architecture.md names {name}"


def test_every_room_is_in_its_table() -> None:
    folders = (
        folder for kind in ("features", "dialects", "families") for folder in (ROOT / "tokserve" / kind).iterdir()
    )
    for folder in folders:
        if (folder / "__init__.py").is_file():
            assert f"`{folder.parent.name}/{folder.name}/`" in TEXT, f"docs/architecture.md does not name {folder.name}"


def test_the_reading_order_counts_lines_that_are_there() -> None:
    page = (ROOT / "docs" / "reading-order.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| [^|]+ \| ([^|]+) \| [^|]+ \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 12
    total = 0
    for files, lines, minutes in rows:
        paths = [ROOT / "tokserve" / f"{name}.py" for name in re.findall(r"`([\w/]+)`", files)]
        count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        assert abs(count - int(lines)) <= 0.15 * count, f"{files} have {count} lines"
        assert int(minutes) == round(int(lines) / 25)
        total += count
    stated = re.search(r"about ([\d,]+) lines", page)
    assert stated is not None and abs(total - int(stated[1].replace(",", ""))) <= 0.1 * total, f"{total} lines"
