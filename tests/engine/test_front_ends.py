"""Messages to each front end: gauges while there is work and once at its end, and none after it has left."""

from __future__ import annotations

import pytest

from tests.engine.harness import Engine
from tokserve.engine.output import front_ends
from tokserve.protocol.messages import Reply, Status, StepOutput, StepStats, Submit

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def test_every_step_carries_statistics() -> None:
    engine = Engine(num_blocks=20)
    engine.add("a", list(range(10)), max_tokens=2, ignore_eos=True)
    engine.add("b", list(range(3, 10)), max_tokens=9, ignore_eos=True)
    engine.step()
    _, message = engine.messages[-1]
    assert isinstance(message, StepOutput)
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
    engine.add("a", [3], max_tokens=100, stream=False, ignore_eos=True)
    for _ in range(60):
        engine.clock.now += 0.1
        engine.step()
    for identity in (b"A", b"B"):
        messages = [m for i, m in engine.messages if i == identity and isinstance(m, StepOutput)]
        assert 9 <= len(messages) <= 12 and not any(m.request_ids for m in messages)
        assert messages[-1].stats.running == 1


@DEPTHS
def test_idle_statistics_are_sent_once_to_each_front_end(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.call("hello", owner=b"B")
    engine.add("a", [3], max_tokens=3, ignore_eos=True)
    engine.run()
    count = len(engine.messages)
    for identity in (b"A", b"B"):
        messages = [m for i, m in engine.messages if i == identity and isinstance(m, StepOutput)]
        assert messages[-1].stats == engine.stats
        assert (messages[-1].stats.running, messages[-1].stats.blocks_held) == (0, 0)
    if depth == 1:  # the owner's last output had the statistics
        assert sum(i == b"A" and isinstance(m, StepOutput) for i, m in engine.messages) == 3
    engine.clock.now += 9
    assert not engine.step()
    assert len(engine.messages) == count


@DEPTHS
def test_a_front_end_that_has_left_leaves_nothing(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=3)
    engine.add_choices("a")
    engine.add_choices("b", owner=b"B")
    engine.steps(3)
    engine.call("leave", front_end="B", call_id=4)
    assert engine.last_reply() == Reply(4, 2)
    count = len(engine.submit_replies)
    late = engine.make("late", [3], owner=b"B")
    engine.core.receive(b"B", Submit(9, "late", [late]))
    assert len(engine.submit_replies) == count, "what it said last came too late"
    before = len(engine.messages)
    engine.run()
    assert not [m for identity, m in engine.messages[before:] if identity == b"B"]
    engine.check_complete("a#0")
    engine.received.clear()
    engine.add_choices("b")
    engine.run()
    engine.check_complete("b#0")
    engine.check_empty()


def test_requested_stats_are_sent_before_the_reply() -> None:
    engine = Engine()
    engine.add("a", [3], max_tokens=9, stream=False, ignore_eos=True)
    engine.steps(2)
    engine.call("stats", call_id=3, owner=b"C")
    messages = [m for identity, m in engine.messages if identity == b"C"]
    assert messages == [StepOutput(engine.stats), Reply(3, {})] and isinstance(engine.stats, StepStats)
    assert engine.stats.output_tokens == 2


def test_the_number_of_known_front_ends_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_ends, "KEPT", 2)
    engine = Engine()
    engine.add("a", [3], max_tokens=2, ignore_eos=True, owner=b"0")
    for owner in (b"1", b"2", b"3"):
        engine.call("ping", owner=owner)
    engine.run()
    engine.check_complete("a")
    assert len(engine.core._front_ends) == 2
    engine.add("b", [3], max_tokens=1, owner=b"3")
    engine.run()
    assert b"1" not in {i for i, m in engine.messages if isinstance(m, StepOutput)}


def test_the_front_end_silent_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_ends, "KEPT", 2)
    engine = Engine()
    for owner in (b"1", b"2", b"1", b"3"):
        engine.call("ping", owner=owner)
    engine.call("pause", owner=b"3")
    assert {identity for identity, message in engine.messages if isinstance(message, Status)} == {b"1", b"3"}
