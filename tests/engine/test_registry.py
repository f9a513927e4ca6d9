"""The list of live requests."""

from __future__ import annotations

from typing import Any

from tests.engine.harness import Engine
from tokserve.engine.request import Gate


def listed(engine: Engine, limit: int = 100) -> Any:
    engine.call("requests", limit=limit)
    reply = engine.replies[-1]
    assert reply.error is None
    return reply.result


def test_an_idle_engine_lists_no_requests() -> None:
    engine = Engine()
    version = engine.core.scheduler.weights.version
    assert listed(engine) == {"weight_version": version, "epoch": 0, "total": 0, "requests": []}


def test_requests_of_all_front_ends_oldest_first() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [3, 4, 5], max_tokens=9, ignore_eos=True, owner=b"A", group_id="g")
    engine.add("b", [3, 4], max_tokens=4, ignore_eos=True, owner=b"B")
    engine.steps(3)
    actual = listed(engine)
    assert actual["total"] == 2
    first, second = actual["requests"]
    assert (first["request_id"], first["group_id"], first["state"]) == ("a", "g", "running")
    assert (first["prompt_tokens"], first["max_tokens"], first["choices"], first["running"]) == (3, 9, 1, 1)
    assert first["output_tokens"] == engine.core.intake.accepted.requests("a")[0].num_output > 0
    assert first["age"] >= first["queued"] >= 0
    assert (second["request_id"], second["group_id"], second["state"]) == ("b", None, "waiting")
    assert second["queued"] is None and second["output_tokens"] == 0
    assert [row["request_id"] for row in listed(engine, 1)["requests"]] == ["a"] and listed(engine, 1)["total"] == 2
    engine.run()
    assert listed(engine)["total"] == 0


def test_choices_that_have_ended_are_not_counted() -> None:
    engine = Engine()
    short, long = (engine.make(f"s#{i}", [3, 4, 5], max_tokens=n, ignore_eos=True) for i, n in enumerate((1, 20)))
    engine.submit("s", short, long)
    engine.steps(6)
    (row,) = listed(engine)["requests"]
    assert row["choices"] == 1 and row["max_tokens"] == 20


def test_a_preempted_request_is_listed_as_preempted() -> None:
    engine = Engine(num_blocks=8, enable_prefix_caching=False)
    for first in (3, 4, 5):
        engine.add(str(first), [first, 4, 5, 6, 7], max_tokens=20, ignore_eos=True)
    seen: set[str] = set()
    while engine.step():
        for row in listed(engine)["requests"]:
            seen.add(row["state"])
            assert (row["state"] == "running") is (row["running"] == 1)
            assert (row["state"] == "waiting") is (row["queued"] is None)
    assert "preempted" in seen and engine.stats.preemptions


def test_requests_that_wait_for_a_shared_prefix_are_deferred() -> None:
    engine = Engine(max_chunk=4)
    prompt = [3, 4, 5, 6, 7] * 4
    engine.add("a", prompt, max_tokens=2, ignore_eos=True)
    engine.add("b", prompt, max_tokens=2, ignore_eos=True)
    engine.step()
    assert (engine.stats.running, engine.stats.waiting, engine.stats.deferred) == (1, 1, 1)
    engine.run()
    assert engine.stats.deferred == 0


def test_requests_that_wait_for_a_slot_are_not_deferred() -> None:
    engine = Engine(max_num_seqs=1)
    for name in "ab":
        engine.add(name, [3, 4, 5, 6, 7], max_tokens=2, ignore_eos=True)
    engine.step()
    assert (engine.stats.waiting, engine.stats.deferred) == (1, 0)


def waits(engine: Engine) -> dict[str, str | None]:
    """What each request waits for, by its id."""
    return {row["request_id"]: row["waits_for"] for row in listed(engine)["requests"]}


def test_what_a_request_waits_for() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("runs", [3, 4, 5], max_tokens=30, ignore_eos=True)
    engine.add("queued", [3, 4], max_tokens=4, ignore_eos=True)
    engine.add("gated", [3, 4], max_tokens=4, ignore_eos=True)
    engine.add("unread", [3, 4], max_tokens=4, ignore_eos=True)
    gated, unread = (engine.core.intake.accepted.requests(name)[0] for name in ("gated", "unread"))
    gated.gates += (Gate("grammar", lambda: False),)
    engine.core.scheduler.stall(unread, True)
    engine.step()
    assert waits(engine) == {"runs": None, "queued": "slot", "gated": "grammar", "unread": "client"}
    engine.call("pause", mode="keep")
    engine.step()
    assert set(waits(engine).values()) == {"pause", None}


def test_requests_wait_for_a_prefix() -> None:
    engine = Engine(max_chunk=2)  # half a block
    for name in "ab":
        engine.add(name, [3, 4, 5, 6, 7] * 4, max_tokens=2, ignore_eos=True)
    engine.step()
    assert waits(engine) == {"a": None, "b": "prefix"}
    engine.run()


def test_requests_wait_for_memory() -> None:
    engine = Engine(num_blocks=8)
    for first in (3, 4, 5):
        engine.add(str(first), [first] * 12, max_tokens=12, ignore_eos=True)
    seen: set[str | None] = set()
    while engine.step():
        seen |= set(waits(engine).values())
    assert seen == {None, "memory"}
