"""Spans: what is recorded, how times add up, and the file that viewers open."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tokserve.base import trace
from tokserve.base.trace import Spans, TraceSpan, totals


def test_nothing_is_recorded_while_it_is_off() -> None:
    spans = Spans()
    timed = spans.timed("op", lambda x: x + 1)
    with spans.span("a"):
        assert timed(1) == 2
    spans.add("b", 0, 1)
    assert spans.take() == []
    spans.start()
    with spans.span("a"):
        assert timed(1) == 2
    first, second = spans.take()
    assert (first.name, second.name) == ("op", "a") and first.track == second.track
    assert second.start <= first.start and first.duration <= second.duration
    with spans.span("late"):
        pass
    assert spans.take() == []


def test_a_span_of_an_error_ends() -> None:
    spans = Spans()
    spans.start()
    with pytest.raises(ZeroDivisionError):
        spans.timed("op", lambda: 1 // 0)()
    assert [span.name for span in spans.take()] == ["op"]


def test_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_SPANS", 3)
    spans = Spans()
    spans.start()
    for i in range(5):
        spans.add(str(i), i, i + 1)
    assert spans.full and [span.name for span in spans.take()] == ["0", "1", "2"]


def test_times_inside_are_not_counted_twice() -> None:
    second = 10**9
    spans = [
        TraceSpan("step", "a", 0, 10 * second),
        TraceSpan("forward", "a", 1 * second, 5 * second),
        TraceSpan("op", "a", 1 * second, 2 * second),
        TraceSpan("op", "a", 3 * second, 1 * second),
        TraceSpan("sample", "a", 6 * second, 2 * second),
        TraceSpan("op", "b", 0, 4 * second),
        TraceSpan("step", "a", 10 * second, 1 * second),
    ]
    rows = {row.name: (row.calls, row.seconds) for row in totals(reversed(spans))}
    assert rows == {"op": (3, 7.0), "step": (2, 4.0), "forward": (1, 2.0), "sample": (1, 2.0)}
    assert totals(spans)[0].name == "op"


@pytest.mark.parametrize("compress", [False, True])
def test_the_file_is_chromes_format(tmp_path: Path, compress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "PART", 2)
    spans = [
        TraceSpan("a", "x", 5000, 1000),
        TraceSpan('"b"', "y", 6000, 500, {"tokens": 3}),
        TraceSpan("a", "x", 9, 1),
    ]
    path = tmp_path / "t.json"
    trace.write_trace(path, {"displayTimeUnit": "ms"}, trace.events("engine", 7, spans, 1000), compress=compress)
    read = json.loads(gzip.decompress(path.read_bytes()) if compress else path.read_bytes())
    assert read["displayTimeUnit"] == "ms"
    names = [event["args"]["name"] for event in read["traceEvents"] if event["name"].endswith("_name")]
    assert names == ["engine", "x", "y"]
    shown = [event for event in read["traceEvents"] if event["ph"] == "X"]
    assert [(one["name"], one["ts"], one["dur"], one["pid"], one["tid"]) for one in shown] == [
        ("a", 4.0, 1.0, 7, 1),
        ('"b"', 5.0, 0.5, 7, 2),
        ("a", -0.991, 0.001, 7, 1),
    ]
    assert shown[1]["args"] == {"tokens": 3}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("compress", [False, True])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, compress: bool) -> None:
    (tmp_path / "a.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        trace.write_trace(tmp_path / "a.json", {}, [b"{}"], compress=compress)
    assert not list(tmp_path.iterdir())
