"""The runner's part of a profile where the disk is full: torch's profiler does not say so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokserve.errors import RequestFailed
from tokserve.runner.profiler import RunnerProfiler
from tokserve.trace import Spans


@pytest.mark.parametrize("written", [None, b"", b'{"traceEvents": [{"ph'])
def test_a_part_that_torch_did_not_finish_is_told_and_goes(tmp_path: Path, written: bytes | None) -> None:
    def export(path: str) -> None:
        Path(path + ".tmp" if written is None else path).write_bytes(written or b"")

    profiler = RunnerProfiler(cast(Any, SimpleNamespace(spans=Spans(), backend=None)), lambda: None)
    profiler._torch = SimpleNamespace(export_chrome_trace=export)
    with pytest.raises(RequestFailed, match=r"torch's part of it is not whole \(\d+ bytes are free in "):
        profiler.write(str(tmp_path / "a.json"), False, [], [])
    assert not list(tmp_path.iterdir())
