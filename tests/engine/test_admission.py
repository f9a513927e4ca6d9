"""What is accepted and what is refused: bad requests, keys in use, the limits of the queue."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.solo import VOCAB
from tokserve.engine import admission, intake
from tokserve.features.grammar.engine import GrammarFeature
from tokserve.protocol.messages import (
    PREEMPTIONS,
    STEP_TOKENS,
    Abort,
    Call,
    EngineRequest,
    Submit,
    SubmitReply,
)
from tokserve.protocol.params import StructuredOutputs

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@pytest.mark.parametrize(("prompt", "message"), [([5, VOCAB], "vocabulary"), ([5] * 64, "64 tokens")])
def test_a_request_that_cannot_be_served_is_refused_with_a_message(prompt: list[int], message: str) -> None:
    engine = Engine()
    submit_reply = engine.submit("bad", engine.make("bad#0", [3]), engine.make("bad#1", prompt))
    assert submit_reply.refusal == "invalid" and message in submit_reply.message
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

    form = StructuredOutputs(regex="a")
    for place, name, options in (
        (admission, "Request", {}),
        (engine.feature(GrammarFeature).grammars, "compile", {"structured_outputs": form}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, broken)
            submit_reply = engine.submit("bad", engine.make("bad", [3], **options))
        assert (submit_reply.refusal, submit_reply.message) == ("internal", "internal error at admission")
    engine.add("good", [3], max_tokens=2)
    engine.run()
    engine.check_complete("good")


def test_a_key_in_use_is_refused_to_everybody_and_free_again_after_its_end() -> None:
    engine = Engine()
    first = [engine.make(f"a#{i}", [3], max_tokens=3 + i, ignore_eos=True) for i in range(2)]
    assert engine.submit("a", *first) == SubmitReply(7)
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
    assert engine.submit("b", engine.make("a#1", [3])) == SubmitReply(7), "its end was told"
    assert engine.submit("c", engine.make("a#1", [3])).refusal == "duplicate_id"


def test_an_id_is_free_once_its_end_was_sent() -> None:
    engine = Engine(depth=2, eos_token_ids=list(range(VOCAB)))
    engine.add("a", [3], max_tokens=9)
    engine.steps(2)
    assert engine.received.pop("a").finish and engine.stats.blocks_held  # its surplus step is in flight
    engine.add("a", [4], max_tokens=9)
    engine.run()
    engine.check_complete("a")
    engine.check_empty()


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
    submit_reply = engine.submit_replies[-1]
    assert "4 requests would wait, and at most 3 may (--max-queued-requests)" in submit_reply.message
    assert submit_reply.retry_after == 1
    engine.abort("f")
    assert engine.last_reply().result == {"f": "not_found"}
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


def test_without_a_queue_only_free_slots_admit() -> None:
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
    assert "11 prompt tokens would wait, and at most 10 may (--max-queued-tokens)" in engine.submit_replies[-1].message
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
def test_a_preempted_request_is_not_counted_in_the_queue(depth: int) -> None:
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


def test_retry_after_follows_from_the_recent_rate() -> None:
    engine = Engine(max_num_seqs=1, max_queued_requests=2)
    for number in range(5):  # one leaves the queue every 3 seconds
        assert engine.submit(f"r{number}", engine.make(f"r{number}", [3], max_tokens=1)).refusal == ""
        engine.run()
        engine.clock.now += 3
    assert [waiting(engine, key, 4) for key in "abc"] == [""] * 3
    engine.step()
    assert waiting(engine, "d", 4) == "queue_full"
    assert engine.submit_replies[-1].retry_after == 3
    assert waiting(engine, "e", 4, 4) == "queue_full"
    assert engine.submit_replies[-1].retry_after == 6
    engine.clock.now += 1000
    assert waiting(engine, "e", 4, 4) == "queue_full"
    assert engine.submit_replies[-1].retry_after == 60


def large_submission(engine: Engine, monkeypatch: pytest.MonkeyPatch, *more: EngineRequest) -> list[EngineRequest]:
    """Submit ten requests, of which three are made between two steps, and `more`, while another request runs."""
    monkeypatch.setattr(admission, "SLICE", 3)
    engine.add("running", [3], max_tokens=30, ignore_eos=True)
    engine.step()
    requests = [engine.make(f"large#{i}", [4, i], max_tokens=2, ignore_eos=True) for i in range(10)]
    engine.core.receive(b"A", Submit(8, "large", [*requests, *more]))
    return requests


@DEPTHS
def test_a_large_submission_is_made_in_slices_and_accepted_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    engine = Engine(depth=depth)
    requests = large_submission(engine, monkeypatch)
    before = engine.core.scheduler.counters.output_tokens
    for _ in range(3):
        engine.step()
        assert engine.submit_replies[-1].call_id == 7, "it is accepted before all of it is made"
    assert engine.core.scheduler.counters.output_tokens > before, "the steps of others wait for it"
    assert engine.submit("large", engine.make("other", [3])).refusal == "duplicate_id"
    engine.add("small", [3], max_tokens=2)  # is not held up
    engine.run()
    assert SubmitReply(8) in engine.submit_replies
    for request in requests:
        engine.check_complete(request.request_id)
    engine.check_complete("small")
    engine.check_complete("running")


def test_a_large_submission_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    large_submission(engine, monkeypatch, engine.make("large#10", [5, VOCAB]))
    engine.run()
    assert (engine.submit_replies[-1].call_id, engine.submit_replies[-1].refusal) == (8, "invalid")
    assert set(engine.received) == {"running"}


def test_messages_about_a_large_submission_wait_until_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    requests = large_submission(engine, monkeypatch)
    engine.core.receive(b"A", Abort([request.request_id for request in requests[:9]]))
    engine.core.receive(b"A", Call(9, "abort", {"keys": ["large"]}))
    engine.run()
    assert SubmitReply(8) in engine.submit_replies
    assert engine.last_reply().result == {"large": "aborted"}
    assert all(engine.received[request.request_id].finish.reason == "abort" for request in requests)


def test_the_limits_hold_for_what_was_accepted_while_a_large_submission_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(max_queued_requests=12, max_num_seqs=1)
    large_submission(engine, monkeypatch)
    for i in range(3):
        engine.add(f"small{i}", [3], max_tokens=2)
    engine.run()
    assert (engine.submit_replies[-1].call_id, engine.submit_replies[-1].refusal) == (8, "queue_full")


@DEPTHS
def test_a_large_abort_is_made_in_slices_and_an_id_is_free_at_once(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """A client with thousands of choices leaves: others' steps do not wait for all of them to be ended."""
    engine = Engine(depth=depth)
    monkeypatch.setattr(intake, "SLICE", 3)
    engine.add("running", [3], max_tokens=30, ignore_eos=True)
    names = [f"large#{i}" for i in range(12)]
    assert not engine.submit(
        "large", *(engine.make(name, [4], max_tokens=20, ignore_eos=True) for name in names)
    ).refusal

    def ended() -> int:
        return sum(name in engine.received and engine.received[name].finish is not None for name in names)

    engine.core.receive(b"A", Abort(names))
    assert ended() == 3
    before = engine.core.scheduler.counters.output_tokens
    engine.step()
    engine.step()
    assert 3 < ended() < 12 and engine.core.scheduler.counters.output_tokens > before
    assert not engine.submit("large", engine.make("again", [5], max_tokens=2)).refusal
    assert ended() >= 11, "what is left of the aborted is ended first"
    engine.run()
    engine.check_complete("running")


@DEPTHS
def test_steps_and_ended_requests_are_counted_by_size(depth: int) -> None:
    """peer-suites-3 A22: as many steps and requests as there were, with all their tokens and preemptions."""
    engine = Engine(num_blocks=8, context=32, depth=depth, max_num_seqs=2)
    for key in "ab":
        assert waiting(engine, key, 6) == ""
    while engine.stats.preemptions == 0:
        engine.step()
    assert sum(engine.stats.preemptions_by_request) == 0, "none has ended"
    engine.run()
    stats = engine.stats
    *ended, preemptions = stats.preemptions_by_request
    assert sum(ended) == 2 and preemptions == stats.preemptions and len(ended) == len(PREEMPTIONS) + 1
    *steps, tokens = stats.tokens_by_step
    assert sum(steps) == stats.steps and len(steps) == len(STEP_TOKENS) + 1
    assert tokens >= stats.prompt_tokens + stats.output_tokens - 2, "the last tokens are not computed again"
