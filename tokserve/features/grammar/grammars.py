"""The grammars of an engine: compiled beside the loop, kept while there is room, refused at once if refused before.

A grammar is tried in another process (`trials`), then compiled here, by one of two threads: what took long in the trial
does not delay the rest.  Requests with the same grammar share it.  What is kept is bounded in bytes, as the trial has
measured them; a grammar stays in memory for as long as an output follows it, kept or not.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from tokserve.base.errors import QueueFull, RequestError, Unavailable
from tokserve.base.memory import give_back
from tokserve.config import Config
from tokserve.features.grammar.grammar import STACK, Compiler, Cost, Grammar, lower_priority, unusable
from tokserve.features.grammar.trials import SLICE, Trial, Trials
from tokserve.protocol.params import StructuredOutputs

IN_USE = 4  # times the bytes that may be kept may be in memory while outputs follow them
MIN_SIZE = 1 << 14  # bytes that a grammar counts at least: the measurement misses some
REFUSALS_KEPT = 1024
REFUSAL_SECONDS = 600.0  # that a refusal is remembered: a busy machine may have caused it
RETRY = 5  # seconds


@dataclass(eq=False)
class _Job:
    """A grammar being tried or compiled.  `futures`: of the requests that wait for it."""

    key: bytes
    grammar: StructuredOutputs
    futures: list[Future[Grammar]] = field(default_factory=list)
    trial: Trial | None = None


class Grammars:
    """`compile` and `forget` are called in the loop's thread; futures get their results in others.  `num_bytes` of
    memory are kept; `num_refused` grammars were refused after a trial."""

    def __init__(self, config: Config, vocab_size: int, eos: Sequence[int]) -> None:
        tokenizer = None if config.server.tokens_only else config.model.tokenizer or config.model.model
        self.trials = Trials(tokenizer, vocab_size)
        self._limit = config.cache.grammar_cache_bytes
        self._compiler = Compiler(tokenizer, vocab_size, eos)
        self._lock = threading.Lock()
        self._jobs: dict[bytes, _Job] = {}
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()  # the least recently used first
        self._all: weakref.WeakSet[Grammar] = weakref.WeakSet()  # those kept, and those that outputs follow
        self._refusals: OrderedDict[bytes, tuple[float, str, str | None]] = OrderedDict()  # when, message, field
        self.num_bytes = 0
        self.num_refused = 0
        self._threads = {slow: ThreadPoolExecutor(1, "grammar", lower_priority) for slow in (False, True)}

    def compile(self, grammar: StructuredOutputs, client: str = "") -> Future[Grammar]:
        """The grammar; it may be there already.  Cancel the future if it is not needed any more.  Its exception is a
        RequestError that names the field, QueueFull, or what was not foreseen."""
        key = hashlib.blake2b(msgspec.msgpack.encode(grammar), digest_size=16).digest()
        future: Future[Grammar] = Future()
        with self._lock:
            kept, error = self._kept.get(key), self._refusal(key)
            if kept is not None:
                self._kept.move_to_end(key)
                future.set_result(kept)
                return future
            if error is not None:
                future.set_exception(error)
                return future
            known = self._jobs.get(key)
            job = self._jobs[key] = known or _Job(key, grammar)
            job.futures.append(future)
        if known is None:
            job.trial = Trial(grammar, client, lambda outcome: self._on_trial(job, outcome))
            self.trials.submit(job.trial)
        future.add_done_callback(lambda future: self._on_cancelled(job) if future.cancelled() else None)
        return future

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew for the next request: outputs share the library's state of a grammar, and its
        limits with it, so one that has come to a limit would fail others at once."""
        with self._lock:
            for key, kept in list(self._kept.items()):
                if kept is grammar:
                    del self._kept[key]

    @property
    def num_compiling(self) -> int:
        """Grammars being tried or compiled."""
        return len(self._jobs)

    def close(self) -> None:
        """End the threads and the process."""
        self.trials.close()
        for pool in self._threads.values():
            pool.shutdown(cancel_futures=True)

    def _refusal(self, key: bytes) -> RequestError | None:
        """The refusal that this grammar got before, if it did, as a new exception: one that was raised holds all that
        its traceback names."""
        when, message, field = self._refusals.get(key, (-math.inf, "", None))
        if time.monotonic() > when + REFUSAL_SECONDS:
            return None
        self._refusals.move_to_end(key)
        return RequestError(message, field=field)

    def _on_cancelled(self, job: _Job) -> None:
        """A future was cancelled: without others, the work stops."""
        with self._lock:
            needed = any(not future.cancelled() for future in job.futures)
            if not needed and self._jobs.get(job.key) is job:
                del self._jobs[job.key]
                assert job.trial is not None
                self.trials.cancel(job.trial)

    def _on_trial(self, job: _Job, outcome: Cost | RequestError) -> None:
        if isinstance(outcome, RequestError):
            self._end(job, outcome)
            return
        usual = threading.stack_size(STACK)  # for the thread that the pool may start now
        try:
            self._threads[outcome.seconds > SLICE].submit(self._make, job, outcome)
        except RuntimeError:  # the pool is closed
            self._end(job, Unavailable("the server is shutting down"))
        finally:
            threading.stack_size(usual)

    def _make(self, job: _Job, cost: Cost) -> None:
        """Compile in this process, if there is room."""
        with self._lock:
            if self._jobs.get(job.key) is not job:  # no request waits for it
                return
        error: Exception | None = self._no_room(job.grammar, max(cost.size, MIN_SIZE))
        if error is None:
            try:
                grammar = self._compiler.compile(job.grammar)
            except Exception as failure:  # whatever it is, those who wait for the grammar must hear of it
                error = failure
            else:
                grammar.cost = cost
                return self._end(job, grammar)
        self._end(job, error)

    def _no_room(self, grammar: StructuredOutputs, size: int) -> RequestError | None:
        """Why a grammar of this size may not be in memory."""
        if size > self._limit:
            why = f"it takes {size >> 10} KiB, and all together may take {self._limit >> 10} (--grammar-cache-bytes)"
            return unusable(f"structured_outputs.{grammar.kind}", why)
        with self._lock:
            kept = set(self._kept.values())
            in_use = sum(_size(grammar) for grammar in self._all if grammar not in kept)
        if in_use + size > IN_USE * self._limit:
            return QueueFull(
                "the grammars of running requests take all the memory that grammars may (--grammar-cache-bytes)",
                retry_after=RETRY,
                code="queue_full",
            )
        return None

    def _end(self, job: _Job, outcome: Grammar | Exception) -> None:
        evicted = False
        with self._lock:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            if isinstance(outcome, Grammar):
                self._all.add(outcome)
                self._kept[job.key] = outcome
                evicted = self._evict()
            else:
                self.num_refused += 1
                if type(outcome) is RequestError:
                    self._refusals[job.key] = time.monotonic(), outcome.message, outcome.field
                    while len(self._refusals) > REFUSALS_KEPT:
                        self._refusals.popitem(last=False)
            futures = list(job.futures)
        if evicted:
            give_back()
        for future in futures:
            if future.set_running_or_notify_cancel():
                if isinstance(outcome, Grammar):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)

    def _evict(self) -> bool:
        """Drop the least recently used until what is kept is within the limit; whether any was."""
        before = len(self._kept)
        total = sum(map(_size, self._kept.values()))
        while total > self._limit:
            _, grammar = self._kept.popitem(last=False)
            total -= _size(grammar)
        self.num_bytes = total
        return len(self._kept) < before


def _size(grammar: Grammar) -> int:
    return max(grammar.size, MIN_SIZE)
