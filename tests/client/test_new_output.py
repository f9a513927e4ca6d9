"""A new output value is four files: a line of a parameter and a row of the table of rooms in the core, and in its room
the declaration with its field in replies, and what computes it.

A process with an edited copy of `tokserve/protocol/params.py` and the room `tests.client.margin` serves the token route
with the sampler, the output buffer, the wire and the client of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.client.margin
import tokserve.protocol.params

LINE = "    return_margins: bool | None = None\n"
BEFORE = "    return_sampling_mask: bool | None"
PLAIN = {"token_ids": [5], "sampling_params": {"max_tokens": 4}}
CASES: list[dict[str, Any]] = [
    {"token_ids": [5], "sampling_params": {"max_tokens": 4, "return_margins": True}},
    {"token_ids": [5], "sampling_params": {"max_tokens": 4, "return_margins": True, "logprobs": 2}},
    PLAIN,
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The margins, then the reply and the events of each case."""
    tmp_path = tmp_path_factory.mktemp("added")
    source = Path(tokserve.protocol.params.__file__).read_text()
    assert source.count(BEFORE) == 1
    (tmp_path / "params.py").write_text(source.replace(BEFORE, LINE + BEFORE))
    (tmp_path / "config.json").write_text("{}")
    command = (sys.executable, "-m", "tests.client.added_output", str(tmp_path / "params.py"))
    process = subprocess.run(
        [*command, f"ipc://{tmp_path}/e.sock", str(tmp_path)],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    parsed: list[Any] = json.loads(process.stdout)
    return parsed


def test_a_new_value_comes_with_every_token_of_a_reply(results: list[Any]) -> None:
    expected = results[0]
    for reply in (results[1], results[3]):
        assert reply["choices"][0]["margins"] == expected
    assert len(results[3]["choices"][0]["logprobs"]["content"]) == len(expected)


def test_a_new_value_comes_with_every_event_of_a_stream(results: list[Any]) -> None:
    for events in (results[2], results[4]):
        deltas = [choice for event in events for choice in event["choices"]]
        assert [margin for delta in deltas for margin in delta["margins"]] == results[0]


def test_who_does_not_ask_gets_no_field(results: list[Any]) -> None:
    assert "margins" not in json.dumps(results[5:])


def test_a_new_value_is_two_files_of_a_room() -> None:
    files = {path.name for path in Path(tests.client.margin.__file__).parent.glob("*.py")} - {"__init__.py"}
    assert files == {"room.py", "source.py"}  # beside a line in protocol/params and one in base/rooms
