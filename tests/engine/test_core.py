"""The loop and its messages: outputs, aborts, deadlines, statistics, verbs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.scripted import VOCAB, Engine
from tokserve.engine import core, registry
from tokserve.messages import Abort, Finish, Ready, Reply, Status, Step, StepStats, Submit, Verdict

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def finish(engine: Engine, rid: str) -> Finish:
    found = engine.received[rid].finish
    assert found is not None
    return found


def last_reply(engine: Engine) -> Reply:
    assert engine.replies, "no reply yet"
    return engine.replies[-1]


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
    steps = [(identity, m.rids) for identity, m in engine.messages if isinstance(m, Step)]
    assert [rids for identity, rids in steps if identity == b"A" and rids] == [["a", "b"]] * 4
    assert [rids for identity, rids in steps if identity == b"B" and rids] == [["c"]] * 4


@DEPTHS
def test_held_requests_send_one_output(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", [3, 4, 5], max_tokens=9, hold=True, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    engine.run()
    engine.check_complete("a")


def test_every_step_carries_statistics() -> None:
    engine = Engine(num_blocks=20)
    engine.add("a", list(range(10)), max_tokens=2, ignore_eos=True)
    engine.add("b", list(range(3, 10)), max_tokens=9, ignore_eos=True)
    engine.step()
    _, message = engine.messages[-1]
    assert isinstance(message, Step)
    stats = message.stats
    assert (stats.running, stats.waiting, stats.steps) == (2, 0, 1)
    assert (stats.blocks_held, stats.blocks_cached, stats.blocks_total) == (5, 0, 20)
    assert (stats.prompt_tokens, stats.output_tokens, stats.prefix_queries) == (17, 2, 17)
    engine.run()
    assert (engine.stats.running, engine.stats.blocks_held, engine.stats.output_tokens) == (0, 0, 11)
    assert engine.stats.blocks_cached > 0


@DEPTHS
def test_gauges_stay_fresh_while_only_held_requests_run(depth: int) -> None:
    engine = Engine(depth=depth, num_blocks=100, context=300)
    engine.call("hello", owner=b"B")
    engine.add("a", [3], max_tokens=100, hold=True, ignore_eos=True)
    for _ in range(60):
        engine.clock.now += 0.1
        engine.step()
    for identity in (b"A", b"B"):
        told = [m for i, m in engine.messages if i == identity and isinstance(m, Step)]
        assert 9 <= len(told) <= 12 and not any(m.rids for m in told)
        assert told[-1].stats.running == 1


@DEPTHS
def test_going_idle_is_told_once_to_everybody(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.call("hello", owner=b"B")
    engine.add("a", [3], max_tokens=3, ignore_eos=True)
    engine.run()
    count = len(engine.messages)
    for identity in (b"A", b"B"):
        told = [m for i, m in engine.messages if i == identity and isinstance(m, Step)]
        assert told[-1].stats == engine.stats
        assert (told[-1].stats.running, told[-1].stats.blocks_held) == (0, 0)
    if depth == 1:  # the owner's last output said it already
        assert sum(i == b"A" and isinstance(m, Step) for i, m in engine.messages) == 3
    engine.clock.now += 9
    assert not engine.step()
    assert len(engine.messages) == count


def test_a_stop_keeps_the_stop_token_and_says_which() -> None:
    engine = Engine()
    engine.add("a", [3, 4], max_tokens=30, ignore_eos=True, stop_token_ids=list(range(VOCAB)))
    engine.run()
    (token,) = engine.tokens("a")
    assert (finish(engine, "a").reason, finish(engine, "a").detail, finish(engine, "a").stop) == (
        "stop", "stop_token", token,
    )  # fmt: skip


@DEPTHS
def test_parameters_that_leave_nothing_are_not_the_models_fault(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.executor.bar.add((7, 6))
    engine.executor.spoil.add((8, 6))
    for seed, rid in ((7, "a"), (8, "b"), (9, "c")):
        engine.add(rid, [3, 4, 5], seed=seed, max_tokens=9, ignore_eos=True)
    engine.run()
    assert [finish(engine, rid).detail for rid in "abc"] == ["forbidden", "nan", "max_tokens"]
    assert engine.stats.nan_requests == 1 and len(engine.tokens("a")) == 3
    engine.check_empty()


@DEPTHS
def test_logits_of_nan_end_one_request_and_no_other(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.executor.spoil.add((7, 6))
    engine.add("a", [3, 4, 5], seed=7, max_tokens=9, ignore_eos=True, logprobs=0)
    engine.add("b", [3, 4, 5], seed=8, max_tokens=9, ignore_eos=True)
    engine.run()
    assert (finish(engine, "a").reason, finish(engine, "a").detail) == ("error", "nan")
    assert engine.tokens("a") == engine.solo("a").tokens[:3]
    assert engine.stats.nan_requests == 1
    engine.check_complete("b")
    engine.check_empty()


def test_times_are_told_by_the_clock() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [3], max_tokens=2, ignore_eos=True)
    engine.add("b", [4], max_tokens=2, ignore_eos=True)
    for _ in range(4):
        engine.clock.now += 1
        engine.step()
    end = finish(engine, "b")
    assert (end.queued, end.first_token, end.total) == (3.0, 3.0, 4.0)


def test_time_in_the_inbox_counts() -> None:
    engine = Engine()
    add = engine.add("a", [3], max_tokens=1)
    engine.run()
    engine.received.clear()
    engine.core.receive(b"A", Submit(1, "a", [add]), received=engine.clock.now - 5)
    engine.run()
    assert finish(engine, "a").total == 5.0


# --- admission ---


@pytest.mark.parametrize(("prompt", "message"), [([5, VOCAB], "vocabulary"), ([5] * 64, "64 tokens")])
def test_a_request_that_cannot_be_served_is_refused_with_a_message(prompt: list[int], message: str) -> None:
    engine = Engine()
    verdict = engine.submit("bad", engine.make("bad#0", [3]), engine.make("bad#1", prompt))
    assert verdict.refusal == "invalid" and message in verdict.message
    engine.add("good", [3], max_tokens=2)
    engine.run()
    assert set(engine.received) == {"good"}
    engine.check_complete("good")


def test_a_request_that_could_never_fit_is_refused_and_others_are_cut_to_the_cache() -> None:
    engine = Engine(num_blocks=4, context=64)
    assert engine.core.limits.context == 16
    assert "KV cache" in engine.submit("bad", engine.make("bad", [5] * 16)).message
    engine.add("good", [5] * 15, max_tokens=30)
    engine.run()
    engine.check_complete("good")


def test_whatever_admission_raises_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(core, "Request", broken)
        verdict = engine.submit("bad", engine.make("bad", [3]))
    assert (verdict.refusal, verdict.message) == ("internal", "internal error at admission")
    engine.add("good", [3], max_tokens=2)
    engine.run()
    engine.check_complete("good")


def test_a_key_in_use_is_refused_to_everybody_and_free_again_after_its_end() -> None:
    engine = Engine()
    first = [engine.make(f"a#{i}", [3], max_tokens=3 + i, ignore_eos=True) for i in range(2)]
    assert engine.submit("a", *first) == Verdict(7)
    for _ in range(4):
        engine.step()
        if len(engine.received) == 2 and engine.received["a#1"].finish:
            break
        for owner in (b"A", b"B"):
            refused = engine.submit("a", engine.make("a#9", [3], owner=owner), owner=owner)
            assert refused.refusal == "duplicate_id" and "'a' is in use" in refused.message
    engine.check_complete("a#0")
    engine.check_complete("a#1")
    assert "a#9" not in engine.received
    assert engine.submit("b", engine.make("a#1", [3])) == Verdict(7), "its end was told"
    assert engine.submit("c", engine.make("a#1", [3])).refusal == "duplicate_id"


def test_an_id_is_free_as_soon_as_its_end_was_told() -> None:
    engine = Engine(depth=2, eos_token_ids=list(range(VOCAB)))
    engine.add("a", [3], max_tokens=9)
    engine.steps(2)
    assert engine.received.pop("a").finish and engine.stats.blocks_held  # its surplus step is in flight
    engine.add("a", [4], max_tokens=9)
    engine.run()
    engine.check_complete("a")
    engine.check_empty()


# --- aborts ---


@DEPTHS
@pytest.mark.parametrize("hold", [True, False])
def test_abort_returns_what_there_is_to_the_owner_and_the_reply_to_the_caller(depth: int, hold: bool) -> None:
    engine = Engine(depth=depth)
    engine.add("a", [3, 4], max_tokens=30, ignore_eos=True, hold=hold, logprobs=1)
    engine.steps(4)
    engine.abort("a", owner=b"B", call_id=5, reason="abort_stop_string")
    got = engine.received["a"]
    assert (finish(engine, "a").reason, finish(engine, "a").detail) == ("abort", "abort_stop_string")
    assert got.tokens == engine.solo("a").tokens[: len(got.tokens)] and len(got.tokens) == 5 - depth
    assert got.outputs[-1].spans == [("v1", 0, len(got.tokens))]
    engine.run()
    assert [i for i, m in engine.messages if isinstance(m, Reply)] == [b"B"]
    assert last_reply(engine) == Reply(5, {"a": "aborted"})
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
    assert sum(slot.row.rid == "a" for slot in engine.executor.slots.values()) == 0
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
    assert last_reply(engine).result == {
        "done": "finished", "runs": "aborted", "waits": "aborted", "what": "not_found",
    }  # fmt: skip
    assert engine.tokens("waits") == []
    engine.abort("runs")
    assert last_reply(engine).result == {"runs": "finished"}
    engine.run()
    engine.check_empty()


def test_abort_without_a_call_id_is_not_acknowledged() -> None:
    engine = Engine()
    engine.add("a", [3], max_tokens=9)
    engine.abort("a", call_id=None)
    engine.run()
    assert not engine.replies and finish(engine, "a").reason == "abort"


def test_only_so_many_ended_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ENDED_KEPT", 3)
    engine = Engine()
    for name in "abcde":
        engine.add(name, [3], max_tokens=1)
        engine.run()
    engine.abort(*"abcde")
    assert list(last_reply(engine).result.values()) == ["not_found"] * 2 + ["finished"] * 3
    for name in "cx":  # an id that ends again is remembered anew
        engine.received.clear()
        engine.add(name, [3], max_tokens=1)
        engine.run()
    engine.abort(*"cdex")
    assert last_reply(engine).result == {"c": "finished", "d": "not_found", "e": "finished", "x": "finished"}


@DEPTHS
def test_aborting_a_preempted_request_frees_it(depth: int) -> None:
    engine = Engine(num_blocks=8, context=32, depth=depth)
    for name in "ab":
        engine.add(name, [ord(name) % 19] * 6, max_tokens=18, ignore_eos=True)
    while engine.stats.preemptions == 0:
        engine.step()
    engine.abort("b")
    engine.run()
    assert last_reply(engine).result == {"b": "aborted"}
    engine.check_complete("a")
    engine.check_empty()


def submit_choices(engine: Engine, key: str, count: int = 2, *, group: str = "", owner: bytes = b"A") -> None:
    adds = [engine.make(f"{key}#{i}", [3, i], owner=owner, max_tokens=40, ignore_eos=True) for i in range(count)]
    assert engine.submit(key, *adds, group=group, owner=owner) == Verdict(7)


@DEPTHS
def test_an_abort_by_key_reaches_all_choices_of_any_front_end(depth: int) -> None:
    engine = Engine(depth=depth)
    submit_choices(engine, "a", 3)
    submit_choices(engine, "b", owner=b"B")
    engine.steps(3)
    engine.abort("a", "b", "a#0", owner=b"C", call_id=3)
    engine.run()
    assert {finish(engine, rid).reason for rid in ("a#0", "a#1", "a#2", "b#0", "b#1")} == {"abort"}
    assert [(i, m) for i, m in engine.messages if isinstance(m, Reply)] == [
        (b"C", Reply(3, {"a": "aborted", "b": "aborted", "a#0": "not_found"}))
    ]
    engine.check_empty()


def test_a_request_is_aborted_as_long_as_one_choice_lives() -> None:
    engine = Engine()
    engine.submit("a", engine.make("a#0", [3], max_tokens=1), engine.make("a#1", [4], max_tokens=9, ignore_eos=True))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    assert [reply.result for reply in engine.replies] == [{"a": "aborted"}, {"a": "finished"}]
    engine.check_complete("a#0")


def test_a_group_is_aborted_whoever_sent_it() -> None:
    engine = Engine()
    submit_choices(engine, "a", group="g")
    submit_choices(engine, "b", group="g", owner=b"B")
    submit_choices(engine, "c", group="h")
    submit_choices(engine, "d")
    engine.step()
    for call_id, owner in ((1, b"C"), (2, b"A")):
        engine.call("abort_group", group="g", call_id=call_id, owner=owner)
    engine.run()
    assert engine.replies == [Reply(1, {"a": "aborted", "b": "aborted"}), Reply(2, {})]
    assert {rid for rid, got in engine.received.items() if got.finish and got.finish.reason == "abort"} == {
        "a#0", "a#1", "b#0", "b#1"
    }  # fmt: skip
    engine.check_empty()
    assert not engine.core._registry._groups


def test_who_gives_up_a_request_must_own_it() -> None:
    engine = Engine()
    submit_choices(engine, "a")
    engine.step()
    engine.core.receive(b"B", Abort(["a#0"], "abort_disconnect"))
    engine.core.receive(b"A", Abort(["a#1"], "abort_disconnect"))
    engine.run()
    engine.check_complete("a#0")
    assert finish(engine, "a#1").detail == "abort_disconnect"


@DEPTHS
def test_a_front_end_that_has_left_leaves_nothing(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=3)
    submit_choices(engine, "a")
    submit_choices(engine, "b", owner=b"B")
    engine.steps(3)
    engine.call("leave", front_end="B", call_id=4)
    assert last_reply(engine) == Reply(4, 2)
    count = len(engine.verdicts)
    late = engine.make("late", [3], owner=b"B")
    engine.core.receive(b"B", Submit(9, "late", [late]))
    assert len(engine.verdicts) == count, "what it said last came too late"
    before = len(engine.messages)
    engine.run()
    assert not [m for identity, m in engine.messages[before:] if identity == b"B"]
    engine.check_complete("a#0")
    engine.received.clear()
    submit_choices(engine, "b")
    engine.run()
    engine.check_complete("b#0")
    engine.check_empty()


def test_stats_are_told_to_who_asks_ahead_of_the_reply() -> None:
    engine = Engine()
    engine.add("a", [3], max_tokens=9, hold=True, ignore_eos=True)
    engine.steps(2)
    engine.call("stats", call_id=3, owner=b"C")
    told = [m for identity, m in engine.messages if identity == b"C"]
    assert told == [Step(engine.stats), Reply(3, {})] and isinstance(engine.stats, StepStats)
    assert engine.stats.output_tokens == 2


# --- the queue's limits ---


def waiting(engine: Engine, key: str, *lengths: int, **fields: Any) -> str:
    """Submit prompts of these lengths under one key; what is refused."""
    prompts = [[3 + (ord(key[0]) + i) % 10] * length for i, length in enumerate(lengths)]
    adds = [engine.make(f"{key}#{i}", p, max_tokens=30, ignore_eos=True, **fields) for i, p in enumerate(prompts)]
    return engine.submit(key, *adds).refusal


@DEPTHS
def test_a_request_over_the_limit_is_refused_and_leaves_no_trace(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=2, max_queued_requests=3)
    assert [waiting(engine, key, 4) for key in "abcde"] == [""] * 5, "two of them have a slot as good as taken"
    assert waiting(engine, "f", 4) == "queue_full"
    engine.step()
    assert waiting(engine, "f", 4) == "queue_full"
    assert (engine.stats.running, engine.stats.waiting) == (2, 3)
    verdict = engine.verdicts[-1]
    assert "4 requests would wait, and at most 3 may (--max-queued-requests)" in verdict.message
    assert verdict.retry_after == 1
    engine.abort("f")
    assert last_reply(engine).result == {"f": "not_found"}
    engine.abort("c")
    assert waiting(engine, "f", 4) == ""
    engine.run()
    for key in "abdef":
        engine.check_complete(f"{key}#0")
    engine.check_empty()


def test_all_choices_or_none() -> None:
    engine = Engine(max_num_seqs=2, max_queued_requests=3)
    assert waiting(engine, "a", 4, 4) == ""
    engine.step()
    assert waiting(engine, "b", 4, 4) == ""
    assert waiting(engine, "c", 4, 4) == "queue_full"
    assert engine.stats.waiting == 2
    assert waiting(engine, "d", 4) == ""
    assert waiting(engine, "e", 4) == "queue_full"


def test_no_queue_at_all() -> None:
    engine = Engine(max_num_seqs=2, max_queued_requests=0)
    assert [waiting(engine, key, 4) for key in "abc"] == ["", "", "queue_full"]
    engine.step()
    assert waiting(engine, "c", 4) == "queue_full"
    engine.abort("a")
    assert waiting(engine, "c", 4) == ""


def test_prompt_tokens_that_wait() -> None:
    engine = Engine(max_num_seqs=1, max_queued_tokens=10)
    assert waiting(engine, "a", 20) == "", "it does not wait"
    assert waiting(engine, "b", 6) == ""
    assert waiting(engine, "c", 2, 3) == "queue_full"
    assert "11 prompt tokens would wait, and at most 10 may (--max-queued-tokens)" in engine.verdicts[-1].message
    assert waiting(engine, "d", 4) == ""
    engine.step()
    assert waiting(engine, "e", 1) == "queue_full"
    engine.run()
    assert waiting(engine, "f", 50) == ""
    engine.run()
    engine.check_empty()


def test_free_slots_do_not_count_while_blocks_are_missing() -> None:
    engine = Engine(num_blocks=8, context=32, max_num_seqs=8, max_queued_requests=1)
    assert waiting(engine, "a", 24) == ""
    engine.step()
    assert waiting(engine, "b", 20) == ""
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (1, 1)
    assert waiting(engine, "c", 4) == "queue_full"
    engine.run()
    engine.check_empty()


@DEPTHS
def test_who_had_a_slot_once_is_not_queued(depth: int) -> None:
    engine = Engine(num_blocks=8, context=32, depth=depth, max_num_seqs=2, max_queued_requests=1)
    for key in "ab":
        assert waiting(engine, key, 6) == ""
    while engine.stats.preemptions == 0:
        engine.step()
    assert waiting(engine, "c", 4) == ""
    assert waiting(engine, "d", 4) == "queue_full"
    engine.run()
    engine.check_empty()
    limits = engine.core.scheduler._limits
    assert (limits.requests, limits.tokens) == (0, 0)


def test_a_deadline_in_the_queue_makes_room() -> None:
    engine = Engine(max_num_seqs=1, max_queued_requests=1)
    assert waiting(engine, "a", 4) == ""
    assert waiting(engine, "b", 4, queue_timeout_ms=500) == ""
    engine.step()
    assert waiting(engine, "c", 4) == "queue_full"
    engine.clock.now += 1
    engine.step()
    assert waiting(engine, "c", 4) == ""


def test_when_to_come_back_is_judged_by_the_pace_of_late() -> None:
    engine = Engine(max_num_seqs=1, max_queued_requests=2)
    for number in range(5):  # one leaves the queue every 3 seconds
        assert engine.submit(f"r{number}", engine.make(f"r{number}", [3], max_tokens=1)).refusal == ""
        engine.run()
        engine.clock.now += 3
    assert [waiting(engine, key, 4) for key in "abc"] == [""] * 3
    engine.step()
    assert waiting(engine, "d", 4) == "queue_full"
    assert engine.verdicts[-1].retry_after == 3
    assert waiting(engine, "e", 4, 4) == "queue_full"
    assert engine.verdicts[-1].retry_after == 6
    engine.clock.now += 1000
    assert waiting(engine, "e", 4, 4) == "queue_full"
    assert engine.verdicts[-1].retry_after == 60


# --- deadlines ---


@DEPTHS
def test_past_its_deadline_a_request_ends_with_what_it_has(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", [3], max_tokens=60, ignore_eos=True, deadline_ms=2500)
    for _ in range(10):
        engine.step()
        engine.clock.now += 1
    assert (finish(engine, "a").reason, finish(engine, "a").detail) == ("deadline", "deadline")
    assert 1 <= len(engine.tokens("a")) <= 3
    assert engine.tokens("a") == engine.solo("a").tokens[: len(engine.tokens("a"))]
    engine.run()
    engine.check_empty()


def test_queue_timeout_ends_only_who_was_never_admitted() -> None:
    engine = Engine(max_num_seqs=1)
    for name in "ab":
        engine.add(name, [3], max_tokens=5, ignore_eos=True, queue_timeout_ms=1500)
    for _ in range(8):
        engine.step()
        engine.clock.now += 1
    assert (finish(engine, "b").reason, finish(engine, "b").detail) == ("deadline", "queue_timeout")
    assert engine.tokens("b") == []
    engine.check_complete("a")
    engine.check_empty()


def test_sleep_is_bounded_by_the_nearest_deadline_that_still_counts() -> None:
    engine = Engine()
    assert engine.core.seconds_to_deadline() is None
    engine.add("a", [3], max_tokens=2, deadline_ms=7000, ignore_eos=True)
    engine.add("b", [3], max_tokens=2, deadline_ms=9000, queue_timeout_ms=3000, ignore_eos=True)
    assert engine.core.seconds_to_deadline() == pytest.approx(3.0)
    engine.step()
    assert engine.core.seconds_to_deadline() == pytest.approx(7.0)
    engine.clock.now += 2
    assert engine.core.seconds_to_deadline() == pytest.approx(5.0)
    engine.abort("a")
    assert engine.core.seconds_to_deadline() == pytest.approx(7.0)
    engine.run()
    assert engine.core.seconds_to_deadline() is None


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    engine = Engine()
    for number in range(200):
        engine.add(f"r{number}", [3], max_tokens=1, deadline_ms=10**9)
        engine.run()
    assert len(engine.core._deadlines) < 100


# --- verbs ---


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
    assert last_reply(engine) == Reply(4, {})
    engine.call("state", call_id=5)
    state = last_reply(engine).result
    assert (state["running"], state["waiting"], state["cache"], state["weight_version"]) == (1, 1, "ok", "v1")


@DEPTHS
def test_abort_all(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=2)
    for name in "abc":
        engine.add(name, [3], max_tokens=30, ignore_eos=True)
    engine.steps(3)
    engine.call("abort_all", call_id=8, reason="shutdown")
    engine.run()
    assert last_reply(engine) == Reply(8, {"a": "aborted", "b": "aborted", "c": "aborted"})
    assert {finish(engine, name).detail for name in "abc"} == {"shutdown"}
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
    assert last_reply(engine) == Reply(8, {"a": "aborted"})
    assert finish(engine, "a").detail == "shutdown"
    engine.check_empty()


def test_shutdown_when_idle_stops_at_once() -> None:
    engine = Engine()
    engine.call("shutdown")
    assert engine.core.stopped and last_reply(engine) == Reply(1, {})


def test_reset_prefix_cache() -> None:
    engine = Engine()
    engine.add("a", [3] * 8, max_tokens=1)
    engine.run()
    engine.call("reset_prefix_cache")
    assert last_reply(engine).result is True
    engine.add("b", [3] * 8, max_tokens=1)
    engine.run()
    assert engine.received["b"].cached == 0


def test_check_raises_to_its_caller_if_the_cache_is_broken() -> None:
    engine = Engine()
    engine.call("check", call_id=2)
    assert last_reply(engine) == Reply(2, True)
    engine.core.cache.pool._empty.pop()
    for verb in ("check", "state"):
        engine.call(verb, call_id=3)
        reply = last_reply(engine)
        assert reply.call_id == 3 and reply.error is not None and "CacheBroken" in reply.error


@pytest.mark.parametrize(("verb", "args"), [("nonsense", {}), ("ping", {"x": 1}), ("abort_all", {"why": "x"})])
def test_a_wrong_call_is_answered_with_an_error(verb: str, args: dict[str, Any]) -> None:
    engine = Engine()
    engine.call(verb, call_id=6, **args)
    reply = last_reply(engine)
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


def test_requests_that_nobody_can_run_are_a_bug_not_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.add("a", [3])
    monkeypatch.setattr(engine.core.cache, "admit", lambda *_, **__: False)
    with pytest.raises(RuntimeError, match="1 requests wait"):
        engine.step()


def test_only_so_many_front_ends_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "FRONT_ENDS_KEPT", 2)
    engine = Engine()
    engine.add("a", [3], max_tokens=2, ignore_eos=True, owner=b"0")
    for owner in (b"1", b"2", b"3"):
        engine.call("ping", owner=owner)
    engine.run()
    engine.check_complete("a")
    assert len(engine.core._front_ends) == 2
    engine.add("b", [3], max_tokens=1, owner=b"3")
    engine.run()
    assert b"1" not in {i for i, m in engine.messages if isinstance(m, Step)}
