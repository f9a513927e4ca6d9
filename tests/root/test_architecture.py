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
    for name in set(re.findall(r"`((?:server|client|engine|runner|text|models|layers|ops|cli|executor)/\w+)`", TEXT)):
        path = ROOT / "tokserve" / name
        assert path.with_suffix(".py").is_file() or path.is_dir(), f"docs/architecture.md names {name}"
