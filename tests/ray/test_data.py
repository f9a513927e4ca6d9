"""The Ray Data stage on a real cluster: ten thousand prompts, rows that cannot be served, and a node that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.ray.cluster import RayCluster
from tokserve.features.offline.llm import LLM
from tokserve.protocol.params import SamplingParams

pytestmark = [needs.RAY.skips(), pytest.mark.slow, pytest.mark.timeout(900)]
ROWS = 10_000
PARAMS = {"max_tokens": 4, "temperature": 1.0, "seed": 5, "logprobs": 0, "ignore_eos": True}


def job(cluster: RayCluster, output: Path, rows: int, kill: int | None = None) -> tuple[list[dict[str, Any]], str]:
    """The rows of `python -m tests.ray.batch`, by number, and what it printed.  `kill`: a node that dies midway."""
    command = [sys.executable, "-m", "tests.ray.batch", str(rows), json.dumps(PARAMS), str(output)]
    log = output.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | cluster.env
        )
        assert process.stdout
        assert process.stdout.readline() == "began\n", log.read_text()
        if kill is not None:
            cluster.kill(kill)
        with process.stdout:
            process.stdout.read()
        assert process.wait(800) == 0, log.read_text()[-4000:]
    done = [json.loads(line) for line in output.read_text().splitlines()]
    return sorted(done, key=lambda row: int(row["number"])), log.read_text()


def check(done: list[dict[str, Any]], rows: int) -> None:
    """Every row is there once, and some are those that an engine gives alone."""
    assert [row["number"] for row in done] == list(range(rows))
    assert {row["error"] for row in done if row["number"] % 1000 != 999} == {""}
    assert all("token" in row["error"] and not row["output_token_ids"] for row in done if row["number"] % 1000 == 999)
    with LLM("demo", cpu_threads=1, kv_cache_memory_bytes=2 << 20) as llm:
        for row in done[:: max(1, rows // 7)]:
            (output,) = llm.generate([{"prompt_token_ids": row["token_ids"]}], SamplingParams(**PARAMS))
            (choice,) = output.outputs
            assert (list(choice.token_ids), choice.text) == (row["output_token_ids"], row["text"])
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            assert [logprobs[token].logprob for token, logprobs in pairs] == row["logprobs"]


def test_ten_thousand_prompts(tmp_path: Path) -> None:
    with RayCluster(1, 1) as cluster:
        done, log = job(cluster, tmp_path / "rows.jsonl", ROWS)
    check(done, ROWS)
    assert "Generate" in log, "no progress was shown"
    assert "the engine died" not in log, "the end of a job is no crash"


def test_a_dead_node_loses_no_row(tmp_path: Path) -> None:
    with RayCluster(1, 1, 1) as cluster:
        done, _ = job(cluster, tmp_path / "rows.jsonl", 3000, kill=0)
    check(done, 3000)
