"""The queue of grammar trials: at most two run, a new one and one that takes long.

A grammar may cost nearly nothing or more than there is, and its text does not tell.  So each gets a first slice of
time in the quick lane; a trial that needs more goes on in the slow lane, or starts again there when the one before it
has ended.  What a grammar may cost is limited in time of a processor: a busy machine refuses none for it.  In both
lanes clients take turns, and a client's short texts come before its long ones.  A thread runs the trials in a process
(`trial_process`), which starts with the first trial.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from tokserve.base.errors import RequestError, Unavailable
from tokserve.base.turns import Turns
from tokserve.features.grammar.grammar import Cost, unusable
from tokserve.features.grammar.trial_process import MAX_MEMORY, MEMORY, READY, TIME, Model, Result, Start, StopTrial
from tokserve.protocol.params import StructuredOutputs

logger = logging.getLogger(__name__)

SECONDS = 5.0  # of a processor, to compile a grammar
SLICE = 0.25  # seconds in the quick lane
LONGEST = 60.0  # seconds in the slow lane, where processors are busy
START_SECONDS = 60.0  # of the process
SHORT = 1024  # bytes of a short text
LIVES = 2  # of a trial: how often the process may end while it runs
PROGRAM = """import os
os.putenv("OPENBLAS_NUM_THREADS", "1")  # its threads would be in the way of a fork
from tokserve.features.grammar.trial_process import main
main()"""


@dataclass(eq=False)
class Trial:
    """A grammar that waits for its trial, or is being tried.  `done` is called once, in the thread of the trials, with
    the cost, the error that this grammar always gives, or `Unavailable`; not if the trial is cancelled first."""

    grammar: StructuredOutputs
    client: str
    done: Callable[[Cost | RequestError], None]
    number: int = field(default_factory=itertools.count(1).__next__)
    slow: bool = False  # it needs more than a slice
    lives: int = LIVES
    began: float = 0.0


class Trials:
    """`submit`, `cancel` and `close` may be called in any thread."""

    def __init__(self, tokenizer: str | None, vocab_size: int) -> None:
        model = msgspec.json.encode(Model(tokenizer, vocab_size)).decode()
        self.command = [sys.executable, "-c", PROGRAM, model]
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._quick: Turns[Trial] = Turns()
        self._slow: Turns[Trial] = Turns()
        self._running: dict[bool, Trial] = {}  # by lane: slow or not
        self._calls: deque[Callable[[], None]] = deque()
        self._closed = False
        self._wakes = self._wake = -1  # the ends of a pipe
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process, if it has started."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, trial: Trial) -> None:
        """Have a grammar compiled in the trial process."""
        if self._closed:
            return trial.done(Unavailable("the server is shutting down"))
        if self._thread is None:
            self._wakes, self._wake = os.pipe()
            self._thread = threading.Thread(target=self._run, name="trials", daemon=True)
            self._thread.start()
        self._call(lambda: self._enter(trial))

    def cancel(self, trial: Trial) -> None:
        """Its result is not needed any more."""
        if not self._closed:
            self._call(lambda: self._cancel(trial))

    def close(self) -> None:
        """End the process and the thread; trials that have not ended are refused."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # if the thread waits for its start
        if self._thread is not None:
            self._call(lambda: None)
            self._thread.join()
            os.close(self._wakes)
            os.close(self._wake)

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        os.write(self._wake, b"\0")

    # --- the thread ---

    def _run(self) -> None:
        while not self._closed:
            sources = [self._wakes]
            if self._process is not None and self._process.stdout is not None:
                sources.append(self._process.stdout.fileno())
            ready, _, _ = select.select(sources, [], [], self._patience())
            if self._wakes in ready:
                os.read(self._wakes, 4096)
                while self._calls:
                    self._calls.popleft()()
            if len(ready) > (self._wakes in ready):
                self._receive()
            self._limit_time()
            self._begin()
        self._end_process()
        waiting = [*self._running.values()]
        for turns in (self._quick, self._slow):
            while turns:
                waiting.append(turns.next())
        for trial in waiting:
            trial.done(Unavailable("the server is shutting down"))

    def _enter(self, trial: Trial) -> None:
        size = len(msgspec.json.encode(trial.grammar))
        self._quick.add(trial.client, trial, priority=int(size > SHORT))

    def _cancel(self, trial: Trial) -> None:
        self._quick.remove(trial)
        self._slow.remove(trial)
        if trial in self._running.values():
            self._stop(trial)

    def _patience(self) -> float | None:
        """Seconds until a trial has used up its time."""
        ends = [trial.began + (LONGEST if slow else SLICE) for slow, trial in self._running.items()]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _limit_time(self) -> None:
        now = time.monotonic()
        slow = self._running.get(True)
        if slow is not None and now >= slow.began + LONGEST:
            self._stop(slow)
            slow.done(Unavailable(f"no processor was free to compile the grammar within {LONGEST:g} s; send it again"))
        quick = self._running.get(False)
        if quick is not None and now >= quick.began + SLICE:
            quick.slow = True
            if True not in self._running and not self._slow:
                self._running[True] = self._running.pop(False)
            else:
                self._stop(quick)
                self._slow.add(quick.client, quick)

    def _begin(self) -> None:
        """Start the next trial of each lane that is free."""
        for slow, turns in ((False, self._quick), (True, self._slow)):
            while turns and slow not in self._running and not self._closed:
                trial = turns.next()
                if not self._started():
                    trial.done(Unavailable("the process that tries grammars does not start"))
                    continue
                trial.began = time.monotonic()
                self._running[slow] = trial
                self._send(Start(trial.number, trial.grammar, SECONDS))

    def _stop(self, trial: Trial) -> None:
        """Kill it in the process."""
        self._running = {slow: other for slow, other in self._running.items() if other is not trial}
        self._send(StopTrial(trial.number))

    # --- the process ---

    def _started(self) -> bool:
        """Whether the process is there; it is started if need be."""
        if self._process is not None and self._process.poll() is None:
            return True
        self._discard_process()
        # a group of its own, for signals; in a session of its own its priority would not count (sched(7), autogroup)
        try:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0, bufsize=0
            )
        except OSError as error:  # no memory or no descriptor left, say
            logger.error("the process that tries grammars does not start: %s", error)
            return False
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        if ready and not self._closed and self._process.stdout.readline() == READY:
            return True
        self._end_process()
        return False

    def _send(self, order: Start | StopTrial) -> None:
        if self._process is not None:
            stdin = self._process.stdin
            assert stdin is not None
            with suppress(BrokenPipeError):  # `_receive` finds out
                data = memoryview(msgspec.json.encode(order) + b"\n")
                while data:
                    data = data[stdin.write(data) :]

    def _receive(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        received = os.read(self._process.stdout.fileno(), 1 << 16)
        if not received:
            return self._discard_process()
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            result = msgspec.json.decode(line, type=Result)
            trial = next((trial for trial in self._running.values() if trial.number == result.number), None)
            if trial is None:  # cancelled meanwhile
                continue
            self._running = {slow: other for slow, other in self._running.items() if other is not trial}
            if result.cost is not None:
                trial.done(Cost(*result.cost))
            elif result.refusal is not None:
                field, message = result.refusal
                trial.done(RequestError(message, field=field))
            else:
                trial.done(_failed(trial, result.failure))

    def _discard_process(self) -> None:
        """It has ended by itself: its trials start again, unless it was one of them that ended it twice."""
        if self._process is None:
            return
        self._end_process()
        lost, self._running = self._running, {}
        for slow, trial in lost.items():
            trial.lives -= 1
            if trial.lives:
                (self._slow if slow else self._quick).add(trial.client, trial)
            else:
                logger.error("the process that tries grammars has ended during a trial")
                trial.done(_failed(trial, "its process has ended"))

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            self._received = b""


def _failed(trial: Trial, failure: str) -> RequestError:
    room = f"{MAX_MEMORY >> 30} GiB"
    known = {TIME: f"takes more than {SECONDS:g} s of a processor", MEMORY: f"takes more than {room}"}
    if failure in known:
        reason = f"compiling it {known[failure]}"
    elif failure == "SIGABRT":
        reason = f"the compiler breaks off: it needs more than {room}, or fails on this grammar"
    else:
        reason = f"the compiler fails on it ({failure})"
    return unusable(f"structured_outputs.{trial.grammar.kind}", reason)
