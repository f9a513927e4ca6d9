"""The checksum of the weights that serve: computed when it is asked for, and kept."""

from __future__ import annotations

from collections import deque

import pytest

from tests.engine.harness import Engine
from tests.engine.test_control import answers, ask, update


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The executor's background calls from here on."""
    calls: list[str] = []
    background = engine.executor.background
    monkeypatch.setattr(engine.executor, "background", lambda name, args: calls.append(name) or background(name, args))
    return calls


def test_the_checksum_is_computed_once_for_each_set_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    calls = counted(engine, monkeypatch)
    for _ in range(2):
        assert ask(engine, "weights_checksum").result == "sum of "
    assert calls.count("weights_checksum") == 1
    assert not update(engine, "w2", "v2").error
    for _ in range(2):
        assert ask(engine, "weights_checksum").result == "sum of w2"
    assert calls.count("weights_checksum") == 2
    engine.core.control.weights.note_worker_call()
    assert ask(engine, "weights_checksum").result == "sum of w2" and calls.count("weights_checksum") == 3


def test_a_checksum_of_weights_that_have_changed_since_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    calls = counted(engine, monkeypatch)
    engine.executor.slow = deque()
    engine.call("weights_checksum", call_id=50)
    engine.run()
    assert ask(engine, "update_weight_version", call_id=51, new_version="v2").result["success"]
    engine.executor.settle(1)
    engine.run()
    assert not answers(engine, 50) and calls.count("weights_checksum") == 2
    engine.executor.settle(1)
    engine.run()
    assert [reply.result for reply in answers(engine, 50)] == ["sum of "]


def test_a_checksum_from_before_a_worker_call_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    calls = counted(engine, monkeypatch)
    engine.executor.slow = deque()
    engine.call("weights_checksum", call_id=50)
    engine.core.control.weights.note_worker_call()
    engine.executor.settle(1)
    engine.run()
    assert not answers(engine, 50) and engine.core.control.weights.checksum is None
    engine.executor.settle(1)
    engine.run()
    assert len(answers(engine, 50)) == 1 and calls.count("weights_checksum") == 2


def test_weights_that_were_dropped_have_none() -> None:
    engine = Engine()
    assert not ask(engine, "sleep", level=2).error
    assert "there are no weights to look at" in str(ask(engine, "weights_checksum").error)
