"""The log of a whole server, all processes of it, from start to end."""

from __future__ import annotations

import json

import pytest

from tests.e2e.server import Server


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_json_lines_of_all_processes_and_of_requests(servers: int) -> None:
    flags = ["--tokens-only", "--log-format", "json", "--log-requests"]
    flags += ["--api-server-count", str(servers)] if servers else []
    with Server("demo", *flags) as server:
        body = {"token_ids": [81, 82, 83], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
        answer = server.post("/inference/v1/generate", body, headers={"X-Request-Id": "generate-tokens-mine"})
        assert answer.status_code == 200
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log]
    assert {line["process"] for line in lines} == {"server", "engine"} | {f"api-{i}" for i in range(servers)}
    stalled = "tokserve.server.http.loop_monitor"  # warns on a busy machine
    assert all(line["level"] == "info" for line in lines if line["logger"] != stalled)
    about = [line for line in lines if line.get("request_id") == "mine"]
    assert [line["event"] for line in about] == ["request_accepted", "request_ended"]
    assert about[1]["reasons"] == {"max_tokens": 1} and about[1]["output_tokens"] == 3
    assert about[1]["total"] >= about[1]["first_token"] >= about[1]["queued"] >= 0
