"""Requests that front ends prepare: an abort finds them, and what is submitted for them afterwards ends at once."""

from __future__ import annotations

import pytest

from tests.engine.harness import Engine
from tokserve.engine import admission
from tokserve.protocol.messages import Announce, Call, EndAnnouncement, Reply, Submit, SubmitReply


def announce(engine: Engine, key: str, number: int = 5, group: str | None = None, owner: bytes = b"A") -> None:
    engine.core.receive(owner, Announce(number, key, group))


def send(engine: Engine, key: str, number: int = 5, count: int = 2, owner: bytes = b"A") -> None:
    requests = [engine.make(f"{key}#{i}", [3, i], owner=owner, max_tokens=4, ignore_eos=True) for i in range(count)]
    engine.core.receive(owner, Submit(7, key, requests, "", number))


def submit(engine: Engine, key: str, number: int = 5, owner: bytes = b"A") -> SubmitReply:
    send(engine, key, number, owner=owner)
    return engine.submit_replies[-1]


def result(engine: Engine) -> dict[str, str]:
    last: Reply = engine.replies[-1]
    assert last.error is None
    return dict(last.result)


def check_aborted(engine: Engine, key: str, count: int = 2, reason: str = "abort_user") -> None:
    for index in range(count):
        finish = engine.received[f"{key}#{index}"].finish
        assert finish is not None and (finish.reason, finish.detail) == ("abort", reason)
        assert engine.tokens(f"{key}#{index}") == []


def test_a_request_that_was_aborted_while_it_was_prepared_ends_when_it_comes() -> None:
    engine = Engine()
    announce(engine, "a")
    engine.abort("a", "b", owner=b"B")
    assert result(engine) == {"a": "aborted", "b": "not_found"}
    engine.abort("a", owner=b"B")
    assert result(engine) == {"a": "finished"}
    assert submit(engine, "a") == SubmitReply(7)
    check_aborted(engine, "a")
    engine.core.receive(b"A", EndAnnouncement(5))
    engine.abort("a")
    assert result(engine) == {"a": "finished"}
    engine.received.clear()
    assert submit(engine, "a", number=5) == SubmitReply(7), "the number is free"
    engine.run()
    engine.check_complete("a#0")
    engine.check_empty()


def test_groups_and_all_include_what_is_prepared() -> None:
    engine = Engine()
    announce(engine, "a", 5, "g")
    announce(engine, "b", 6, "h")
    announce(engine, "c", 5, owner=b"B")
    engine.call("abort_group", group="g")
    assert result(engine) == {"a": "aborted"}
    engine.call("abort_all", reason="shutdown")
    assert result(engine) == {"b": "aborted", "c": "aborted"}
    for key, number, owner, reason in (
        ("a", 5, b"A", "abort_user"),
        ("b", 6, b"A", "shutdown"),
        ("c", 5, b"B", "shutdown"),
    ):
        assert submit(engine, key, number, owner=owner) == SubmitReply(7)
        check_aborted(engine, key, reason=reason)
    engine.check_empty()


def test_a_prefix_of_ids_whether_they_run_or_are_prepared() -> None:
    engine = Engine()
    for key, number in (("p-1", 5), ("q", 6)):
        announce(engine, key, number)
        engine.add(f"{key}-runs", [3], max_tokens=9, ignore_eos=True)
    engine.call("abort_prefix", prefix="p-")
    assert result(engine) == {"p-1-runs": "aborted", "p-1": "aborted"}
    assert submit(engine, "p-1") == SubmitReply(7) and submit(engine, "q", 6) == SubmitReply(7)
    check_aborted(engine, "p-1")
    engine.run()
    engine.check_complete("q#0")
    engine.check_complete("q-runs")


def test_what_will_not_come_or_has_left_is_not_found() -> None:
    engine = Engine()
    announce(engine, "a", 5)
    announce(engine, "b", 5, owner=b"B")
    engine.core.receive(b"A", EndAnnouncement(5))
    engine.core.receive(b"A", EndAnnouncement(5))
    engine.call("leave", front_end="B")
    engine.abort("a", "b")
    assert result(engine) == {"a": "not_found", "b": "not_found"}


def test_steps_in_turn_end_from_the_abort_on() -> None:
    engine = Engine()
    announce(engine, "a")
    assert submit(engine, "a") == SubmitReply(7)
    engine.run()
    engine.check_complete("a#1")
    engine.received.clear()
    engine.abort("a", owner=b"B")
    assert result(engine) == {"a": "aborted"}, "between two steps it has no request"
    assert submit(engine, "a") == SubmitReply(7)
    check_aborted(engine, "a")


def test_an_aborted_request_is_not_refused_for_limits_and_a_duplicate_is() -> None:
    engine = Engine(max_num_seqs=1, max_queued_requests=1)
    engine.add("running", [3], max_tokens=9, ignore_eos=True)
    announce(engine, "a")
    announce(engine, "running", 6)
    engine.abort("a")
    assert submit(engine, "a") == SubmitReply(7)
    check_aborted(engine, "a")
    assert submit(engine, "running", 6).refusal == "duplicate_id"
    assert submit(engine, "b", 0).refusal == "queue_full"
    engine.run()
    engine.check_complete("running")


def test_a_large_submission_is_aborted_while_it_is_admitted_and_holds_no_command_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "SLICE", 3)
    engine = Engine()
    engine.add("running", [3], max_tokens=30, ignore_eos=True)
    send(engine, "large", 0, 10)
    engine.step()
    engine.call("ping", call_id=8)
    engine.abort("large", owner=b"B")
    engine.step()
    answers = [reply.result for reply in engine.replies]
    assert answers == [{}, {"large": "aborted"}] and engine.submit_replies[-1] == SubmitReply(7)
    assert "large#0" not in engine.received, "it is not admitted yet"
    engine.abort("large")
    assert result(engine) == {"large": "finished"}
    engine.run()
    check_aborted(engine, "large", 10)
    engine.check_complete("running")


def test_a_pause_that_aborts_reaches_a_large_submission_that_is_being_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SLICE", 3)
    engine = Engine()
    send(engine, "large", 0, 10)
    engine.core.receive(b"A", Call(9, "pause", {"mode": "abort"}))
    engine.steps(9)
    check_aborted(engine, "large", 10, "abort_pause")


def test_a_large_submission_of_a_front_end_that_leaves_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SLICE", 3)
    engine = Engine()
    send(engine, "large", 0, 10, owner=b"B")
    engine.step()
    engine.call("leave", front_end="B")
    engine.run()
    assert not engine.received and not engine.submit_replies
    engine.check_empty()
