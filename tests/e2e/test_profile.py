"""Profiles of real engines: the trace that a viewer gets, the tables, and the routes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.threads import ServerThread
from tokserve import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "cpu_threads": 1,
    "enable_prefix_caching": False,
    "spec_method": "none",
}
PROMPTS = [[5, 6, 7], [8] * 40]
PARAMS = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, logprobs=0)


class Trace:
    """The spans of a trace, by process and track."""

    def __init__(self, path: Path) -> None:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = json.loads(content)["traceEvents"]
        self.processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.tracks: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for event in events:
            if event["ph"] == "X" and event["pid"] in self.processes:
                track = names.get((event["pid"], event["tid"]), "")
                self.tracks.setdefault((self.processes[event["pid"]], track), []).append(event)

    def of(self, process: str) -> dict[str, list[dict[str, Any]]]:
        return {track: spans for (name, track), spans in self.tracks.items() if name == process}


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Spans of a track lie within each other or apart: viewers show no others."""
    around: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while around and around[-1] <= span["ts"] + 1e-3:
            around.pop()
        assert not around or span["ts"] + span["dur"] <= around[-1] + 1e-3, span
        around.append(span["ts"] + span["dur"])


@pytest.mark.usefixtures("engine_threads")
@pytest.mark.parametrize(("depth", "op_by_op"), [pytest.param(1, False, marks=pytest.mark.slow), (1, True), (2, False)])
def test_a_trace_has_steps_ops_and_requests(tmp_path: Path, depth: int, op_by_op: bool) -> None:
    with LLM("demo", profiler_dir=str(tmp_path), depth=depth, **OPTIONS) as llm:
        before = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        started = llm.start_profile("mine", op_by_op=op_by_op)
        during = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        report = llm.stop_profile()
        after = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for other in (during, after):
        assert [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in other] == [
            (one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in before
        ]
    assert started["trace"] == report["trace"] and list(tmp_path.iterdir()) == [Path(report["trace"])]
    trace = Trace(Path(report["trace"]))
    requests = trace.of("tokserve: requests")
    assert len(requests) == 2
    for spans in requests.values():
        assert [span["name"] for span in spans] == ["queued", "prefill", "decode"]
        assert spans[0]["args"]["output_tokens"] == 6 and spans[0]["args"]["finish"] == "length"
        assert spans[1]["ts"] == pytest.approx(spans[0]["ts"] + spans[0]["dur"], abs=1)
    engine = trace.of("tokserve: engine")
    steps = [span for track, spans in engine.items() if track.startswith("steps") for span in spans]
    assert len(steps) == report["steps"] and sum(span["args"]["tokens"] for span in steps) == report["tokens"]
    runner = [span for spans in trace.of("tokserve: runner").values() for span in spans]
    layers = 4
    expected = report["steps"] if op_by_op else 1
    assert sum(span["name"] == "paged_attention" for span in runner) >= layers * expected
    assert any(span["name"] == "replay" for span in runner) is not op_by_op
    first, last = min(span["ts"] for span in steps), max(span["ts"] + span["dur"] for span in steps)
    assert all(first <= span["ts"] <= last for span in runner), "one clock"
    torch = [spans for (name, _), spans in trace.tracks.items() if not name.startswith("tokserve")]
    assert any(span["name"].startswith("aten::") and first <= span["ts"] <= last for spans in torch for span in spans)
    for track, spans in [*engine.items(), *trace.of("tokserve: runner").items()]:
        if not track.startswith("steps"):
            check_nesting(spans)
    calls = {row["name"]: row["calls"] for row in report["ops"]}
    assert calls["forward"] == calls["sample"] == report["steps"]
    assert sum(row["share"] for row in report["phases"]) == pytest.approx(1.0)
    assert 0 < sum(row["seconds"] for row in report["phases"]) <= report["seconds"] * 1.01


def test_the_routes(tmp_path: Path) -> None:
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_use_gzip": True})
    with ServerThread("demo", "--profiler-config", config, "--max-model-len", "256") as server:

        def post(path: str, body: dict[str, Any] | None = None) -> httpx.Response:
            return httpx.post(server.url + path, json=body, timeout=60)

        assert post("/stop_profile").status_code == 409
        assert post("/start_profile", {"max_iterations": 3}).status_code == 200
        again = post("/start_profile")
        assert again.status_code == 409 and again.json()["error"]["type"] == "conflict_error"
        body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
        assert post("/v1/completions", body).status_code == 200
        report = post("/stop_profile").json()
        assert report["ended_by"] == "max_iterations" and report["steps"] == 3
        assert post("/stop_profile").status_code == 409
        assert Trace(Path(report["trace"])).of("tokserve: requests")


@pytest.mark.slow
def test_a_server_without_a_directory_takes_no_profiles() -> None:
    with ServerThread("demo", "--max-model-len", "256", "--sglang-api", "--admin-api-key", "k") as server:
        refused = httpx.post(server.url + "/start_profile")
        assert refused.status_code == 401
        answer = httpx.post(server.url + "/start_profile", headers={"Authorization": "Bearer k"}, timeout=60)
        assert answer.status_code == 400 and "--profiler-dir" in answer.json()["message"]
