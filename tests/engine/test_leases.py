"""Weight updates and pauses whose holder has died: they expire, or a successor takes them over."""

from __future__ import annotations

import logging
import random
from collections import deque
from typing import Any

import pytest

from tests.engine.drafters import RandomDrafter
from tests.engine.harness import Engine
from tests.engine.test_control import DEPTHS, PROMPT, answers, ask, busy, state, update
from tests.engine.test_take_over import successor

LEASE = 600.0  # the default of an update


def passes(engine: Engine, seconds: float) -> None:
    engine.clock.now += seconds
    engine.step()


def test_an_update_is_rolled_back_when_its_lease_expires() -> None:
    engine = busy()
    ask(engine, "start_weight_update")
    passes(engine, LEASE - 1)
    assert state(engine) == "updating"
    ask(engine, "update_weights", update={"weights": "w2"})  # extends it
    passes(engine, LEASE - 1)
    assert state(engine) == "updating" and engine.core.seconds_to_deadline() == pytest.approx(1.0)
    passes(engine, 1)
    assert state(engine) == "running" and engine.executor.staged is None
    failure = engine.core.control.status().failure
    assert failure == "no call came for 600 s (its lease is 600 s)"
    late = ask(engine, "finish_weight_update")
    assert late.status == 409 and failure in str(late.error)
    assert update(engine, "w3", "three").error is None
    engine.run()
    engine.check_complete("r0")


def test_every_piece_of_a_body_extends_the_update() -> None:
    engine = busy()
    ask(engine, "start_weight_update", lease=10)
    ask(engine, "begin_weight_stream", stream="body")
    for _ in range(5):
        passes(engine, 8)
        assert ask(engine, "feed_weights", stream="body", chunk=b"w").error is None
    passes(engine, 10)
    assert state(engine) == "running"


def test_what_is_still_coming_or_committing_does_not_expire() -> None:
    engine = busy()
    engine.executor.slow = deque()
    engine.call("start_weight_update", call_id=1, lease=10)
    passes(engine, 100)
    engine.executor.settle()
    engine.step()
    engine.call("update_weights", call_id=2, update={"weights": "w2"})
    passes(engine, 100)
    engine.executor.settle()
    engine.step()
    engine.call("finish_weight_update", call_id=3, weight_version="two")
    passes(engine, 100)
    engine.executor.settle()
    engine.step()
    engine.executor.slow = None
    engine.weights_of["two"] = "w2"
    engine.run()
    assert engine.core.control.status().weight_version == "two"


def test_a_lease_of_zero_never_ends_and_others_are_refused() -> None:
    engine = busy()
    ask(engine, "start_weight_update", lease=0)
    passes(engine, 1e6)
    assert state(engine) == "updating"
    for method in ("start_weight_update", "pause"):
        for lease in (-1.0, float("nan"), float("inf"), 1e300):
            reply = ask(engine, method, lease=lease)
            assert (reply.status, reply.field) == (400, "lease"), (method, lease)


def test_a_refused_update_reports_the_age_of_the_open_one() -> None:
    engine = busy()
    ask(engine, "start_weight_update")
    passes(engine, 20)
    message = str(ask(engine, "start_weight_update").error)
    for part in ("for 20 s", "last heard of 20 s ago", "/abort_weight_update", '"take_over": true', "in 580 s"):
        assert part in message, message


TAKING = [
    ("start_weight_update", {}),
    ("update_weights_from_dir", {"weight_dir": "d"}),
    ("init_weight_transfer_engine", {"init_info": {}}),
]


@pytest.mark.parametrize(("method", "args"), TAKING, ids=[method for method, _ in TAKING])
@pytest.mark.parametrize("point", ["started", "streaming", "filled", "in flight"])
def test_a_successor_takes_over_wherever_the_trainer_died(method: str, args: dict[str, Any], point: str) -> None:
    engine = busy()
    engine.executor.directories["d"] = ("w3", "stamp")
    ask(engine, "start_weight_update")
    if point == "streaming":
        ask(engine, "begin_weight_stream", stream="body")
        ask(engine, "feed_weights", stream="body", chunk=b"w")
    elif point == "filled":
        ask(engine, "update_weights", update={"weights": "w2"})
    elif point == "in flight":
        engine.executor.slow = deque()
        engine.call("update_weights", call_id=8, update={"weights": "w2"})
    assert ask(engine, method, call_id=40, **args).status == 409
    engine.call(method, call_id=41, take_over=True, **args)
    engine.executor.settle()
    engine.executor.slow = None
    engine.weights_of["1"] = "w3"
    engine.run()
    assert answers(engine, 41)[0].error is None
    assert engine.executor.interrupted == (point == "in flight")  # a group of the successor's stays as it is
    if method == "start_weight_update":
        assert state(engine) == "updating"
        ask(engine, "update_weights", update={"weights": "w3"})
        assert ask(engine, "finish_weight_update").error is None
    assert state(engine) == "running"
    engine.run()
    engine.check_complete("r0")


def test_a_take_over_lets_a_commit_come_to_its_end() -> None:
    engine = busy()
    ask(engine, "start_weight_update")
    ask(engine, "update_weights", update={"weights": "w2"})
    engine.executor.slow = deque()
    engine.call("finish_weight_update", call_id=8, weight_version="two")
    assert "it is being committed" in str(ask(engine, "start_weight_update").error)
    engine.call("start_weight_update", call_id=9, take_over=True)
    engine.steps(2)
    assert not answers(engine, 9)
    while not answers(engine, 9):
        engine.executor.settle()
        engine.step()
    assert engine.core.control.status().weight_version == "two" and state(engine) == "updating"
    assert answers(engine, 8)[0].error is None


def test_a_pause_with_a_lease_ends_by_itself_unless_it_is_extended() -> None:
    engine = busy()
    before = len(engine.tokens("r0"))
    ask(engine, "pause", mode="keep", lease=30)
    for _ in range(3):
        passes(engine, 20)
        assert state(engine) == "paused" and ask(engine, "extend_pause").error is None
    assert engine.core.seconds_to_deadline() == pytest.approx(30.0)
    passes(engine, 30)
    assert state(engine) == "running"
    assert ask(engine, "extend_pause").status == 409 and state(engine) == "running"
    engine.run()
    engine.check_complete("r0")
    assert len(engine.tokens("r0")) > before


@pytest.mark.parametrize(
    ("first", "second", "taken", "lasts"),
    [
        (30, None, False, None),
        (None, 30, False, None),
        (30, 60, False, 60),
        (60, 30, False, 60),
        (60, 30, True, 30),
        (None, 30, True, 30),
        (30, None, True, None),
    ],
)
def test_of_two_pauses_the_longer_lease_holds_unless_one_takes_over(
    first: float | None, second: float | None, taken: bool, lasts: float | None
) -> None:
    engine = busy()
    ask(engine, "pause", mode="keep", lease=first)
    ask(engine, "pause", mode="keep", lease=second, take_over=taken)
    assert engine.core.seconds_to_deadline() == lasts


def test_a_pause_keeps_its_lease_in_another_engine() -> None:
    engine = busy()
    ask(engine, "pause", mode="keep", lease=30)
    other = successor(engine)
    assert state(other) == "paused"
    passes(other, 30)
    assert state(other) == "running"


def test_waiting_requests_are_reported_in_the_log_and_the_state(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    with caplog.at_level(logging.INFO, logger="tokserve.engine"):
        for _ in range(2):
            ask(engine, "pause", lease=30)
            for name in "ab":
                engine.add(f"{name}{engine.clock.now}", PROMPT, max_tokens=2, ignore_eos=True)
            shown = ask(engine, "state").result
            assert shown["paused_since"] is not None and "POST /resume" in shown["reason"]
            ask(engine, "resume")
            engine.run()
            engine.clock.now += 1
        assert ask(engine, "state").result["paused_since"] is None
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("requests wait: generation is paused until POST /resume") for line in lines) == 2
    assert sum(line.startswith("paused (mode abort, lease 30 s)") for line in lines) == 2
    assert sum(line.startswith("resumed after") for line in lines) == 2


def test_the_state_lists_all_that_blocks_requests() -> None:
    engine = Engine()
    ask(engine, "start_weight_update")
    ask(engine, "abort_weight_update")
    failed = ask(engine, "state").result["reason"]
    assert "aborted" in failed
    ask(engine, "pause")
    assert ask(engine, "state").result["reason"] == "generation is paused until POST /resume"
    ask(engine, "sleep", level=1)
    both = "generation is paused until POST /resume; the engine is asleep until POST /wake_up"
    assert ask(engine, "state").result["reason"] == both
    ask(engine, "wake_up")
    ask(engine, "resume")
    assert ask(engine, "state").result["reason"] == failed


def test_the_log_has_a_line_for_each_change_of_weights_and_sleep(caplog: pytest.LogCaptureFixture) -> None:
    engine = busy()
    with caplog.at_level(logging.INFO, logger="tokserve"):
        update(engine, "w2", "two")
        ask(engine, "start_weight_update")
        ask(engine, "update_weights", update={"fault": "unknown tensor x"})
        ask(engine, "start_weight_update")
        ask(engine, "abort_weight_update")
        ask(engine, "sleep", level=1, mode="keep")
        ask(engine, "wake_up")
    lines = "\n".join(record.getMessage() for record in caplog.records)
    for part in (
        "weights of version two committed as epoch 1",
        "was rolled back: unknown tensor x",
        "was rolled back: the weight update was aborted",
        "asleep: kv_cache, scheduling, weights (mode keep)",
        "awake",
    ):
        assert lines.count(part) == 1, lines


@DEPTHS
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_a_commit_can_have_all_kv_computed_again(depth: int, drafts: bool, paused: bool) -> None:
    engine = busy(depth, requests=3)
    if drafts:
        engine.draft_with(RandomDrafter(engine.executor, random.Random(1).randrange(9)))
    engine.add("long", [*PROMPT, *PROMPT, 5], prompt_logprobs=1, max_tokens=6, ignore_eos=True)
    if paused:
        ask(engine, "pause", mode="keep")
    before = {rid: len(engine.tokens(rid)) for rid in ("r0", "r1", "r2")}
    ask(engine, "start_weight_update")
    ask(engine, "update_weights", update={"weights": "w2"})
    engine.weights_of["two"] = "w2"
    assert ask(engine, "finish_weight_update", weight_version="two", recompute_kv=True).error is None
    engine.executor.only_own_kv = True
    ask(engine, "resume")
    engine.run()
    for rid, count in before.items():
        engine.check_complete(rid)
        assert len(engine.tokens(rid)) > count
    engine.check_complete("long")


@DEPTHS
@pytest.mark.parametrize("drafts", [False, True])
def test_a_pause_can_take_the_kv_of_what_is_in_flight(depth: int, drafts: bool) -> None:
    """Then all weights that come before the end of the pause make it again, and requests hold no blocks meanwhile."""
    engine = busy(depth, requests=3)
    if drafts:
        engine.draft_with(RandomDrafter(engine.executor, random.Random(1).randrange(9)))
    engine.add("long", [*PROMPT, *PROMPT, 5], prompt_logprobs=1, max_tokens=6, ignore_eos=True)
    engine.step()
    before = {rid: len(engine.tokens(rid)) for rid in ("r0", "r1", "r2")}
    assert ask(engine, "pause", mode="retract").error is None
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 4, 0)
    update(engine, "w2")
    engine.executor.only_own_kv = True
    ask(engine, "resume")
    engine.run()
    for rid, count in before.items():
        engine.check_complete(rid)
        assert len(engine.tokens(rid)) > count
    engine.check_complete("long")


def test_without_recompute_kv_requests_read_kv_of_the_old_weights() -> None:
    engine = busy()
    update(engine, "w2")
    engine.executor.only_own_kv = True
    with pytest.raises(AssertionError, match="reads KV of the weights"):
        engine.run()


def test_prompt_logprobs_are_of_one_set_of_weights_if_kv_is_computed_again() -> None:
    engine = Engine(max_num_batched_tokens=5)
    engine.add("r", [*PROMPT, *PROMPT], prompt_logprobs=1, max_tokens=3, ignore_eos=True)
    engine.steps(2)  # ten of eighteen tokens
    engine.executor.directories["d"] = ("w2", "stamp")
    before = engine.executor.computed["r"]
    engine.weights_of["two"] = "w2"
    ask(engine, "update_weights_from_dir", weight_dir="d", weight_version="two", recompute_kv=True)
    (request,) = engine.core.intake.live
    assert request.output.next_prompt_row <= 6  # from the begin
    engine.executor.only_own_kv = True
    engine.run()
    engine.check_complete("r")
    assert engine.executor.computed["r"] >= before + 18


def test_a_call_that_names_an_update_touches_no_other_one() -> None:
    engine = busy()
    old = ask(engine, "start_weight_update").result["update_id"]
    new = ask(engine, "start_weight_update", take_over=True).result["update_id"]
    assert old != new
    for method, args in (
        ("abort_weight_update", {}),
        ("finish_weight_update", {}),
        ("begin_weight_stream", {"stream": "s"}),
        ("update_weights", {"update": {"weights": "w0"}}),
    ):
        reply = ask(engine, method, update_id=old, **args)
        assert (reply.status, reply.field) == (409, "update_id") and "another client took over" in str(reply.error)
    assert ask(engine, "update_weights", update={"weights": "w2"}, update_id=new).error is None
    assert ask(engine, "finish_weight_update", update_id=new).error is None
    engine.weights_of["1"] = "w2"
    engine.run()
    engine.check_complete("r0")
