"""`make audit` with a pip-audit that answers what the test says: no network, and the target's own words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).parent.parent.parent
BY_HAND = """\
printf '%s\\n' "$*" >> {log}
for word; do
  case "$last" in --output) report="$word";; --vulnerability-service) service="$word";; esac
  last="$word"
done
case "$service:{answer}" in
  *:clean) exit 0;;
  *:found|osv:osv) echo "idna 3.4 PYSEC-2024-60" > "$report"; exit 1;;
  *) echo "requests.exceptions.ConnectionError: no such host" >&2; exit 1;;
esac
"""
pytestmark = needs.MAKE.skips()


def audit(directory: Path, answer: str) -> tuple[int, str, list[str]]:
    """Exit code, output, and the command lines that pip-audit got."""
    shutil.copy(ROOT / "Makefile", directory)
    for name in ("pyproject.toml", "CMakeLists.txt", "constraints.txt"):
        (directory / name).touch()
    calls = directory / "calls"
    for name, text in (
        ("pip", "echo idna==3.4; echo torch==2.13.0+cpu"),
        ("audit/bin/pip-audit", BY_HAND.format(log=calls, answer=answer)),
    ):
        path = directory / ".venv" / (name if "/" in name else f"bin/{name}")
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (directory / ".venv/.installed").touch()
    done = subprocess.run(
        ["make", "audit", "TOKSERVE_NATIVE=OFF"], cwd=directory, capture_output=True, text=True, timeout=600
    )
    assert (directory / "build/installed.txt").read_text() == "idna==3.4\ntorch==2.13.0\n"
    return done.returncode, done.stdout, calls.read_text().splitlines()


def test_an_audit_without_findings(tmp_path: Path) -> None:
    code, output, calls = audit(tmp_path, "clean")
    assert code == 0 and "nothing wrong with 2 packages" in output and len(calls) == 1


@pytest.mark.parametrize(("answer", "service"), [("found", "pypi"), ("osv", "osv")])
def test_vulnerabilities_are_shown(tmp_path: Path, answer: str, service: str) -> None:
    code, output, calls = audit(tmp_path, answer)
    assert code and "PYSEC-2024-60" in output and f"as {service} knows" in output
    assert len(calls) == (1 if service == "pypi" else 2)


def test_a_service_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    code, output, calls = audit(tmp_path, "unreachable")
    assert code and "nothing is known" in output
    for service, call in zip(("pypi", "osv"), calls, strict=True):
        assert f"{service} cannot be asked from here: requests.exceptions.ConnectionError" in output
        assert f"--vulnerability-service {service} " in call and "--strict --no-deps --disable-pip" in call
