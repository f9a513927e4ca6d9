"""The examples for Ray run as their files say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests import needs
from tests.ports import free_port
from tests.ray.cluster import RayCluster

pytestmark = [needs.RAY.skips(), pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_ray_data_batch(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"name": i, "prompt": f"What is {i} + 1?"}) + "\n" for i in range(20)))
    with RayCluster(2) as cluster:  # reading and writing need a CPU, too
        command = [sys.executable, str(EXAMPLES / "ray_data_batch.py"), str(source), str(tmp_path / "out")]
        done = subprocess.run([*command, "--max-tokens", "4"], env=os.environ | cluster.env, check=False)
    assert done.returncode == 0
    rows = [json.loads(line) for path in (tmp_path / "out").glob("*.json") for line in path.read_text().splitlines()]
    assert sorted(row["name"] for row in rows) == list(range(20))
    assert all(
        row["finish_reason"] and not row["error"] and len(row["logprobs"]) == len(row["output_token_ids"])
        for row in rows
    )


def test_ray_serve() -> None:
    port = free_port()
    command = [sys.executable, str(EXAMPLES / "ray_serve.py"), "--most", "1", "--port", str(port)]
    with ExitStack() as stack:
        cluster = stack.enter_context(RayCluster(1))
        process = stack.enter_context(
            subprocess.Popen(command, env=os.environ | cluster.env, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(process.kill)  # else a failure below would wait for it
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        assert any(f"serving on http://127.0.0.1:{port}" in line for line in lines)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
