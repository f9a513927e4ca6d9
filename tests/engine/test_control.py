"""Pause, sleep and weight updates over the scripted executor, which checks every plan against the weights."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from tests.engine.harness import Engine
from tokserve.base.errors import RequestError, StartError
from tokserve.protocol.messages import Reply, Status, StepOutput

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PROMPT = [3, 4, 5, 6, 7, 8, 9, 2, 3]


def busy(depth: int = 1, requests: int = 2, **options: Any) -> Engine:
    """An engine with requests `r0`, `r1` ... that have each made a few tokens of thirty."""
    engine = Engine(depth=depth, context=80, num_blocks=100, **options)
    for number in range(requests):
        engine.add(f"r{number}", [*PROMPT, number], seed=number, max_tokens=30, ignore_eos=True)
    engine.steps(6)
    assert all(engine.tokens(f"r{n}") for n in range(requests))
    return engine


def ask(engine: Engine, method: str, /, *, call_id: int = 50, **args: Any) -> Reply:
    """Call a verb, step until it is answered."""
    engine.call(method, call_id=call_id, **args)
    for _ in range(200):
        if actual := answers(engine, call_id):
            return actual[-1]
        engine.step()
    raise AssertionError(f"{method} is not answered")


def answers(engine: Engine, call_id: int) -> list[Reply]:
    return [reply for reply in engine.replies if reply.call_id == call_id]


def finished(engine: Engine, rid: str) -> str | None:
    finish = engine.received[rid].finish if rid in engine.received else None
    return finish.detail if finish else None


def state(engine: Engine) -> str:
    return engine.core.control.state


def status_of(engine: Engine) -> tuple[str, str]:
    status = engine.core.control.status()
    return status.state, status.weight_version


def update(engine: Engine, weights: str, version: str | None = None, **changes: Any) -> Reply:
    """A whole update; the reply of the call that ended it."""
    started = ask(engine, "start_weight_update", call_id=60)
    if started.error:
        return started
    staged = ask(engine, "update_weights", call_id=61, update={"weights": weights} | changes)
    if staged.error:
        return staged
    done = ask(engine, "finish_weight_update", call_id=62, weight_version=version)
    if not done.error:
        engine.weights_of[done.result["weight_version"]] = weights
    return done


def test_a_version_of_earlier_weights_may_come_again_and_the_reply_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that went back to a checkpoint counts its steps up again (rl-faults F12)."""
    engine = Engine()
    for weights, version, is_reused in (("w5", "5", False), ("w6", "6", False), ("x5", "5", True), ("x6", "6", True)):
        caplog.clear()
        done = update(engine, weights, version)
        assert done.result.get("version_reused", False) is is_reused
        assert (f"version {version} is the name of earlier weights" in caplog.text) is is_reused
        engine.add(f"r-{weights}", [*PROMPT, 0], max_tokens=3, ignore_eos=True)
        engine.run()
        engine.check_complete(f"r-{weights}")


# --- pause ---


@DEPTHS
def test_abort_ends_what_is_in_flight_and_later_requests_wait(depth: int) -> None:
    engine = busy(depth)
    before = len(engine.tokens("r0"))
    assert ask(engine, "pause").result == {"status": "paused"}
    finish = engine.received["r0"].finish
    assert finish is not None and (finish.reason, finish.detail) == ("abort", "abort_pause")
    assert len(engine.tokens("r0")) >= before and finished(engine, "r1") == "abort_pause"
    engine.check_empty()
    engine.add("late", PROMPT, max_tokens=3, ignore_eos=True)
    engine.steps(5)
    assert "late" not in engine.received and state(engine) == "paused"
    stats = [message.stats for _, message in engine.messages if isinstance(message, StepOutput)]
    assert (stats[-1].running, stats[-1].waiting) == (0, 1)
    assert ask(engine, "resume").result == {"status": "resumed"}
    engine.run()
    engine.check_complete("late")


@DEPTHS
def test_wait_lets_requests_end_and_answers_only_then(depth: int) -> None:
    engine = busy(depth, max_num_seqs=1, requests=1)
    engine.add("queued", PROMPT, max_tokens=4, ignore_eos=True)
    engine.call("pause", call_id=9, mode="wait")
    engine.add("late", PROMPT, max_tokens=3, ignore_eos=True)
    engine.steps(10)
    assert state(engine) == "pausing" and not answers(engine, 9)
    engine.run()
    assert answers(engine, 9)[0].result == {"status": "paused"} and state(engine) == "paused"
    engine.check_complete("r0")
    engine.check_complete("queued")
    assert "late" not in engine.received
    ask(engine, "resume")
    engine.run()
    engine.check_complete("late")
    engine.check_empty()


@DEPTHS
def test_mode_keep_freezes_requests_and_resumes_without_recomputation(depth: int) -> None:
    engine = busy(depth)
    ask(engine, "pause", mode="keep", clear_cache=False)
    before, computed = engine.tokens("r0").copy(), dict(engine.executor.computed)
    engine.steps(5)
    assert engine.tokens("r0") == before and engine.stats.running == 2 and engine.stats.blocks_held > 0
    ask(engine, "resume")
    engine.run()
    for rid in ("r0", "r1"):
        engine.check_complete(rid)
        assert computed[rid] < engine.executor.computed[rid]
    assert engine.executor.computed["r0"] == len(PROMPT) + 1 + 29


def test_what_ends_within_its_prompt_has_no_prompt_logprobs() -> None:
    engine = Engine(max_num_batched_tokens=5)
    engine.add("r", [*PROMPT, *PROMPT], prompt_logprobs=1, max_tokens=3)
    engine.steps(2)  # ten of eighteen tokens
    ask(engine, "pause", mode="abort")
    assert finished(engine, "r") == "abort_pause" and engine.received["r"].prompt_logprobs is None
    engine.check_empty()


def test_a_paused_engine_refuses_requests_if_configured() -> None:
    engine = busy(reject_while_paused=True)
    engine.call("pause", call_id=9, mode="wait")
    for rid in ("pausing", "paused"):
        assert engine.submit(rid, engine.make(rid, PROMPT)).refusal == "paused"
        engine.run()
    ask(engine, "resume")
    engine.add("late", PROMPT, max_tokens=2, ignore_eos=True)
    engine.run()
    engine.check_complete("late")


def test_aborts_and_deadlines_work_while_paused() -> None:
    engine = busy()
    ask(engine, "pause", mode="keep")
    engine.add("late", PROMPT, deadline_ms=1000)
    engine.abort("r0", call_id=3)
    assert answers(engine, 3)[0].result == {"r0": "aborted"} and finished(engine, "r0") == "abort_user"
    engine.clock.now += 2
    engine.step()
    assert finished(engine, "late") == "deadline" and finished(engine, "r1") is None
    ask(engine, "pause", mode="abort")
    assert finished(engine, "r1") == "abort_pause"
    engine.check_empty()


def test_resume_always_succeeds_and_overtakes_a_pause() -> None:
    engine = busy()
    assert ask(engine, "resume").error is None
    engine.call("pause", call_id=9, mode="wait")
    ask(engine, "resume")
    engine.step()
    (reply,) = answers(engine, 9)
    assert reply.status == 409 and state(engine) == "running"
    engine.add("late", PROMPT, max_tokens=2, ignore_eos=True)
    engine.run()
    engine.check_complete("late")


def test_verbs_that_wait_for_one_another_are_all_answered_before_the_engine_rests() -> None:
    engine = busy(depth=2)
    engine.call("sleep", call_id=8, level=2, mode="wait")
    engine.call("start_weight_update", call_id=9)
    engine.call("sleep", call_id=10, level=2, mode="keep")  # ends the wait of 8, which ends that of 9
    engine.run()
    assert [answers(engine, number)[0].error for number in (8, 9, 10)] == [None] * 3


def test_a_keep_ends_the_wait_of_another_pause() -> None:
    engine = busy()
    engine.call("pause", call_id=8, mode="wait")
    ask(engine, "pause", mode="keep")
    engine.step()
    assert answers(engine, 8)[0].result == {"status": "paused"}
    ask(engine, "resume")
    engine.run()
    engine.check_complete("r0")


@pytest.mark.parametrize(
    ("method", "args", "field"),
    [
        ("pause", {"mode": "now"}, "mode"),
        ("sleep", {"level": 3}, "level"),
        ("sleep", {"mode": "x"}, "mode"),
        ("wake_up", {"tags": ["gpu"]}, "tags"),
        ("finish_weight_update", {"weight_version": ""}, "weight_version"),
        ("update_weight_version", {"new_version": ""}, "new_version"),
    ],
)
def test_bad_arguments_are_named(method: str, args: dict[str, Any], field: str) -> None:
    reply = ask(busy(), method, **args)
    assert (reply.status, reply.field) == (400, field) and reply.error


def test_front_ends_get_a_state_before_the_callers_reply() -> None:
    engine = busy()
    engine.call("hello", owner=b"B")
    engine.messages.clear()
    ask(engine, "pause", mode="keep")
    messages = [(who, m) for who, m in engine.messages if isinstance(m, Status | Reply)]
    paused = Status("paused", "v1", 0, True)
    assert (b"A", paused) in messages and (b"B", paused) in messages
    assert isinstance(messages[-1][1], Reply)


# --- updates ---


@DEPTHS
def test_a_commit_changes_the_weights_between_two_steps(depth: int) -> None:
    engine = busy(depth)
    reply = update(engine, "w2")
    assert reply.result == {"message": "Weight update finished", "weight_version": "1", "epoch": 1}
    engine.add("new", [*PROMPT, 0], max_tokens=5, ignore_eos=True, logprobs=1)
    engine.run()
    for rid in ("r0", "r1", "new"):
        engine.check_complete(rid)
    spans = engine.received["r0"].outputs[-1].spans
    assert [version for version, _, _ in spans] == ["v1", "1"]
    assert engine.received["new"].cached == 0  # although r0 has the same prompt
    old = spans[0][2] + engine.received["r1"].outputs[-1].spans[0][2]
    assert engine.stats.tokens_by_age == [65 - old, old, 0, 0, 0]


@DEPTHS
def test_requests_run_while_tensors_are_received(depth: int) -> None:
    engine = busy(depth)
    engine.executor.slow = deque()
    engine.call("start_weight_update", call_id=1)
    engine.steps(3)
    assert state(engine) == "updating" and not answers(engine, 1) and not engine.wakes
    engine.executor.settle()
    assert engine.wakes
    engine.call("update_weights", call_id=2, update={"weights": "w2"})
    before = len(engine.tokens("r0"))
    engine.steps(5)
    assert len(engine.tokens("r0")) > before and answers(engine, 1) and not answers(engine, 2)
    engine.executor.settle()
    engine.step()
    engine.call("finish_weight_update", call_id=3, weight_version="two")
    engine.steps(2)
    assert engine.core.control.status().weight_version == "v1"
    engine.executor.settle()
    engine.weights_of["two"] = "w2"
    engine.run()
    engine.executor.settle()  # the old weights are freed
    engine.step()
    assert answers(engine, 3)[0].result["weight_version"] == "two"
    engine.check_complete("r0")


def test_a_failed_update_leaves_everything_as_it_was() -> None:
    engine = busy()
    reply = update(engine, "w2", fault="unknown tensor x")
    assert reply.error is None  # it had weights
    engine.weights_of["1"] = "w2"
    ask(engine, "start_weight_update")
    failed = ask(engine, "update_weights", update={"fault": "unknown tensor x"})
    assert (failed.status, failed.error) == (400, "unknown tensor x")
    status = engine.core.control.status()
    assert (status.state, status.weight_version, status.failure) == ("running", "1", "unknown tensor x")
    late = ask(engine, "finish_weight_update")
    assert late.status == 409 and "unknown tensor x" in str(late.error)
    assert engine.executor.staged is None
    engine.run()
    engine.check_complete("r0")


def test_the_order_of_calls_is_checked() -> None:
    engine = busy()
    for method, args in (("update_weights", {"update": {}}), ("finish_weight_update", {}), ("abort_weight_update", {})):
        assert ask(engine, method, **args).status == 409
    ask(engine, "start_weight_update")
    assert ask(engine, "start_weight_update").status == 409
    assert ask(engine, "update_weights_from_dir", weight_dir="d").status == 409
    assert ask(engine, "update_weight_version", new_version="x").status == 409
    assert ask(engine, "init_weight_transfer_engine", init_info={}).status == 409
    assert ask(engine, "finish_weight_update").status == 400  # nothing came
    assert ask(engine, "start_weight_update").error is None


def test_an_abort_overtakes_what_is_still_coming() -> None:
    engine = busy()
    ask(engine, "start_weight_update")
    engine.executor.slow = deque()
    engine.call("update_weights", call_id=2, update={"weights": "w2"})
    engine.call("abort_weight_update", call_id=3)
    engine.steps(2)
    engine.executor.settle()
    engine.step()
    assert answers(engine, 2)[0].status == 409 and answers(engine, 3)[0].error is None
    assert engine.executor.interrupted == 1 and engine.executor.staged is None
    engine.run()
    engine.check_complete("r0")


def test_a_body_belongs_to_the_update_that_was_open_at_its_start() -> None:
    engine = busy()
    assert ask(engine, "begin_weight_stream", stream="old").status == 409
    ask(engine, "start_weight_update")
    assert ask(engine, "begin_weight_stream", stream="old").error is None
    ask(engine, "abort_weight_update")
    ask(engine, "start_weight_update")
    for piece in ({}, {"last": True}, {"broken": True}):
        assert ask(engine, "feed_weights", stream="old", chunk=b"w1", **piece).status == 409
    assert state(engine) == "updating" and engine.executor.staged == ""
    ask(engine, "begin_weight_stream", stream="new")
    for chunk in (b"w", b"2"):
        assert ask(engine, "feed_weights", stream="new", chunk=chunk, last=chunk == b"2").error is None
    engine.weights_of["1"] = "w2"
    assert ask(engine, "finish_weight_update").error is None
    engine.run()
    engine.check_complete("r0")


def test_repeated_calls_do_not_affect_a_commit_in_flight() -> None:
    engine = busy()
    ask(engine, "start_weight_update")
    ask(engine, "update_weights", update={"weights": "w2"})
    ask(engine, "begin_weight_stream", stream="body")
    engine.executor.slow = deque()
    engine.call("finish_weight_update", call_id=9, weight_version="two")
    late: list[tuple[str, dict[str, Any]]] = [
        ("finish_weight_update", {"weight_version": "two"}),
        ("update_weights", {"update": {"weights": "w3"}}),
        ("feed_weights", {"stream": "body", "chunk": b"w3"}),
        ("begin_weight_stream", {"stream": "other"}),
        ("start_weight_update", {}),
        ("init_weight_transfer_engine", {"init_info": {}}),
    ]
    for method, args in late:
        assert ask(engine, method, **args).status == 409, method
    while not answers(engine, 9):
        engine.executor.settle()
        engine.step()
    assert answers(engine, 9)[0].result["weight_version"] == "two" and engine.executor.weights == "w2"
    assert "of version two serve already" in str(ask(engine, "finish_weight_update", weight_version="two").error)
    engine.weights_of["two"] = "w2"
    engine.run()
    engine.check_complete("r0")


@pytest.mark.parametrize("method", ["init_weight_transfer_engine", "shutdown_weight_transfer_engine"])
def test_a_trainer_that_did_not_come_is_not_waited_for_when_another_is_announced(method: str) -> None:
    engine = busy()
    engine.executor.slow = deque()
    engine.call("init_weight_transfer_engine", call_id=9, init_info={})
    engine.steps(2)
    assert not answers(engine, 9) and engine.executor.interrupted == 0
    args = {"init_info": {}} if method.startswith("init") else {}
    engine.call(method, call_id=10, **args)
    assert engine.executor.interrupted == 1
    while not answers(engine, 9) or not answers(engine, 10):
        engine.executor.settle()
        engine.step()
    engine.executor.slow = None
    assert ask(engine, "shutdown_weight_transfer_engine", call_id=11).error is None
    assert engine.executor.interrupted == 1  # no caller waits


def test_an_abort_overtakes_a_commit_that_waits_for_its_tensors() -> None:
    engine = busy()
    ask(engine, "start_weight_update")
    ask(engine, "update_weights", update={"weights": "w2"})
    engine.executor.slow = deque()
    engine.call("finish_weight_update", call_id=9)
    engine.call("abort_weight_update", call_id=10)
    engine.call("abort_weight_update", call_id=11)
    while not answers(engine, 9) or not answers(engine, 10):
        engine.executor.settle()
        engine.step()
    assert answers(engine, 9)[0].status == answers(engine, 11)[0].status == 409 and answers(engine, 10)[0].error is None
    assert engine.executor.weights == "" and status_of(engine) == ("running", "v1")
    engine.run()
    engine.check_complete("r0")


REPEATED: list[tuple[str, dict[str, Any], str]] = [
    ("pause", {"mode": "abort"}, "paused"),
    ("pause", {"mode": "keep"}, "paused"),
    ("pause", {"mode": "wait"}, "paused"),
    ("resume", {}, "running"),
    ("sleep", {"level": 0}, "sleeping"),
    ("sleep", {"level": 1}, "sleeping"),
    ("sleep", {"level": 2}, "sleeping"),
    ("sleep", {"level": 1, "mode": "wait"}, "sleeping"),
    ("wake_up", {}, "running"),
    ("release_kv_cache_memory", {}, "sleeping"),
    ("shutdown_weight_transfer_engine", {}, "running"),
]


@pytest.mark.parametrize(("method", "args", "holds"), REPEATED)
def test_a_verb_that_is_sent_again_does_what_one_does(method: str, args: dict[str, Any], holds: str) -> None:
    """The sender repeats it after a timeout: the first may still be under way, or done."""
    engine = busy()
    for call_id in (1, 2):
        engine.call(method, call_id=call_id, **args)
    engine.run()
    assert ask(engine, method, call_id=3, **args).error is None
    replies = [answers(engine, call_id) for call_id in (1, 2, 3)]
    assert all(len(reply) == 1 and reply[0] == Reply(n, replies[0][0].result) for n, reply in enumerate(replies, 1))
    assert state(engine) == holds
    ask(engine, "resume")
    if state(engine) == "sleeping" and args.get("level") == 2:
        ask(engine, "wake_up", tags=["weights"])
        update(engine, "w2")
    ask(engine, "wake_up")
    assert state(engine) == "running"
    engine.add("after", PROMPT, max_tokens=3, ignore_eos=True)
    engine.run()
    engine.check_complete("after")
    engine.check_empty()


def test_the_one_call_form_is_start_stage_and_commit() -> None:
    engine = busy()
    reply = ask(engine, "update_weights_from_dir", weight_dir="/nowhere")
    assert reply.status == 400 and state(engine) == "running"


def test_update_weights_from_dir_excludes_other_calls_of_an_update() -> None:
    engine = busy()
    engine.executor.directories["d"] = ("w2", "first")
    engine.executor.slow = deque()
    engine.call("update_weights_from_dir", call_id=9, weight_dir="d", weight_version="two")
    for method, args in (("update_weights", {"update": {"weights": "w3"}}), ("finish_weight_update", {})):
        for _ in range(2):  # while it opens, and while it is read
            assert ask(engine, method, **args).status == 409
            engine.executor.settle(1)
            engine.steps(1)
    while not answers(engine, 9):
        engine.executor.settle()
        engine.step()
    assert answers(engine, 9)[0].result["weight_version"] == "two" and engine.executor.weights == "w2"


def test_a_version_that_serves_is_refused_for_other_weights() -> None:
    engine = Engine()
    assert update(engine, "w1", "0").result["epoch"] == 1, "the first update may have the name of the start"
    assert update(engine, "w2", "one").error is None
    refused = update(engine, "w3", "one")
    assert refused.status == 409 and refused.field == "weight_version" and "version one serve" in str(refused.error)
    assert engine.executor.weights == "w2" and state(engine) == "running"
    assert update(engine, "w2", "one").result["epoch"] == 3, "a client that has not heard of its success sends it again"
    assert update(engine, "w3", "two").error is None and engine.executor.weights == "w3"


@pytest.mark.parametrize("version", ["a\0b", "a\r\nb", "\x7f", "\u2028"])
def test_versions_are_printable(version: str) -> None:
    engine = Engine()
    for method, name in (("finish_weight_update", "weight_version"), ("update_weight_version", "new_version")):
        reply = ask(engine, method, **{name: version})
        assert reply.status == 400 and reply.field == name and "printable" in str(reply.error)


def test_a_label_is_a_new_epoch() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=2, ignore_eos=True)
    engine.run()
    engine.weights_of["b"] = ""
    assert ask(engine, "update_weight_version", new_version="b").result["epoch"] == 1
    engine.add("c", PROMPT, max_tokens=2, ignore_eos=True)
    engine.run()
    assert engine.received["c"].cached == 0 and engine.received["c"].outputs[-1].spans == [("b", 0, 2)]


def test_a_commit_that_fails_halfway_quarantines_until_an_update_succeeds() -> None:
    engine = busy()
    ask(engine, "start_weight_update")
    ask(engine, "update_weights", update={"weights": "w1"})
    engine.executor.commit_error = RuntimeError("out of memory")
    reply = ask(engine, "finish_weight_update")
    assert reply.status == 500 and state(engine) == "quarantined"
    assert finished(engine, "r0") == "abort_quarantine"
    assert engine.submit("r2", engine.make("r2", PROMPT)).refusal == "quarantined"
    engine.executor.commit_error = None
    update(engine, "w2", "good")
    assert state(engine) == "running"
    engine.add("r3", PROMPT, max_tokens=9, ignore_eos=True)
    engine.run()
    engine.check_complete("r3")
    engine.check_empty()


def test_without_room_for_two_sets_a_failure_quarantines_until_an_update_succeeds() -> None:
    engine = busy()
    engine.executor.has_room_for_two = False
    ask(engine, "start_weight_update")
    assert engine.executor.weights is None
    engine.steps(3)
    assert state(engine) == "updating" and finished(engine, "r0") is None
    ask(engine, "update_weights", update={"fault": "the trainer has gone"})
    assert state(engine) == "quarantined" and finished(engine, "r0") == "abort_quarantine"
    verdict = engine.submit("refused", engine.make("refused", PROMPT))
    assert verdict.refusal == "quarantined" and "has gone" in verdict.message
    assert ask(engine, "resume").error is None and state(engine) == "quarantined"
    assert update(engine, "w2", fault="again").error is None
    assert state(engine) == "running"
    engine.add("new", PROMPT, max_tokens=4, ignore_eos=True)
    engine.run()
    engine.check_complete("new")
    engine.check_empty()


def test_without_room_for_two_sets_requests_freeze_and_go_on() -> None:
    engine = busy()
    engine.executor.has_room_for_two = False
    assert update(engine, "w2").error is None
    engine.run()
    engine.check_complete("r0")


# --- sleep ---


@DEPTHS
@pytest.mark.parametrize("level", [0, 1])
def test_requests_kept_during_sleep_continue_with_the_same_tokens(depth: int, level: int) -> None:
    engine = busy(depth)
    ask(engine, "sleep", level=level, mode="keep")
    assert state(engine) == "sleeping" and engine.executor.has_kv is (level == 0)
    assert (engine.stats.running == (2 if level == 0 else 0) and engine.stats.blocks_cached == 0) or level == 0
    engine.steps(3)
    ask(engine, "wake_up")
    assert state(engine) == "running"
    engine.run()
    engine.check_complete("r0")
    engine.check_complete("r1")
    engine.check_empty()


def test_wake_up_without_memory_is_an_error_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = busy()
    ask(engine, "sleep", mode="keep")

    def no_memory(method: str, args: dict[str, Any]) -> None:
        raise StartError("cannot reserve 7 bytes for the KV cache")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "call", no_memory)
        reply = ask(engine, "wake_up")
    assert (reply.status, reply.error) == (503, "cannot reserve 7 bytes for the KV cache")
    assert state(engine) == "sleeping"
    ask(engine, "wake_up")
    engine.run()
    engine.check_complete("r0")


def test_level_two_needs_new_weights_before_it_wakes() -> None:
    engine = busy()
    ask(engine, "sleep", level=2)
    assert engine.executor.weights is None and finished(engine, "r0") == "abort_pause"
    assert ask(engine, "wake_up").status == ask(engine, "weight_checksums").status == 409
    assert ask(engine, "checkpoint_checksums").status == 409
    assert ask(engine, "wake_up", tags=["weights", "kv_cache"]).error is None
    assert state(engine) == "sleeping" and engine.core.control.status().sleeping  # there are no weights yet
    assert ask(engine, "wake_up").status == 409
    assert ask(engine, "release_kv_cache_memory").error is None
    engine.add("late", PROMPT, max_tokens=3, ignore_eos=True)
    engine.steps(3)
    ask(engine, "start_weight_update")
    assert engine.core.control.status().sleeping
    ask(engine, "abort_weight_update")
    ask(engine, "wake_up", tags=["kv_cache", "scheduling"])
    ask(engine, "start_weight_update")
    assert state(engine) == "updating" and engine.core.control.status().sleeping  # until its weights are back
    ask(engine, "abort_weight_update")
    ask(engine, "release_kv_cache_memory")
    assert update(engine, "w2").error is None
    engine.steps(3)
    assert "late" not in engine.received
    ask(engine, "wake_up", tags=["kv_cache"])
    assert state(engine) == "running"
    engine.run()
    engine.check_complete("late")


def test_an_update_during_the_start_of_a_deep_sleep_begins_after_it() -> None:
    engine = busy()
    engine.executor.slow = deque()
    engine.call("sleep", call_id=70, level=2, mode="wait")
    for call_id in (71, 72):
        engine.call("start_weight_update", call_id=call_id)
    engine.steps(3)
    assert not answers(engine, 70) and not answers(engine, 71) and not engine.executor.slow
    engine.run()
    assert answers(engine, 70)[0].error is None and engine.executor.weights is None
    engine.executor.settle()  # it checks who has the weights
    engine.run()
    assert answers(engine, 71)[0].error is None and answers(engine, 72)[0].status == 409


def test_a_level_zero_sleep_ends_with_resume_too() -> None:
    engine = busy()
    ask(engine, "sleep", level=0, mode="keep")
    assert ask(engine, "wake_up", tags=["weights"]).result == {"status": "sleeping", "asleep": ["scheduling"]}
    ask(engine, "resume")
    engine.run()
    engine.check_complete("r0")


def test_a_pause_outlasts_a_sleep() -> None:
    engine = busy()
    ask(engine, "pause", mode="keep")
    ask(engine, "sleep", level=1, mode="keep")
    ask(engine, "wake_up")
    assert state(engine) == "paused"
    ask(engine, "resume")
    engine.run()
    engine.check_complete("r0")


def test_kv_memory_can_be_given_back_alone() -> None:
    engine = busy()
    assert ask(engine, "release_kv_cache_memory").result == {"success": True}
    assert not engine.executor.has_kv and state(engine) == "sleeping"
    ask(engine, "wake_up", tags=["kv_cache"])
    engine.run()
    engine.check_complete("r0")


def test_messages_with_invalid_utf8_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = busy()
    name = b"caf\xe9".decode(errors="surrogateescape")

    def refuse(method: str, args: dict[str, Any]) -> Any:
        raise RequestError(f"no file {name}")

    monkeypatch.setattr(engine.executor, "call", refuse)
    answer = ask(engine, "collective_rpc", method="f")
    assert answer.status == 400 and answer.error == "no file caf\\udce9"
    engine.run()


def test_a_failed_update_may_name_a_file_that_is_no_utf8() -> None:
    engine = busy()
    ask(engine, "start_weight_update")
    name = b"caf\xe9".decode(errors="surrogateescape")
    answer = ask(engine, "update_weights", update={"fault": f"no file {name}"})
    assert (answer.status, answer.error) == (400, "no file caf\\udce9")
    assert engine.core.control.status().failure == answer.error  # told to all front ends: the harness encodes it
    engine.run()
    engine.check_complete("r0")


def test_a_worker_call_comes_between_two_steps() -> None:
    assert ask(busy(2), "collective_rpc", method="f", args=[1]).result == ["f[1]{}"]
    assert ask(busy(2), "apply_model", function="m:f").result == ["m:f"]


def test_checksums_of_received_tensors_are_invalid_after_a_worker_call() -> None:
    engine = busy(2)
    known = {"checkpoint": {"all": str(engine.executor.weights)}, "tied": {}}
    assert ask(engine, "checkpoint_checksums", call_id=51).result == known
    assert ask(engine, "collective_rpc", call_id=52, method="f").result
    refused = ask(engine, "checkpoint_checksums", call_id=53)
    assert refused.status == 409 and refused.error is not None and "worker call" in refused.error
    assert ask(engine, "update_weight_version", call_id=54, new_version="mine").result
    assert ask(engine, "checkpoint_checksums", call_id=55).status == 409
    assert ask(engine, "weight_checksums", call_id=56).result == {"all": str(engine.executor.weights)}
