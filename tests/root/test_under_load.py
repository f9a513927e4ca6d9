"""`scripts/under_load.sh` with a compiler that only waits: what it reports, and that it leaves no process behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "under_load.sh"
COMPILER = """\
#!/bin/sh
case "$*" in *-O0*) exit 0;; esac
echo $$ >> {pids}
exec sleep 1000
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "lines"),
    [
        ("true", 0, ["run 1 of 2: passed in", "run 2 of 2: passed in"]),
        ("exit 3", 3, ["run 1 of 2: failed with exit code 3 after"]),
    ],
)
def test_runs_are_repeated_until_one_fails(command: str, code: int, lines: list[str], tmp_path: Path) -> None:
    compiler, pids = tmp_path / "c++", tmp_path / "pids"
    compiler.write_text(COMPILER.format(pids=pids))
    compiler.chmod(0o755)
    begun = f"while [ ! -s {pids} ]; do sleep 0.01; done; "
    done = subprocess.run(
        [str(SCRIPT), "2", "sh", "-c", begun + command],
        env=os.environ | {"CXX": str(compiler)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    shown = done.stdout.splitlines()
    assert len(shown) == len(lines) and all(line.startswith(start) for line, start in zip(shown, lines, strict=True))
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid)


def test_a_count_that_is_none_is_refused() -> None:
    for count in ("0", "x", "-1"):
        done = subprocess.run([str(SCRIPT), count, "true"], capture_output=True, text=True, timeout=600)
        assert done.returncode == 2 and "usage:" in done.stderr
