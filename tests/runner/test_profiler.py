"""The runner's part of a profile: what it counts, and a full disk, which torch's profiler does not report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.runner.drive import make_runner, plan_of
from tests.tiny_models import tiny_config
from tokserve.base.errors import RequestFailed
from tokserve.base.trace import Spans
from tokserve.features.profiler.recorder import RunnerProfiler
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import NewRow


@pytest.mark.parametrize("written", [None, b"", b'{"traceEvents": [{"ph'])
def test_an_unfinished_part_of_a_profile_is_reported_and_deleted(tmp_path: Path, written: bytes | None) -> None:
    def export(path: str) -> None:
        Path(path + ".tmp" if written is None else path).write_bytes(written or b"")

    runner = SimpleNamespace(spans=Spans(), backend=None, admin=SimpleNamespace(capture=lambda: None))
    profiler = RunnerProfiler(cast(Any, SimpleNamespace(runner=runner)))
    profiler._torch = SimpleNamespace(export_chrome_trace=export)
    with pytest.raises(RequestFailed, match=r"torch's trace is incomplete \(\d+ bytes are free in "):
        profiler.write(str(tmp_path / "a.json"), False, [], [])
    assert not list(tmp_path.iterdir())


def test_what_is_computed_after_the_stop_is_not_in_the_profile(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path / "model", tiny_config("qwen3", num_hidden_layers=1))
    row = NewRow(0, "", np.zeros(9, np.int32), 9, SamplingParams(), 0, ())
    runner.execute(plan_of([(0, 0, 3, 0)], new=[row], blocks=[(0, 0, [0])]))
    runner.call("start_profile", {"torch_options": {}, "op_by_op": True})
    runner.execute(plan_of([(0, 3, 3, 0)]))
    runner.call("stop_profile", {})
    runner.execute(plan_of([(0, 6, 3, 1)]))
    path = tmp_path / "trace.json"
    args = {"path": str(path), "compress": False, "engine": [], "requests": []}
    tables = runner.background("write_profile", args)
    calls = {row["name"]: row["calls"] for row in tables["ops"]}
    assert calls["forward"] == calls["paged_attention"] == calls["embedding"] == 1
    assert {"tokserve: engine", "tokserve: runner"} < {
        event["args"]["name"]
        for event in json.loads(path.read_bytes())["traceEvents"]
        if event["name"] == "process_name"
    }
