"""The README's examples give what the README shows, and the proof of exactness that docs/evaluating.md begins with."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server

README = (Path(__file__).parents[2] / "README.md").read_text()
SHOWN = re.findall(r"```sh\n(curl .*?)```\n```json\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", README, re.DOTALL)
VARYING = {"id", "request_id", "created", "cached_tokens", "system_fingerprint"}


def about(value: Any) -> Any:
    """A logprob, to what holds on any instruction set."""
    return pytest.approx(value, abs=1e-2) if isinstance(value, float) else value


def trimmed(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value without the fields that differ between runs."""
    if isinstance(value, dict):
        return {key: trimmed(entry, leaf) for key, entry in value.items() if key not in VARYING}
    return [trimmed(entry, leaf) for entry in value] if isinstance(value, list) else leaf(value)


def test_there_are_examples_to_check() -> None:
    assert len(SHOWN) == 2 and len(PYTHON) == 1


@pytest.mark.parametrize("example", range(len(SHOWN)))
def test_curl_shows_what_the_readme_shows(demo: Server, example: int) -> None:
    command, reply = SHOWN[example]
    command = command.replace("http://127.0.0.1:8000", demo.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert trimmed(json.loads(done.stdout), lambda value: value) == trimmed(json.loads(reply), about)


def test_python_prints_what_the_readme_shows() -> None:
    code, printed = PYTHON[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_same_bits_beside_other_requests(demo: Server) -> None:
    program = Path(__file__).parents[2] / "examples" / "same_bits.py"
    command = [sys.executable, str(program), demo.url, "--others", "8", "--repeats", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "the same tokens and logprobs in 4 of 4 repetitions" in done.stdout, done.stderr
    demo.wait_idle()
