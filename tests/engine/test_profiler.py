"""Profiles over a scripted executor: when one begins and ends, what is refused, and what is recorded."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.engine.harness import Engine
from tokserve.base.errors import RequestFailed, StartError
from tokserve.base.trace import TraceSpan
from tokserve.config import Config
from tokserve.features.profiler.commands import Profiler

TABLES: dict[str, Any] = {"ops": [{"name": "linear", "calls": 2, "seconds": 0.5}], "torch": [], "kernels": []}


class Profiled(Engine):
    """An engine whose executor takes note of profiles; `slow`: the file is written when the test says so."""

    def __init__(self, directory: Path, *, slow: bool = False, **options: Any) -> None:
        super().__init__(profiler_dir=str(directory), **options)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.file: Future[Any] = Future()
        if not slow:
            self.file.set_result(TABLES)
        self.executor.call = self._call  # type: ignore[method-assign]
        self.executor.background = self._background  # type: ignore[method-assign]

    def _call(self, method: str, args: dict[str, Any]) -> Any:
        assert not self.executor.in_flight
        self.calls.append((method, args))

    def _background(self, method: str, args: dict[str, Any]) -> Future[Any]:
        self.calls.append((method, args))
        return self.file

    def spans(self, kind: str) -> list[TraceSpan]:
        return next(args[kind] for method, args in self.calls if method == "write_profile")  # type: ignore[no-any-return]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_profile_has_the_loop_the_steps_and_the_requests(tmp_path: Path, depth: int) -> None:
    engine = Profiled(tmp_path / "new", depth=depth)
    engine.add("before", [2, 3], max_tokens=3, ignore_eos=True)
    engine.run()
    engine.call("start_profile", profile_prefix="mine", profiler_kwargs={"with_stack": True}, op_by_op=True)
    started = engine.replies[-1]
    assert started.error is None and (tmp_path / "new").is_dir()
    assert Path(started.result["trace"]).name.startswith("mine-")
    assert engine.calls == [("start_profile", {"torch_options": {"with_stack": True}, "op_by_op": True})]
    engine.add("a", [2, 3, 4], max_tokens=4, ignore_eos=True)
    engine.clock.now += 1
    engine.add("b", [5], max_tokens=2, ignore_eos=True)
    engine.run()
    engine.call("stop_profile")
    result = engine.replies[-1].result
    assert result["steps"] == 4 and result["ended_by"] == "stop_profile" and result["trace"] == started.result["trace"]
    assert result["tokens"] == 3 + 1 + 3 + 1
    steps = [span for span in engine.spans("engine") if span.track.startswith("steps")]
    assert len(steps) == 4 and steps[0].args == {"rows": 2, "new": 2, "tokens": 4, "logits": 2}
    assert {row["name"] for row in result["phases"]} >= {
        "schedule",
        "forward",
        "sample",
        "wait",
        "update",
        "send",
        "other",
    }
    assert sum(row["share"] for row in result["phases"]) == pytest.approx(1.0)
    assert result["ops"][0]["share"] == pytest.approx(0.5 / result["busy_seconds"])
    tracks: dict[str, list[str]] = {}
    for span in engine.spans("requests"):
        tracks.setdefault(span.track, []).append(span.name)
        assert span.args is not None and span.args["finish"] == "length"
    assert tracks == {"a": ["queued", "prefill", "decode"], "b": ["queued", "prefill", "decode"]}
    assert engine.feature(Profiler).spans.take() == []


def test_a_profile_ends_after_its_steps_and_its_result_waits(tmp_path: Path) -> None:
    engine = Profiled(tmp_path)
    engine.call("start_profile", max_iterations=3)
    engine.add("a", [2, 3], max_tokens=9, ignore_eos=True)
    engine.steps(5)
    assert [method for method, _ in engine.calls] == ["start_profile", "stop_profile", "write_profile"]
    assert {span.name: span.args["finish"] for span in engine.spans("requests") if span.args} == {
        "queued": "running",
        "prefill": "running",
        "decode": "running",
    }
    count = len(engine.replies)
    engine.run()
    assert len(engine.replies) == count, "the engine's own command has no caller"
    engine.call("stop_profile", call_id=8)
    assert engine.replies[-1].result["ended_by"] == "max_iterations" and engine.replies[-1].result["steps"] == 3
    engine.call("stop_profile", call_id=9)
    assert engine.replies[-1].status == 409


def test_a_profile_ends_after_its_time_even_if_the_engine_is_idle(tmp_path: Path) -> None:
    engine = Profiled(tmp_path)
    engine.call("start_profile", max_seconds=5)
    engine.run()
    assert engine.core.seconds_to_deadline() == pytest.approx(5)
    engine.clock.now += 5
    engine.run()
    assert engine.core.seconds_to_deadline() is None
    engine.call("stop_profile")
    assert engine.replies[-1].result["ended_by"] == "max_seconds"


def test_a_profile_may_begin_later(tmp_path: Path) -> None:
    engine = Profiled(tmp_path)
    engine.call("start_profile", delay_iterations=2)
    assert engine.replies[-1].error is None and not engine.calls
    engine.add("a", [2, 3], max_tokens=6, ignore_eos=True)
    engine.run()
    engine.call("stop_profile")
    assert engine.replies[-1].result["steps"] == 4
    engine.call("start_profile", delay_iterations=2)
    engine.call("stop_profile")
    assert engine.replies[-1].status == 409 and "cancelled" in str(engine.replies[-1].error)
    engine.call("start_profile")
    assert engine.replies[-1].error is None


def test_starting_twice_and_stopping_without_a_start_are_conflicts(tmp_path: Path) -> None:
    engine = Profiled(tmp_path, slow=True)
    engine.call("stop_profile")
    assert engine.replies[-1].status == 409
    engine.call("start_profile")
    engine.call("start_profile")
    assert engine.replies[-1].status == 409
    engine.call("stop_profile", call_id=5)
    engine.call("start_profile", call_id=6)
    assert (engine.replies[-1].call_id, engine.replies[-1].status) == (6, 409)
    engine.call("stop_profile", call_id=7)
    engine.file.set_result(TABLES)
    engine.run()
    by_call = {reply.call_id: reply for reply in engine.replies[-2:]}
    assert by_call[5].error is None and by_call[7].status == 409


def test_a_trace_that_cannot_be_written_is_an_error_and_no_more(tmp_path: Path) -> None:
    engine = Profiled(tmp_path, slow=True)
    engine.file.set_exception(RequestFailed("the disk is full"))
    engine.call("start_profile")
    engine.call("stop_profile")
    assert (engine.replies[-1].status, engine.replies[-1].error) == (500, "the disk is full")
    engine.call("start_profile", max_iterations=1)
    engine.add("a", [2, 3], max_tokens=2, ignore_eos=True)
    engine.run()
    engine.call("stop_profile")
    assert (engine.replies[-1].status, engine.replies[-1].error) == (500, "the disk is full")
    other = Profiled(tmp_path / "other")
    (tmp_path / "other").rmdir()
    (tmp_path / "other").write_text("")
    other.call("start_profile")
    assert other.replies[-1].status == 500 and "could not be started" in str(other.replies[-1].error)
    other.run()


def test_a_profile_that_cannot_begin_later_is_an_error_of_its_end(tmp_path: Path) -> None:
    engine = Profiled(tmp_path / "directory")
    (tmp_path / "directory").rmdir()
    (tmp_path / "directory").write_text("")
    engine.call("start_profile", delay_iterations=1)
    engine.add("a", [2, 3], max_tokens=6, ignore_eos=True)
    engine.run()
    engine.call("stop_profile")
    assert engine.replies[-1].status == 500 and "could not be started" in str(engine.replies[-1].error)


def test_profiles_need_a_directory() -> None:
    engine = Engine()
    engine.call("start_profile")
    assert engine.replies[-1].status == 400 and "--profiler-dir" in str(engine.replies[-1].error)


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(StartError, match=f"option profiler_dir: {path}: "):
            Profiled(path)
    monkeypatch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(StartError, match=f"option profiler_dir: {tmp_path}/new: Permission denied"):
        Profiled(tmp_path / "new")


def test_vllms_object() -> None:
    config = {
        "profiler": "torch",
        "torch_profiler_dir": "/d",
        "torch_profiler_with_stack": True,
        "max_iterations": 7,
        "delay_iterations": 1,
        "torch_profiler_use_gzip": True,
        "ignore_frontend": True,
    }
    plan = Config.make(profiler_config=config).profiler.resolved()
    assert plan == ("/d", {"with_stack": True}, True, 1, 7)
    assert Config.make(profiler_dir="/e").profiler.resolved().directory == "/e"


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"profiler": "cuda"}, "torch"),
        ({"torch_profiler_dir": 3}, "torch_profiler_dir"),
        ({"x": 1}, "'x'"),
        ({"max_iterations": -1}, "max_iterations"),
        ({"torch_profiler_with_flops": 1}, "with_flops"),
        ({"torch_profiler_dir": "/other"}, "different"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(config: dict[str, Any], word: str) -> None:
    with pytest.raises(StartError, match=word):
        Config.make(profiler_dir="/d", profiler_config=config).profiler.resolved()
