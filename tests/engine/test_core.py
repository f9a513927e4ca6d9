"""The loop and its messages: outputs, aborts, deadlines, statistics, commands."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.solo import VOCAB
from tokserve.engine import registry
from tokserve.protocol.messages import Abort, Ready, Reply, Status, StepOutput, Submit

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


# --- outputs ---


@DEPTHS
def test_one_output_per_token_and_one_message_per_step_and_front_end(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", [3, 4, 5], max_tokens=4, ignore_eos=True)
    engine.add("b", [4, 5], max_tokens=4, ignore_eos=True, owner=b"A")
    engine.add("c", [4, 6], max_tokens=4, ignore_eos=True, owner=b"B")
    engine.run()
    for name in "abc":
        engine.check_complete(name)
        assert len(engine.received[name].outputs) == 4
    steps = [(identity, m.request_ids) for identity, m in engine.messages if isinstance(m, StepOutput)]
    assert [rids for identity, rids in steps if identity == b"A" and rids] == [["a", "b"]] * 4
    assert [rids for identity, rids in steps if identity == b"B" and rids] == [["c"]] * 4


@DEPTHS
def test_requests_that_do_not_stream_send_one_output(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", [3, 4, 5], max_tokens=9, stream=False, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    engine.run()
    engine.check_complete("a")


def test_the_stop_token_is_kept_and_reported() -> None:
    engine = Engine()
    engine.add("a", [3, 4], max_tokens=30, ignore_eos=True, stop_token_ids=list(range(VOCAB)))
    engine.run()
    (token,) = engine.tokens("a")
    assert (engine.finish("a").reason, engine.finish("a").detail, engine.finish("a").stop) == (
        "stop",
        "stop_token",
        token,
    )


@DEPTHS
def test_parameters_that_forbid_every_token_are_not_model_errors(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.executor.bar.add((7, 6))
    engine.executor.spoil.add((8, 6))
    for seed, rid in ((7, "a"), (8, "b"), (9, "c")):
        engine.add(rid, [3, 4, 5], seed=seed, max_tokens=9, ignore_eos=True, bad_token_sequences=[[1]], min_tokens=2)
    engine.run()
    assert [engine.finish(rid).detail for rid in "abc"] == ["forbidden", "nan", "max_tokens"]
    message = engine.finish("a").message
    assert message is not None and message.endswith(": all are excluded by bad_token_sequences (bad_words), min_tokens")
    assert engine.stats.nan_requests == 1 and len(engine.tokens("a")) == 3
    engine.check_empty()


@DEPTHS
def test_logits_of_nan_end_one_request_and_no_other(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.executor.spoil.add((7, 6))
    engine.add("a", [3, 4, 5], seed=7, max_tokens=9, ignore_eos=True, logprobs=0)
    engine.add("b", [3, 4, 5], seed=8, max_tokens=9, ignore_eos=True)
    engine.run()
    assert (engine.finish("a").reason, engine.finish("a").detail) == ("error", "nan")
    assert engine.tokens("a") == engine.solo("a").tokens[:3]
    assert engine.stats.nan_requests == 1
    engine.check_complete("b")
    engine.check_empty()


def test_times_are_read_from_the_clock() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [3], max_tokens=2, ignore_eos=True)
    engine.add("b", [4], max_tokens=2, ignore_eos=True)
    for _ in range(4):
        engine.clock.now += 1
        engine.step()
    end = engine.finish("b")
    assert (end.queued, end.first_token, end.total) == (3.0, 3.0, 4.0)


def test_time_in_the_inbox_counts() -> None:
    engine = Engine()
    add = engine.add("a", [3], max_tokens=1)
    engine.run()
    engine.received.clear()
    engine.core.receive(b"A", Submit(1, "a", [add]), received=engine.clock.now - 5)
    engine.run()
    assert engine.finish("a").total == 5.0


# --- aborts ---


@DEPTHS
@pytest.mark.parametrize("stream", [False, True])
def test_abort_returns_what_there_is_to_the_owner_and_the_reply_to_the_caller(depth: int, stream: bool) -> None:
    engine = Engine(depth=depth)
    engine.add("a", [3, 4], max_tokens=30, ignore_eos=True, stream=stream, logprobs=1)
    engine.steps(4)
    engine.abort("a", owner=b"B", call_id=5, reason="abort_stop_string")
    received = engine.received["a"]
    assert (engine.finish("a").reason, engine.finish("a").detail) == ("abort", "abort_stop_string")
    assert received.tokens == engine.solo("a").tokens[: len(received.tokens)] and len(received.tokens) == 5 - depth
    assert received.outputs[-1].spans == [("v1", 0, len(received.tokens))]
    engine.run()
    assert [i for i, m in engine.messages if isinstance(m, Reply)] == [b"B"]
    assert engine.last_reply() == Reply(5, {"a": "aborted"})
    engine.check_empty()


def test_the_reply_comes_when_the_blocks_are_free() -> None:
    engine = Engine(depth=2)
    engine.add("a", [3, 4], max_tokens=30, ignore_eos=True)
    engine.add("b", [3, 4, 5], max_tokens=30, ignore_eos=True)
    engine.steps(3)
    engine.abort("a")
    assert not engine.replies and engine.stats.blocks_held > 2
    engine.step()
    engine.step()
    assert engine.replies
    assert sum(slot.row.request_id == "a" for slot in engine.executor.slots.values()) == 0
    engine = Engine(depth=1)
    engine.add("a", [3, 4], max_tokens=30, ignore_eos=True)
    engine.step()
    engine.abort("a")
    assert engine.replies and engine.stats.blocks_held == 0


def test_a_second_abort_is_not_answered_before_the_first() -> None:
    engine = Engine(depth=2)
    engine.add("a", [3, 4], max_tokens=30, ignore_eos=True)
    engine.steps(3)
    engine.abort("a", call_id=1)
    engine.abort("a", call_id=2)
    engine.call("abort_all", call_id=3)
    assert not engine.replies and engine.stats.blocks_held
    engine.run()
    assert engine.replies == [Reply(1, {"a": "aborted"}), Reply(2, {"a": "finished"}), Reply(3, {})]


def test_aborts_of_waiting_finished_unknown_and_repeated_ids() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("done", [3], max_tokens=1)
    engine.run()
    engine.add("runs", [3], max_tokens=9, ignore_eos=True)
    engine.add("waits", [4], max_tokens=9, ignore_eos=True)
    engine.step()
    engine.abort("done", "runs", "waits", "what", "runs")
    assert engine.last_reply().result == {
        "done": "finished",
        "runs": "aborted",
        "waits": "aborted",
        "what": "not_found",
    }
    assert engine.tokens("waits") == []
    engine.abort("runs")
    assert engine.last_reply().result == {"runs": "finished"}
    engine.run()
    engine.check_empty()


def test_abort_without_a_call_id_is_not_acknowledged() -> None:
    engine = Engine()
    engine.add("a", [3], max_tokens=9)
    engine.abort("a", call_id=None)
    engine.run()
    assert not engine.replies and engine.finish("a").reason == "abort"


def test_the_number_of_remembered_ended_ids_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ENDED_KEPT", 3)
    engine = Engine()
    for name in "abcde":
        engine.add(name, [3], max_tokens=1)
        engine.run()
    engine.abort(*"abcde")
    assert list(engine.last_reply().result.values()) == ["not_found"] * 2 + ["finished"] * 3
    for name in "cx":  # an id that ends again is remembered anew
        engine.received.clear()
        engine.add(name, [3], max_tokens=1)
        engine.run()
    engine.abort(*"cdex")
    assert engine.last_reply().result == {"c": "finished", "d": "not_found", "e": "finished", "x": "finished"}


@DEPTHS
def test_aborting_a_preempted_request_frees_it(depth: int) -> None:
    engine = Engine(num_blocks=8, context=32, depth=depth)
    for name in "ab":
        engine.add(name, [ord(name) % 19] * 6, max_tokens=18, ignore_eos=True)
    while engine.stats.preemptions == 0:
        engine.step()
    engine.abort("b")
    engine.run()
    assert engine.last_reply().result == {"b": "aborted"}
    engine.check_complete("a")
    engine.check_empty()


@DEPTHS
def test_an_abort_by_key_reaches_all_choices_of_any_front_end(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add_choices("a", 3)
    engine.add_choices("b", owner=b"B")
    engine.steps(3)
    engine.abort("a", "b", "a#0", owner=b"C", call_id=3)
    engine.run()
    assert {engine.finish(rid).reason for rid in ("a#0", "a#1", "a#2", "b#0", "b#1")} == {"abort"}
    assert [(i, m) for i, m in engine.messages if isinstance(m, Reply)] == [
        (b"C", Reply(3, {"a": "aborted", "b": "aborted", "a#0": "not_found"}))
    ]
    engine.check_empty()


def test_a_request_is_aborted_if_a_choice_is_in_flight() -> None:
    engine = Engine()
    engine.submit("a", engine.make("a#0", [3], max_tokens=1), engine.make("a#1", [4], max_tokens=9, ignore_eos=True))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    assert [reply.result for reply in engine.replies] == [{"a": "aborted"}, {"a": "finished"}]
    engine.check_complete("a#0")


def test_a_group_is_aborted_for_any_front_end() -> None:
    engine = Engine()
    engine.add_choices("a", group_id="g")
    engine.add_choices("b", group_id="g", owner=b"B")
    engine.add_choices("c", group_id="h")
    engine.add_choices("d")
    engine.step()
    for call_id, owner in ((1, b"C"), (2, b"A")):
        engine.call("abort_group", group="g", call_id=call_id, owner=owner)
    engine.run()
    assert engine.replies == [Reply(1, {"a": "aborted", "b": "aborted"}), Reply(2, {})]
    assert {rid for rid, output in engine.received.items() if output.finish and output.finish.reason == "abort"} == {
        "a#0",
        "a#1",
        "b#0",
        "b#1",
    }
    engine.check_empty()


def test_only_the_owner_may_drop_a_request() -> None:
    engine = Engine()
    engine.add_choices("a")
    engine.step()
    engine.core.receive(b"B", Abort(["a#0"], "abort_disconnect"))
    engine.core.receive(b"A", Abort(["a#1"], "abort_disconnect"))
    engine.run()
    engine.check_complete("a#0")
    assert engine.finish("a#1").detail == "abort_disconnect"


# --- commands ---


def test_hello_is_answered_with_what_the_engine_serves() -> None:
    engine = Engine(num_blocks=9, block_size=4, context=64)
    engine.call("hello", call_id=0)
    assert engine.messages == [
        (b"A", Ready(36, VOCAB, 9, 4, [1], "v1", {"scripted": True}, Status(weight_version="v1")))
    ]


def test_ping_and_state() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [3], max_tokens=9, ignore_eos=True)
    engine.add("b", [3], max_tokens=9, ignore_eos=True)
    engine.step()
    engine.call("ping", call_id=4)
    assert engine.last_reply() == Reply(4, {})
    engine.call("state", call_id=5)
    assert engine.last_reply().result == {
        "state": "running",
        "weight_version": "v1",
        "epoch": 0,
        "running": 1,
        "waiting": 1,
        "reason": None,
        "since": engine.core.control.since,
        "in_flight": 0,
        "steps": 1,
        "paused_since": None,
    }


@DEPTHS
def test_abort_all(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=2)
    for name in "abc":
        engine.add(name, [3], max_tokens=30, ignore_eos=True)
    engine.steps(3)
    engine.call("abort_all", call_id=8, reason="shutdown")
    engine.run()
    assert engine.last_reply() == Reply(8, {"a": "aborted", "b": "aborted", "c": "aborted"})
    assert {engine.finish(name).detail for name in "abc"} == {"shutdown"}
    engine.check_empty()


@DEPTHS
def test_shutdown_aborts_answers_and_stops(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", [3], max_tokens=30, ignore_eos=True)
    engine.steps(3)
    engine.call("shutdown", call_id=8)
    late = engine.submit("late", engine.make("late", [3]))
    assert (late.refusal, late.retry_after) == ("draining", 5)
    while not engine.core.stopped:
        assert engine.step()
    assert engine.last_reply() == Reply(8, {"a": "aborted"})
    assert engine.finish("a").detail == "shutdown"
    engine.check_empty()


def test_shutdown_when_idle_stops_at_once() -> None:
    engine = Engine()
    engine.call("shutdown")
    assert engine.core.stopped and engine.last_reply() == Reply(1, {})


def test_reset_prefix_cache() -> None:
    engine = Engine()
    engine.add("a", [3] * 8, max_tokens=1)
    engine.run()
    engine.call("reset_prefix_cache")
    assert engine.last_reply().result is True
    engine.add("b", [3] * 8, max_tokens=1)
    engine.run()
    assert engine.received["b"].cached == 0


def test_check_raises_to_its_caller_if_the_cache_is_broken() -> None:
    engine = Engine()
    engine.call("check", call_id=2)
    assert engine.last_reply() == Reply(2, True)
    engine.core.cache.pool._free.pop()
    engine.call("check", call_id=3)
    reply = engine.last_reply()
    assert reply.call_id == 3 and reply.error is not None and "CacheBroken" in reply.error


@pytest.mark.parametrize(("method", "args"), [("nonsense", {}), ("ping", {"x": 1}), ("abort_all", {"why": "x"})])
def test_a_wrong_call_is_answered_with_an_error(method: str, args: dict[str, Any]) -> None:
    engine = Engine()
    engine.call(method, call_id=6, **args)
    reply = engine.last_reply()
    assert reply.call_id == 6 and reply.error
    engine.add("a", [3], max_tokens=2)
    engine.run()
    engine.check_complete("a")


# --- failure ---


def test_a_failing_step_raises_and_can_be_described() -> None:
    engine = Engine()
    engine.executor.fail_at = 1
    engine.add("a", [17, 16, 15], max_tokens=9, ignore_eos=True)
    with pytest.raises(RuntimeError, match="on fire"):
        engine.run()
    summary = engine.core.summary()
    assert "step 1: 1 rows, 1 tokens" in summary and "17" not in summary
    assert Engine().core.summary() == "no step was in flight"


def test_waiting_requests_that_cannot_run_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.add("a", [3])
    monkeypatch.setattr(engine.core.cache, "allocate", lambda *_, **__: False)
    with pytest.raises(RuntimeError, match="1 requests wait"):
        engine.step()
