"""Requests that wait for their grammar, and requests with a compiled grammar, in an engine without a model."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest

from tests.engine.grammars import STEPS, Machine, compiled
from tests.engine.harness import Engine
from tests.engine.solo import EOS, VOCAB
from tokserve.base.errors import QueueFull, RequestError
from tokserve.features.grammar.engine import GrammarFeature
from tokserve.features.grammar.grammar import Grammar
from tokserve.protocol.messages import StepOutput, Submit, SubmitReply
from tokserve.protocol.params import StructuredOutputs
from tokserve.protocol.plan import WITHHELD

LONG = 60.0  # seconds
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


class Grammars:
    """Compiles when it is told to."""

    machine = Machine
    num_bytes = num_compiling = num_refused = 0

    def forget(self, grammar: Grammar) -> None:
        pass

    def close(self) -> None:
        pass

    def __init__(self) -> None:
        self.futures: list[Future[Grammar]] = []

    def compile(self, outputs: StructuredOutputs, client: str = "") -> Future[Grammar]:
        self.futures.append(Future())
        return self.futures[-1]

    def finish(self) -> None:
        for future in self.futures:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_result(compiled(self.machine()))


ENGINES: list[Engine] = []
EVENTS: list[threading.Event] = []  # that masks wait for


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No engine's threads outlive its test."""
    yield
    for event in EVENTS:
        event.set()
    EVENTS.clear()
    while ENGINES:
        ENGINES.pop().core.close()


def make_engine(**options: Any) -> tuple[Engine, Grammars]:
    """An engine whose masks are computed by threads, which it waits for as long as they take."""
    engine, grammars = Engine(**options), Grammars()
    ENGINES.append(engine)
    engine.feature(GrammarFeature).grammars = cast(Any, grammars)
    masks = engine.feature(GrammarFeature).masks
    masks.patience, masks.slow_after, masks.resting_until = LONG, math.inf, math.inf
    return engine, grammars


def send(engine: Engine, *rids: str, call_id: int = 9, **fields: Any) -> None:
    fields["structured_outputs"] = StructuredOutputs(regex="x")
    adds = [engine.make(rid, [call_id % VOCAB, 4, 5], **fields) for rid in rids]
    engine.core.receive(b"A", Submit(call_id, rids[0], adds))


def replies(engine: Engine) -> list[SubmitReply]:
    return [message for _, message in engine.messages if isinstance(message, SubmitReply)]


def detail(engine: Engine, rid: str) -> str:
    finish = engine.received[rid].finish
    assert finish is not None
    return finish.detail


@DEPTHS
def test_a_request_waits_for_its_grammar_and_others_run_on(depth: int) -> None:
    engine, grammars = make_engine(depth=depth)
    send(engine, "g")
    engine.add("a", [6, 7], max_tokens=4, ignore_eos=True)
    engine.run()
    engine.check_complete("a")
    assert replies(engine) == [SubmitReply(7)] and "g" not in engine.received
    assert not engine.step() and not engine.wakes, "nothing is to be done before the grammar is there"
    grammars.finish()
    assert engine.wakes
    engine.run()
    assert replies(engine) == [SubmitReply(7), SubmitReply(9)]
    first, second, *_ = engine.tokens("g")
    assert first in STEPS[0] and second == 5
    engine.check_empty()


def test_the_reply_waits_for_all_grammars_of_a_submission() -> None:
    engine, grammars = make_engine()
    send(engine, "g", "h")
    grammars.futures[0].set_result(compiled(Machine()))
    engine.run()
    assert not replies(engine) and not engine.received
    grammars.finish()
    engine.run()
    assert replies(engine) == [SubmitReply(9)] and engine.tokens("g") and engine.tokens("h")
    engine.check_empty()


@DEPTHS
def test_outputs_follow_their_grammars_in_a_batch(depth: int) -> None:
    engine, grammars = make_engine(depth=depth, max_num_batched_tokens=8)  # prompts are cut
    rids = [f"g{i}" for i in range(6)]
    for i, rid in enumerate(rids):
        send(engine, rid, seed=i, call_id=20 + i)
        engine.add(f"a{i}", [6, 7, i], max_tokens=9, ignore_eos=True)
    grammars.finish()
    engine.run()
    ends = set()
    for rid in rids:
        tokens = engine.tokens(rid)
        assert all(token in may for token, may in zip(tokens, [*STEPS, set(EOS)], strict=False))
        assert (detail(engine, rid), len(tokens)) == (("grammar_limit", 3) if tokens[2] == 16 else ("eos", 4))
        ends.add(detail(engine, rid))
    for i in range(6):
        engine.check_complete(f"a{i}")
    assert ends == {"eos", "grammar_limit"}, "the seeds show only one of the two ends"
    engine.check_empty()


@DEPTHS
def test_a_preempted_request_keeps_its_place(depth: int) -> None:
    def run(**options: Any) -> list[list[int]]:
        engine, grammars = make_engine(depth=depth, **options)
        for i in range(4):
            send(engine, f"g{i}", seed=i, call_id=20 + i)
        grammars.finish()
        engine.run()
        seen.append(engine.stats.preemptions)
        engine.check_empty()
        return [engine.tokens(f"g{i}") for i in range(4)]

    seen: list[int] = []
    assert run(num_blocks=64) == run(num_blocks=8, block_size=1)
    assert seen[0] == 0 < seen[1]


@pytest.mark.parametrize(
    "barrier",
    [
        {"ignore_eos": True},
        {"min_tokens": 8},
        {"bad_token_ids": list(EOS)},
        {"bad_token_sequences": [[t] for t in EOS]},
        {"allowed_token_ids": [3, 5, 6, 13, 16]},
    ],
)
@DEPTHS
def test_a_complete_text_that_no_eos_may_follow_ends_the_output(depth: int, barrier: dict[str, Any]) -> None:
    engine, grammars = make_engine(depth=depth)
    for seed in range(6):
        send(engine, f"g{seed}", seed=seed, call_id=20 + seed, **barrier)
    grammars.finish()
    engine.run()
    ends = {(detail(engine, f"g{i}"), len(engine.tokens(f"g{i}")), engine.tokens(f"g{i}")[2]) for i in range(6)}
    assert ends <= {("grammar", 3, 6), ("grammar_limit", 3, 16)} and ("grammar", 3, 6) in ends
    engine.check_empty()


@pytest.mark.parametrize("known", [True, False])
def test_a_grammar_that_cannot_be_used_is_a_refusal(known: bool) -> None:
    engine, grammars = make_engine()
    send(engine, "g", "h")
    error = RequestError("no such thing", field="structured_outputs.regex") if known else MemoryError("much")
    for future in grammars.futures:
        future.set_exception(error)
    engine.run()
    kind, field = ("invalid", "structured_outputs.regex") if known else ("internal", "")
    (reply,) = replies(engine)
    assert (reply.call_id, reply.refusal, reply.field) == (9, kind, field)
    assert "g" not in engine.received and not list(engine.core.intake.live)
    engine.check_empty()
    engine.add("g", [3, 4], max_tokens=2)  # the id is free again
    engine.run()


def test_an_abort_while_compiling_is_accepted_first() -> None:
    engine, grammars = make_engine()
    send(engine, "g", "h")
    engine.abort("g", call_id=None)
    messages = [
        m for _, m in engine.messages if isinstance(m, SubmitReply) or (isinstance(m, StepOutput) and m.request_ids)
    ]
    assert messages[0] == SubmitReply(9) and isinstance(messages[1], StepOutput)
    assert detail(engine, "g") == "abort_user"
    assert grammars.futures[0].cancelled()
    grammars.futures[1].set_exception(RequestError("no such thing", field="structured_outputs.regex"))
    engine.run()
    assert replies(engine) == [SubmitReply(9)], "it was accepted, so what fails later fails alone"
    finish = engine.received["h"].finish
    assert finish is not None and (finish.reason, finish.message) == ("error", "no such thing")
    engine.check_empty()


def test_a_deadline_does_not_wait_for_a_grammar() -> None:
    engine, grammars = make_engine()
    send(engine, "g", deadline_ms=5)
    engine.clock.now += 1.0
    engine.run()
    assert replies(engine) == [SubmitReply(9)] and detail(engine, "g") == "deadline"
    grammars.finish()
    engine.run()
    engine.check_empty()


def test_an_id_is_taken_while_its_grammar_is_compiled() -> None:
    engine, grammars = make_engine()
    send(engine, "g")
    send(engine, "g", call_id=10)
    assert [(v.call_id, v.refusal) for v in replies(engine)] == [(10, "duplicate_id")]
    grammars.finish()
    engine.run()
    assert replies(engine)[-1] == SubmitReply(9)


class Stuck(Machine):
    """A machine whose mask after two tokens waits for the test."""

    def __init__(self, tokens: tuple[int, ...] = (), reached: Any = None, free: Any = None) -> None:
        super().__init__(tokens)
        self.reached, self.free = reached or threading.Event(), free or threading.Event()
        EVENTS.append(self.free)

    def deep_copy(self) -> Machine:
        return Stuck(self.tokens, self.reached, self.free)

    def compute_bitmask(self) -> bytes:
        if len(self.tokens) == 2:
            self.reached.set()
            assert self.free.wait(LONG)
        return super().compute_bitmask()


def stuck(**options: Any) -> tuple[Engine, Stuck, threading.Event]:
    """An engine whose request "g" waits for a mask, the machine that delays it, and the event "a mask is done"."""
    engine, grammars = make_engine(**options)
    machine, mask_done = Stuck(), threading.Event()
    engine.feature(GrammarFeature).masks._wake = mask_done.set
    grammars.machine = lambda: machine  # type: ignore[assignment]
    send(engine, "g", seed=5)
    grammars.finish()
    engine.feature(GrammarFeature).masks.patience = 0.0
    while not machine.reached.is_set():
        if not engine.step():
            machine.reached.wait(0.001)  # or a mask is there, which only a step finds out
    return engine, machine, mask_done


@DEPTHS
def test_a_slow_mask_delays_no_other_request(depth: int) -> None:
    engine, machine, mask_done = stuck(depth=depth)
    engine.add("a", [6, 7], max_tokens=9, ignore_eos=True)
    engine.run()
    engine.check_complete("a")
    assert len(engine.tokens("g")) == 2 and engine.received["g"].finish is None
    mask_done.clear()
    machine.free.set()
    while engine.received["g"].finish is None:
        if not engine.step():
            assert mask_done.wait(LONG)
            mask_done.clear()
    quick, grammars = make_engine(depth=depth)
    send(quick, "g", seed=5)
    grammars.finish()
    quick.run()
    assert quick.tokens("g") == engine.tokens("g") and quick.received["g"].finish is not None
    engine.run()
    engine.check_empty()


@DEPTHS
def test_others_that_follow_grammars_do_not_wait_for_a_slow_one(depth: int) -> None:
    engine, machine, _ = stuck(depth=depth)
    engine.feature(GrammarFeature).masks.patience = LONG
    for i in range(3):
        future: Future[Grammar] = Future()
        future.set_result(compiled(Machine()))
        engine.feature(GrammarFeature).grammars.compile = lambda *_, future=future: future  # type: ignore[method-assign, misc]
        send(engine, f"h{i}", seed=i, call_id=30 + i)
    engine.run()
    assert all(engine.received[f"h{i}"].finish is not None for i in range(3))
    assert engine.received["g"].finish is None
    machine.free.set()


@DEPTHS
def test_an_abort_does_not_wait_for_a_mask(depth: int) -> None:
    engine, machine, mask_done = stuck(depth=depth)
    engine.abort("g")
    engine.run()
    assert detail(engine, "g") == "abort_user"
    engine.check_empty()
    mask_done.clear()
    machine.free.set()
    assert mask_done.wait(LONG)
    engine.run()
    assert not engine.feature(GrammarFeature).masks
    engine.check_empty()


def test_a_grammar_that_others_have_exhausted_ends_a_request_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Exhausted(Machine):
        def is_error(self) -> bool:
            return True

    engine, grammars = make_engine()
    grammars.machine = Exhausted
    forgotten: list[Grammar] = []
    monkeypatch.setattr(engine.feature(GrammarFeature).grammars, "forget", forgotten.append)
    send(engine, "g", "h")
    engine.add("a", [6, 7], max_tokens=4, ignore_eos=True)
    grammars.finish()
    engine.run()
    assert forgotten == [future.result() for future in grammars.futures]  # else they would fail the next requests
    for rid in "gh":
        finish = engine.received[rid].finish
        assert finish is not None and (finish.reason, finish.detail) == ("error", "grammar_limit")
        assert "too complex" in (finish.message or "")
    engine.check_complete("a")
    engine.check_empty()


@pytest.mark.parametrize(("good", "resting_until"), [(0, math.inf), (2, math.inf), (2, 0.0)])
def test_an_unexpected_error_ends_only_its_request(good: int, resting_until: float) -> None:
    """The error is raised in a thread, or (from a request's second mask on) in the loop."""
    computed: list[None] = []

    class Broken(Machine):
        def compute_bitmask(self) -> bytes:
            computed.append(None)
            if len(computed) > good:
                raise ZeroDivisionError
            return super().compute_bitmask()

    engine, grammars = make_engine()
    engine.feature(GrammarFeature).masks.resting_until = resting_until
    grammars.machine = Broken
    send(engine, "g")
    grammars.finish()
    engine.run()
    finish = engine.received["g"].finish
    assert finish is not None and "mask could not be computed" in (finish.message or "")
    assert len(engine.tokens("g")) == good
    grammars.machine = Machine
    send(engine, "h")
    grammars.finish()
    engine.run()
    assert len(engine.tokens("h")) >= 3
    engine.check_empty()


# --- depth 2: masks while the forward pass runs ---


def statuses(engine: Engine) -> list[int]:
    return [status for result in engine.executor.results for status in result.status.tolist()]


def test_one_grammar_does_not_turn_depth_two_into_depth_one() -> None:
    engine, grammars = make_engine(depth=2)
    for i in range(3):
        engine.add(f"a{i}", [6, 7, i], max_tokens=12, ignore_eos=True)
    engine.step()
    send(engine, "g", seed=5)
    grammars.finish()
    engine.run()
    plans = [set(plan.slots.tolist()) for plan in engine.executor.plans]
    (slot,) = {row.slot for plan in engine.executor.plans for row in plan.new if row.request_id == "g"}
    with_grammar = [step for step, slots in enumerate(plans) if slot in slots]
    assert len(with_grammar) >= 4 and {engine.executor.depths[step] for step in with_grammar} == {2}
    assert set(engine.executor.depths[1:]) == {2}, "some step began only when none was in flight"
    assert max(len(engine.received[f"a{i}"].outputs) for i in range(3)) == 12 == len(plans)
    for i in range(3):
        engine.check_complete(f"a{i}")
    engine.check_empty()


def test_a_grammar_that_runs_alone_is_sampled_at_once() -> None:
    engine, grammars = make_engine(depth=2)
    send(engine, "g", seed=5)
    grammars.finish()
    engine.step()
    assert engine.executor.unsampled is None and len(engine.executor.results) == 1
    engine.run()
    assert engine.received["g"].finish is not None
    engine.check_empty()


def test_a_late_mask_withholds_its_row_and_its_position_is_computed_again() -> None:
    engine, machine, mask_done = stuck(
        depth=2
    )  # its row is planned when its second token comes, and the mask is not there
    engine.add("a", [6, 7], max_tokens=9, ignore_eos=True)
    engine.steps(5)
    assert len(engine.tokens("a")) >= 3
    withheld = statuses(engine).count(WITHHELD)  # the mask after its first token may be late as well
    assert withheld in (1, 2) and len(engine.tokens("g")) == 2
    computed = engine.executor.computed["g"]
    mask_done.clear()
    engine.feature(GrammarFeature).masks.patience = LONG
    machine.free.set()
    while engine.received["g"].finish is None:
        if not engine.step():
            assert mask_done.wait(LONG)
            mask_done.clear()
    engine.run()
    # on a busy machine later masks are late: a row is withheld once a token, and its end may find one in flight
    assert statuses(engine).count(WITHHELD) <= len(engine.tokens("g")) + 1
    starts = [
        int(plan.num_computed[i])
        for plan in engine.executor.plans
        for i, slot in enumerate(plan.slots.tolist())
        if slot == 0
    ]
    assert starts.count(4) == 2, "position 4 holds its second token"
    assert engine.executor.computed["g"] > computed
    engine.check_complete("a")
    engine.check_empty()


def test_a_slow_mask_delays_no_step_of_others_at_depth_two() -> None:
    """While it is computed, every turn brings each of the others a token."""
    engine, machine, _ = stuck(depth=2)
    for i in range(3):
        engine.add(f"a{i}", [6, 7, i], max_tokens=30, ignore_eos=True)
    engine.steps(3)
    for _ in range(10):
        before = [len(engine.tokens(f"a{i}")) for i in range(3)]
        engine.step()
        assert [len(engine.tokens(f"a{i}")) for i in range(3)] == [count + 1 for count in before]
        assert len(engine.executor.in_flight) == 1 and engine.executor.depths[-1] == 2
    assert not machine.free.is_set() and len(engine.tokens("g")) == 2
    machine.free.set()
    engine.abort("g")
    engine.run()
    for i in range(3):
        engine.check_complete(f"a{i}")
    engine.check_empty()


@pytest.mark.parametrize("end", ["grammar", "abort"])
def test_a_row_in_flight_of_a_request_that_has_ended_is_withheld(end: str) -> None:
    engine, grammars = make_engine(depth=2)
    engine.add("a", [6, 7], max_tokens=9, ignore_eos=True)
    engine.step()
    send(engine, "g", seed=5, ignore_eos=True)  # no EOS may follow its text of three tokens
    grammars.finish()
    while "g" not in engine.received or len(engine.tokens("g")) < 2:
        engine.step()
    if end == "abort":
        engine.abort("g")
    engine.run()
    assert detail(engine, "g") == {"grammar": "grammar", "abort": "abort_user"}[end]
    assert statuses(engine).count(WITHHELD) == (end == "grammar")
    engine.check_complete("a")
    engine.check_empty()


def test_vocabulary_fits_a_word() -> None:
    assert VOCAB <= 32, "the machine above says its mask in one word"


def test_an_abort_cancels_the_grammar_of_its_request_only() -> None:
    engine, grammars = make_engine()
    send(engine, "g", "h")
    send(engine, "i", call_id=10)
    engine.abort("g", "h", call_id=None)
    assert [future.cancelled() for future in grammars.futures] == [True, True, False]
    grammars.finish()
    engine.run()
    assert engine.tokens("i") and detail(engine, "g") == detail(engine, "h") == "abort_user"
    engine.check_empty()


def test_a_deadline_cancels_the_grammar() -> None:
    engine, grammars = make_engine()
    send(engine, "g", deadline_ms=5)
    engine.clock.now += 1.0
    engine.run()
    assert grammars.futures[0].cancelled() and detail(engine, "g") == "deadline"
    engine.check_empty()


def test_one_choice_that_ends_does_not_hold_up_the_others() -> None:
    engine, grammars = make_engine()
    send(engine, "g", "h")
    engine.abort("g", call_id=None)
    grammars.finish()
    engine.run()
    assert detail(engine, "g") == "abort_user" and engine.tokens("h")
    engine.check_empty()


def test_grammars_that_take_all_memory_refuse_a_request_like_a_full_queue() -> None:
    engine, grammars = make_engine()
    send(engine, "g", "h")
    grammars.futures[0].set_exception(QueueFull("no room for grammars", retry_after=5))
    grammars.futures[1].set_exception(QueueFull("no room for grammars", retry_after=5))
    engine.run()
    assert replies(engine) == [SubmitReply(9, "queue_full", "no room for grammars", 5)]
    engine.check_empty()
