"""The list of optional requirements is whole: every conditional skip is on it, and it says what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import needs

TESTS = Path(needs.__file__).parent
SKIP = re.compile(r"pytest\.skip\(|skipif\(|importorskip\(|\.skips\(\)|\.or_skip\(\)")
BY_SERVER = "conformance/"  # skips there depend on the server that is asked: its options, not this machine


def test_every_conditional_skip_is_listed() -> None:
    skipping = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if SKIP.search(path.read_text(encoding="utf-8")) and path not in (Path(needs.__file__), Path(__file__))
    }
    listed = {name for need in needs.NEEDS for name in need.files}
    assert {name for name in skipping if not name.startswith(BY_SERVER)} == listed


def test_the_report_has_install_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    missing, present = (
        replace(need, is_there=lambda present=present: present)
        for need, present in ((needs.CHROMIUM, False), (needs.MAKE, True))
    )
    monkeypatch.setattr(needs, "NEEDS", (missing, present))
    assert needs.report().splitlines()[1:] == [
        "  MISSING  Chromium and ChromeDriver",
        "           apt-get install chromium chromium-driver",
        "           skipped without it: tests/e2e/browser.py",
        "  found    make",
    ]
