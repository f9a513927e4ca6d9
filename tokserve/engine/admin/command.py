"""Admin calls of the engine: a command is a generator that is resumed between steps, so it reads from top to bottom.

It yields what it waits for (`STEP_BOUNDARY`, a future, or a condition), holds up no other work meanwhile, and returns
its reply: its caller is answered when the state that it asked for is reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Protocol

from tokserve.engine.output.front_ends import Emit
from tokserve.engine.request import Request
from tokserve.errors import RequestError, StartError, Unavailable
from tokserve.messages import Call, Ready, Reply

logger = logging.getLogger(__name__)

STEP_BOUNDARY = None  # no step is in flight, and none is planned before the command goes on
Wait = Future[Any] | Callable[[], bool] | None
Command = Generator[Wait, None, Any]
P = ParamSpec("P")


class RunningRequests(Protocol):
    """The requests that have not ended."""

    @property
    def live(self) -> Iterable[Request]:
        """All of them."""

    @property
    def num_received(self) -> int:
        """The number of the next request."""

    def end_all(self, reason: str) -> None:
        """End them now, with what they have."""


def immediate(function: Callable[P, Any]) -> Callable[P, Command]:
    """A command that waits for nothing."""

    @wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> Command:
        yield from ()
        return function(*args, **kwargs)

    return command


@dataclass(slots=True, eq=False)
class _Task:
    """A command that has begun, and what it waits for."""

    identity: bytes
    call_id: int
    command: Command
    wait: Wait


class Commands:
    """The commands by name, and those that have begun.

    `with_caller`: names of commands that get the caller's identity as `caller`.  `at_boundary`: whether no step is in
    flight.  `on_progress` is called when a command has run, before its reply.  `wake` may be called from any thread.
    """

    def __init__(
        self,
        table: Mapping[str, Callable[..., Command]],
        *,
        with_caller: Iterable[str],
        emit: Emit,
        at_boundary: Callable[[], bool],
        on_progress: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._table = table
        self._with_caller = frozenset(with_caller)
        self._emit = emit
        self._at_boundary = at_boundary
        self._on_progress = on_progress
        self._wake = wake
        self._tasks: list[_Task] = []

    @property
    def wait_for_boundary(self) -> bool:
        """Whether a command waits for the steps in flight, so none may be planned."""
        return any(task.wait is STEP_BOUNDARY for task in self._tasks)

    def call(self, identity: bytes, call: Call) -> None:
        """Begin a command; every call is answered."""
        if call.method not in self._table:
            self._emit(identity, Reply(call.call_id, error=f"the engine has no command {call.method!r}"))
            return
        task = _Task(identity, call.call_id, self._begin(identity, call), wait=lambda: True)
        self._tasks.append(task)
        self._advance(task)

    def _begin(self, identity: bytes, call: Call) -> Command:
        args = call.args | {"caller": identity} if call.method in self._with_caller else call.args
        return (yield from self._table[call.method](**args))

    def resume(self) -> None:
        """Let commands go on whose wait is over; one may have waited for what another has just done."""
        while any([self._advance(task) for task in list(self._tasks)]):
            pass

    def _advance(self, task: _Task) -> bool:
        """Resume a command for as long as its wait is over, and answer at its end; whether it was resumed."""
        resumed = False
        while self._is_over(task.wait):
            resumed = True
            try:
                task.wait = next(task.command)
                if isinstance(task.wait, Future):
                    task.wait.add_done_callback(lambda _: self._wake())
            except StopIteration as end:
                return self._end(task, end.value if isinstance(end.value, Ready) else Reply(task.call_id, end.value))
            except Exception as error:  # a failed command is an error of its caller, and the loop goes on
                return self._end(task, _error_reply(task.call_id, error))
        if resumed:
            self._on_progress()
        return resumed

    def _is_over(self, wait: Wait) -> bool:
        if wait is STEP_BOUNDARY:
            return self._at_boundary()
        return wait.done() if isinstance(wait, Future) else wait()

    def _end(self, task: _Task, reply: Reply | Ready) -> bool:
        self._tasks.remove(task)
        self._on_progress()
        self._emit(task.identity, reply)
        return True


def _error_reply(call_id: int, error: Exception) -> Reply:
    if isinstance(error, RequestError):
        return Reply(call_id, error=error.message, status=error.status, field=error.field, code=error.code)
    if isinstance(error, StartError):  # memory that a sleep gave back cannot be had again
        return Reply(call_id, error=str(error), status=Unavailable.status)
    logger.error("a command failed", exc_info=error)
    return Reply(call_id, error=f"{type(error).__name__} in the engine; its log says more")
