"""A new option and a new sampling parameter are one line each: they reach the engine from the bodies of all routes.

A process with an edited copy of `tokserve/protocol/params.py` serves the real routes over the real client to a fake
engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tokserve.protocol.params
from tests.text.checkpoints import write_chatml

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions/tokens"
LINES = (
    ("    adapter: str", '    flavor: Annotated[str, Meta(max_length=8)] = "plain"\n'),
    ("    ignore_eos: bool", "    sharpness: Annotated[float, Meta(ge=0, le=3)] = 1.0\n"),
)
GIVEN: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"token_ids": [5], "flavor": "sour", "sampling_params": {"sharpness": 2.5}}),
    (COMPLETIONS, {"prompt": [5], "flavor": "sour", "sharpness": 2.5}),
    (CHAT, {"tokens": [5], "flavor": "sour", "sharpness": 2.5}),
]
DEFAULT: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"token_ids": [5], "flavor": None, "sampling_params": {"sharpness": None}}),
    (COMPLETIONS, {"prompt": [5], "flavor": None, "sharpness": None}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"token_ids": [5], "flavor": "much too sour"}),
    (COMPLETIONS, {"prompt": [5], "flavor": "much too sour"}),
    (GENERATE, {"token_ids": [5], "sampling_params": {"sharpness": 3.5}}),
    (COMPLETIONS, {"prompt": [5], "sharpness": 3.5}),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of all cases in order, then the schemas of the OpenAPI document."""
    tmp_path = tmp_path_factory.mktemp("edited")
    source = Path(tokserve.protocol.params.__file__).read_text()
    for before, line in LINES:
        assert source.count(before) == 1
        source = source.replace(before, line + before)
    (tmp_path / "params.py").write_text(source)
    model = write_chatml(tmp_path / "model")
    (model / "config.json").write_text("{}")
    command = (sys.executable, "-m", "tests.client.edited_params", str(tmp_path / "params.py"))
    process = subprocess.run(
        [*command, f"ipc://{tmp_path}/e.sock", str(model)],
        input=json.dumps([*GIVEN, *DEFAULT, *REFUSED]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    parsed: list[Any] = json.loads(process.stdout)
    return parsed


def test_new_options_reach_the_engine_from_every_route(results: list[Any]) -> None:
    for options, task in results[: len(GIVEN)]:
        assert options["flavor"] == "sour" and task["sharpness"] == 2.5


def test_null_is_the_default_of_new_options(results: list[Any]) -> None:
    for options, task in results[len(GIVEN) : len(GIVEN) + len(DEFAULT)]:
        assert "flavor" not in options and "sharpness" not in task  # defaults are not sent


def test_ranges_of_new_options_are_checked(results: list[Any]) -> None:
    errors = results[len(GIVEN) + len(DEFAULT) : -1]
    assert [status for status, _ in errors] == [400] * 4
    assert [error["param"] for _, error in errors] == ["flavor", "flavor", "sampling_params.sharpness", "sharpness"]
    assert errors[0][1]["message"] == "flavor must have 0 to 8 characters, got 13"
    assert errors[2][1]["message"] == "sampling_params.sharpness must be from 0 to 3, got 3.5"


def test_new_options_are_in_the_openapi_document(results: list[Any]) -> None:
    schemas = results[-1]
    for name in ("GenerateBody", "CompletionBody", "ChatBody", "ResponsesBody"):
        assert schemas[name]["properties"]["flavor"]["anyOf"][0] == {"type": "string", "maxLength": 8}
    for name in ("SamplingParams", "CompletionBody", "ChatBody", "ResponsesBody"):
        assert schemas[name]["properties"]["sharpness"]["anyOf"][0]["maximum"] == 3
