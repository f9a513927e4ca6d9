"""Both benchmarks against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tokserve.cli.main import main


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["tokens", "openai", "openai-chat"])
@pytest.mark.parametrize("flags", [["--turns", "2"], ["--n", "2", "--no-stream", "--logprobs", "1"]])
def test_backend(demo: Server, backend: str, flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = [
        "bench",
        "serve",
        "--base-url",
        demo.url,
        "--backend",
        backend,
        "--num-prompts",
        "4",
        "--input-len",
        "9",
        "--output-len",
        "5",
        "--no-progress",
        "--result-json",
        str(out),
        *flags,
    ]
    with pytest.raises(SystemExit) as end:
        main(command)
    row = json.loads(out.read_text())
    assert end.value.code == 0 and row["failed"] == 0 and row["total_output_tokens"] == 40
    if backend != "openai-chat":
        assert row["total_input_tokens"] == (4 * (9 + 23) if "--turns" in flags else 36)
    assert (row["mean_ttft_ms"] is None) == ("--no-stream" in flags)


@pytest.mark.usefixtures("engine_threads")
def test_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    with pytest.raises(SystemExit) as end:
        main(
            [
                "bench",
                "offline",
                "demo",
                "--num-prompts",
                "3",
                "--input-len",
                "8",
                "--output-len",
                "4",
                "--no-progress",
                "--latency-iters",
                "2",
                "--max-num-seqs",
                "2",
                "--api-key",
                "k",
                "--admin-api-key",
                "a",
                "--result-json",
                str(out),
            ]
        )
    row = json.loads(out.read_text())
    assert end.value.code == 0 and row["total_output_tokens"] == 12 and row["total_input_tokens"] == 24
    assert row["engine_options"] == {"max_num_seqs": 2} and row["mean_latency_ms"] > 0
    assert "latency of a batch" in capsys.readouterr().out
