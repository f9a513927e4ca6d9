"""The first request that a ready server proposes is one that it answers."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from tests.e2e.server import Server
from tests.waiting import until
from tokserve.cli.banner import first_request
from tokserve.config import Config


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "/v1/chat/completions"),
        ({"tokens_only": True}, "/inference/v1/generate"),
        ({"runner": "pooling", "served_model_name": ["it's"]}, "/pooling"),
        ({"api_key": ["secret"]}, "/v1/chat/completions"),
    ],
)
def test_the_first_request_suits_the_server(options: dict[str, object], path: str) -> None:
    command = first_request(Config.make(model="demo", **options), "http://127.0.0.1:1")
    words = shlex.split(command)
    assert words[:3] == ["curl", "-s", f"http://127.0.0.1:1{path}"]
    assert "secret" not in command and ("Authorization: Bearer $TOKSERVE_API_KEY" in words) == ("api_key" in options)
    body = json.loads(words[-1])
    assert body.get("model", "demo") == options.get("served_model_name", ["demo"])[0]


@pytest.mark.slow
def test_the_log_ends_with_a_request_that_is_answered(demo: Server) -> None:
    until(lambda: any("try: " in line for line in demo.log))
    (line,) = (line for line in demo.log if "try: " in line)
    done = subprocess.run(shlex.split(line.partition("try: ")[2]), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "85"
    assert any("status page: http://" in line for line in demo.log)
