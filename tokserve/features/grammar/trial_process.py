"""The process in which grammars are compiled before the engine compiles them (`trials.PROGRAM`).

It loads the tokenizer once and forks a child for every trial.  A child can be killed at any moment, its memory and CPU
time are limited, and what it allocated is gone with it.  The process has one thread, so forking it is safe; it ends at
the end of stdin, and its children end with it.

A line of JSON on stdin is `Start` or `StopTrial`; a line on stdout is a `Result`, after `READY`.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

import msgspec

from tokserve.base.errors import RequestError
from tokserve.base.memory import give_back
from tokserve.base.processes import end_with_parent
from tokserve.features.grammar.grammar import STACK, Compiler, lower_priority
from tokserve.protocol.params import StructuredOutputs

READY = b"{}\n"
MAX_MEMORY = 1 << 30  # bytes of address space that a trial may add
TIME, MEMORY = "time", "memory"  # failures of trials
FAULT_SHOWN = 200  # characters of the library's fault
MAX_LINE = 1 << 16  # bytes of a result


class Model(msgspec.Struct, frozen=True):
    """The argument: the directory of tokenizer.json, None if there is none, and the width of the logits."""

    tokenizer: str | None
    vocab_size: int


class Start(msgspec.Struct, frozen=True, tag=0):
    """Begin a trial, which may take so many `seconds` of a processor."""

    number: int
    grammar: StructuredOutputs
    seconds: float


class StopTrial(msgspec.Struct, frozen=True, tag=1):
    """Kill a trial.  No result follows, unless it has been sent already."""

    number: int


class Result(msgspec.Struct, frozen=True):
    """The end of a trial: what the grammar costs, or the field and message of its refusal, or what failed: `TIME` or
    `MEMORY` were not enough, or else the library's fault as text."""

    number: int
    cost: tuple[int, float, float] | None = None
    refusal: tuple[str, str] | None = None
    failure: str = ""


class Children:
    """The trials that run.  `compiler` has loaded its tokenizer."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._pids: dict[int, int] = {}  # by number
        self._numbers: dict[int, int] = {}  # by the descriptor that the result is read from

    @property
    def descriptors(self) -> list[int]:
        """What `collect` takes when it is readable."""
        return list(self._numbers)

    def start(self, order: Start) -> None:
        """Fork a child that compiles the grammar."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._run(order, writing)
        os.close(writing)
        self._pids[order.number] = pid
        self._numbers[reading] = order.number

    def stop(self, number: int) -> None:
        """Kill a child, if it is still there."""
        for descriptor, running in list(self._numbers.items()):
            if running == number:
                self._end(descriptor)

    def collect(self, descriptor: int) -> bytes:
        """The result of a child that has written one, or has died."""
        line = os.read(descriptor, MAX_LINE)
        number = self._numbers[descriptor]
        status = self._end(descriptor)
        return line or msgspec.json.encode(Result(number, failure=_failure(status)))

    def _end(self, descriptor: int) -> int:
        """Kill a child that has not ended by itself; how it ended, as `os.waitpid` says."""
        pid = self._pids.pop(self._numbers.pop(descriptor))
        os.close(descriptor)
        os.kill(pid, signal.SIGKILL)  # it is our child, so the id is still its own
        return os.waitpid(pid, 0)[1]

    def _run(self, order: Start, writing: int) -> NoReturn:
        """Compile in the child, in a thread with a deep stack, write the result, and exit."""
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is the parent's
        _limit(order.seconds)

        def compile() -> None:
            try:
                cost = self._compiler.try_out(order.grammar)
                result = Result(order.number, cost=(cost.size, cost.per_token, cost.seconds))
            except RequestError as error:
                result = Result(order.number, refusal=(error.field or "", error.message))
            except MemoryError:
                result = Result(order.number, failure=MEMORY)
            except BaseException as error:  # a panic of the library is no Exception
                result = Result(order.number, failure=f"{type(error).__name__}: {error}"[:FAULT_SHOWN])
            os.write(writing, msgspec.json.encode(result))
            os._exit(0)

        threading.stack_size(STACK)
        thread = threading.Thread(target=compile)
        thread.start()
        thread.join()
        os._exit(1)


def _failure(status: int) -> str:
    """What made a child end without a result.  Where the library gets no memory, it aborts as it does by a fault."""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGPROF:
        return TIME
    return MEMORY if number == signal.SIGKILL else signal.Signals(number).name


def _limit(seconds: float) -> None:
    """Limit this child: it dies with its parent, is the first to die when memory runs out, and has limits of memory and
    of the processor's time."""
    end_with_parent(os.getppid())
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with open("/proc/self/statm", "rb") as statm:
        mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + STACK + MAX_MEMORY, mapped + STACK + MAX_MEMORY))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # all threads together; SIGPROF ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(compiler: Compiler) -> None:
    """Until the end of stdin."""
    children = Children(compiler)
    orders = msgspec.json.Decoder(Start | StopTrial)
    stdin, stdout, rest = sys.stdin.fileno(), sys.stdout.fileno(), b""
    os.write(stdout, READY)
    while True:
        ready, _, _ = select.select([stdin, *children.descriptors], [], [])
        for descriptor in ready:
            if descriptor != stdin and descriptor in children.descriptors:
                os.write(stdout, children.collect(descriptor) + b"\n")
        if stdin in ready:
            received = os.read(stdin, 1 << 20)
            if not received:
                return
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                order = orders.decode(line)
                if isinstance(order, Start):
                    children.start(order)
                else:
                    children.stop(order.number)


def main() -> None:
    """Serve trials until the end of stdin, as the module describes."""
    model = msgspec.json.decode(sys.argv[1], type=Model)
    lower_priority()
    compiler = Compiler(model.tokenizer, model.vocab_size, eos=())
    with suppress(RequestError):  # every trial reports it to its client
        compiler.load()
    give_back()  # else trials use what loading has freed, and it would not count
    serve(compiler)
