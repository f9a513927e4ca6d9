"""The benchmark of the front end runs, and its clients get exactly the outputs of its scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "frontend.py"
CASES = ["stream", "stream-arrays", "stream-objects-5", "full", "full-arrays", "full-base64", "full-objects"]


@pytest.mark.slow
@pytest.mark.parametrize("window", ["1", "8"])
def test_every_case_gives_all_tokens(tmp_path: Path, window: str) -> None:
    rows = tmp_path / "rows.json"
    options = [
        "--concurrency",
        "8",
        "--output-len",
        "20",
        "--tokens",
        "500",
        "--window",
        window,
        "--port",
        str(free_port()),
    ]
    subprocess.run([sys.executable, SCRIPT, *options, "--json", rows, "--cases", *CASES], check=True, timeout=600)
    results = json.loads(rows.read_text())
    assert [row["case"] for row in results] == CASES and all(row["tok_s"] > 0 for row in results)
    if window == "1":
        assert results[0]["tokens_per_event"] == 1.0
