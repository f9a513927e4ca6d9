"""Trials in a real process: limits, lanes, turns, cancelled work, and a process that dies."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.waiting import until
from tokserve.base.errors import RequestError, Unavailable
from tokserve.checkpoint import DEMO_DIR
from tokserve.features.grammar import trials as module
from tokserve.features.grammar.grammar import NICENESS, Cost
from tokserve.features.grammar.trials import Trial, Trials
from tokserve.protocol.params import StructuredOutputs

WIDTH = 300
BOMB = "start: T\nT: " + " & ".join(f"/[ab]*a[ab]{{{i}}}/" for i in range(600))  # gigabytes, minutes
PATIENCE = 60.0


@pytest.fixture
def trials() -> Iterator[Trials]:
    running = Trials(str(DEMO_DIR), WIDTH)
    yield running
    running.close()


def words(seed: int) -> list[str]:
    """Choices of some MiB, when compiled."""
    chance = random.Random(seed)
    return [f"{chance.getrandbits(32):08x}" for _ in range(5000)]


class Tried:
    """A trial and its outcome."""

    def __init__(self, trials: Trials, client: str = "", log: list[str] | None = None, **form: Any) -> None:
        self.outcome: Future[Cost | RequestError] = Future()
        self.form = form
        self._log = log
        self.trial = Trial(StructuredOutputs(**form), client, self._done)
        trials.submit(self.trial)

    def _done(self, outcome: Cost | RequestError) -> None:
        if self._log is not None:
            self._log.append(next(iter(self.form.values())))
        self.outcome.set_result(outcome)

    @property
    def result(self) -> Cost | RequestError:
        return self.outcome.result(PATIENCE)


def costly(trials: Trials, number: int = 0, client: str = "") -> Tried:
    return Tried(trials, client, grammar=f"{BOMB}\n// {number}")


def children(trials: Trials) -> list[psutil.Process]:
    return [] if trials.pid is None else psutil.Process(trials.pid).children()


@contextmanager
def stopped(trials: Trials) -> Iterator[None]:
    """The process of the trials gets no processor."""
    assert trials.pid is not None
    os.kill(trials.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(trials.pid, signal.SIGCONT)


def test_no_process_and_no_thread_before_the_first_grammar(trials: Trials) -> None:
    assert trials.pid is None and trials._thread is None


def test_costs_and_refusals(trials: Trials) -> None:
    good, bad = Tried(trials, regex="ab+").result, Tried(trials, regex="(").result
    assert isinstance(good, Cost) and good.size > 0 and good.seconds > 0
    assert isinstance(bad, RequestError) and bad.field == "structured_outputs.regex" and "unclosed" in bad.message


def test_a_trial_measures_the_memory(trials: Trials) -> None:
    many, few = Tried(trials, choice=words(0)).result, Tried(trials, regex="a").result
    assert isinstance(many, Cost) and isinstance(few, Cost)
    assert few.size < 1 << 20 < many.size


def test_the_process_has_one_thread_so_it_may_fork(trials: Trials) -> None:
    Tried(trials, regex="a").outcome.result(PATIENCE)
    assert trials.pid is not None and psutil.Process(trials.pid).num_threads() == 1


def test_the_process_shares_this_session_so_its_priority_counts(trials: Trials) -> None:
    """Linux gives sessions equal shares of the processors, whatever the priorities in them (sched(7), autogroup)."""
    Tried(trials, regex="a").outcome.result(PATIENCE)
    assert trials.pid is not None
    assert os.getsid(trials.pid) == os.getsid(0)
    assert os.getpgid(trials.pid) == trials.pid, "a signal from the terminal would end it"
    assert psutil.Process(trials.pid).nice() == NICENESS


@pytest.mark.slow
def test_a_costly_grammar_is_refused_and_its_trial_ends(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.5)
    refusal = costly(trials).result
    assert isinstance(refusal, RequestError) and "compiling it takes more than 0.5 s" in refusal.message
    assert refusal.field == "structured_outputs.grammar"
    monkeypatch.setattr(module, "SECONDS", PATIENCE)
    assert isinstance(Tried(trials, regex="after").result, Cost)
    until(lambda: not children(trials))


def test_a_trial_that_waits_for_a_processor_is_not_refused(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    Tried(trials, regex="started").outcome.result(PATIENCE)
    monkeypatch.setattr(module, "SECONDS", 1.0)
    with stopped(trials):
        waiting = Tried(trials, regex="waiting")
        time.sleep(1.2)
        assert not waiting.outcome.done()
    assert isinstance(waiting.result, Cost)
    monkeypatch.setattr(module, "LONGEST", 0.1)
    with stopped(trials):
        refusal = Tried(trials, regex="stuck").result
        assert isinstance(refusal, Unavailable) and "no processor was free" in refusal.message


@pytest.mark.slow
def test_memory_is_limited(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", PATIENCE)  # memory ends it
    refusal = costly(trials).result
    assert isinstance(refusal, RequestError) and "1 GiB" in refusal.message


@pytest.mark.slow
def test_a_cheap_grammar_does_not_wait_for_costly_ones(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", PATIENCE)
    bombs = [costly(trials, i, "greedy") for i in range(20)]
    assert isinstance(Tried(trials, "greedy", regex="cheap").result, Cost)
    assert isinstance(Tried(trials, "modest", regex="x" * 2000).result, Cost)
    assert sum(bomb.outcome.done() for bomb in bombs) <= 4, "those that had begun may have ended by their memory"
    assert len(children(trials)) <= 2


def test_a_cancelled_trial_is_killed_and_a_waiting_one_never_runs(trials: Trials) -> None:
    bombs = [costly(trials, i) for i in range(5)]
    until(lambda: children(trials))
    for bomb in bombs:
        trials.cancel(bomb.trial)
    assert isinstance(Tried(trials, regex="cheap").result, Cost)
    until(lambda: not children(trials))
    assert not trials._running and not trials._quick and not trials._slow
    assert not any(bomb.outcome.done() for bomb in bombs)


def test_clients_take_turns(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", PATIENCE)
    log: list[str] = []
    first = costly(trials)
    until(lambda: children(trials))  # the rest wait for its end
    many = [Tried(trials, "a", log, regex=f"a{i}") for i in range(3)]
    one = Tried(trials, "b", log, regex="b")
    trials.cancel(first.trial)
    for trial in (*many, one):
        assert isinstance(trial.result, Cost)
    assert log == ["a0", "b", "a1", "a2"]


def test_a_process_that_is_killed_is_replaced_and_its_trials_run_again(trials: Trials) -> None:
    Tried(trials, regex="three").outcome.result(PATIENCE)
    assert trials.pid is not None
    psutil.Process(trials.pid).kill()
    assert isinstance(Tried(trials, regex="four").result, Cost)


def test_a_trial_that_ends_the_process_twice_is_refused(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "command", [trials.command[0], "-c", "print('{}', flush=True); input()"])
    refusal = Tried(trials, regex="two").result
    assert isinstance(refusal, RequestError) and "the compiler fails on it" in refusal.message


FAULTS = {
    "while True: pass": "takes more than 0.2 s of a processor",
    "raise MemoryError": "compiling it takes more than 1 GiB",
    "os.kill(os.getpid(), signal.SIGKILL)": "compiling it takes more than 1 GiB",
    "os.abort()": "the compiler breaks off: it needs more than 1 GiB, or fails on this grammar",
    "ctypes.string_at(0)": r"the compiler fails on it \(SIGSEGV\)",
    "os._exit(3)": r"the compiler fails on it \(exit code 3\)",
    "raise BaseException('a panic')": r"the compiler fails on it \(BaseException: a panic\)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refusal_says_how_the_trial_ended(trials: Trials, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    program = f"""import ctypes, os, signal
from tokserve.features.grammar import trial_process
def try_out(self, grammar):
    if grammar.regex == "fails":
        {fault}
    return Cost()
from tokserve.features.grammar.grammar import Cost
trial_process.Compiler.try_out = try_out
trial_process.main()"""
    monkeypatch.setattr(module, "SECONDS", 0.2)
    monkeypatch.setattr(trials, "command", [trials.command[0], "-c", program, trials.command[3]])
    refusal = Tried(trials, regex="fails").result
    assert isinstance(refusal, RequestError) and re.search(FAULTS[fault], refusal.message), refusal
    assert refusal.field == "structured_outputs.regex"
    assert isinstance(Tried(trials, regex="other").result, Cost)


def test_a_trial_process_that_does_not_start_is_a_server_error(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "command", [trials.command[0], "-c", ""])
    assert isinstance(Tried(trials, regex="two").result, Unavailable)


def test_a_process_that_the_system_does_not_start_may_start_later(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = trials.command
    monkeypatch.setattr(trials, "command", ["/no/such/program"])
    assert isinstance(Tried(trials, regex="two").result, Unavailable)
    monkeypatch.setattr(trials, "command", command)
    assert isinstance(Tried(trials, regex="two").result, Cost)


def test_close_refuses_what_waits_and_leaves_no_process() -> None:
    trials = Trials(str(DEMO_DIR), WIDTH)
    bombs = [costly(trials, i) for i in range(3)]
    until(lambda: children(trials))
    assert trials.pid is not None
    process = psutil.Process(trials.pid)
    left = children(trials)
    trials.close()
    assert all(isinstance(bomb.result, Unavailable) for bomb in bombs)
    until(lambda: not process.is_running() and not any(child.is_running() for child in left))
    assert not any(thread.name == "trials" for thread in threading.enumerate())
