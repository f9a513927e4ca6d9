"""Admin calls of the engine: a command is a generator that is resumed between steps, so it reads from top to bottom.

`admin` declares the commands, and methods marked with `command` implement them.  A command yields what it waits for
(`STEP_BOUNDARY`, a future, or a condition), holds up no other work meanwhile, and returns its reply: its caller is
answered when the state that it asked for is reached.

A command that takes effect on several engines or on none is called in two phases.  `prepare` begins it; at `PREPARED`
all that may fail is done, and it waits until `decide` says whether every engine has come that far.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec

from tokserve.base.errors import Conflict, RequestError, StartError, Unavailable, violation
from tokserve.engine.output.front_ends import Emit
from tokserve.engine.request import Request
from tokserve.protocol.commands import COMMANDS
from tokserve.protocol.messages import Call, Ready, Reply

logger = logging.getLogger(__name__)

STEP_BOUNDARY = None  # no step is in flight, and none is planned before the command goes on


class _DecisionWait:
    """The type of `PREPARED`."""


PREPARED = _DecisionWait()  # what follows cannot fail; yields what `decide` sets, and raises Conflict if it says no
Wait = Future[Any] | Callable[[], bool] | _DecisionWait | None
Command = Generator[Wait, Any, Any]
F = TypeVar("F", bound=Callable[..., Any])


class RunningRequests(Protocol):
    """The requests that have not ended."""

    @property
    def live(self) -> Iterable[Request]:
        """All requests that have not ended."""

    @property
    def num_received(self) -> int:
        """The number of the next request."""

    def end_all(self, reason: str) -> None:
        """End them now, with what they have."""


def command(name: str) -> Callable[[F], F]:
    """Mark a method as the command `name`: a generator, or a function that waits for nothing.

    It gets the parameters that `admin.COMMANDS` declares (if it declares none, those of the call), and the caller's
    identity if it has a parameter `caller`.
    """

    def mark(method: F) -> F:
        method.command = name  # type: ignore[attr-defined]
        return method

    return mark


def _handlers(owners: Iterable[object]) -> dict[str, Callable[..., Any]]:
    """The marked methods of the owners, by the names of their commands."""
    handlers: dict[str, Callable[..., Any]] = {}
    for owner in owners:
        kind: type = type(owner)
        for name, attribute in _marked_methods(kind):
            assert name not in handlers, f"two commands {name}"
            handlers[name] = getattr(owner, attribute)
    return handlers


@cache
def _marked_methods(kind: type) -> list[tuple[str, str]]:
    """The commands that a class implements, and the names of their methods."""
    members = inspect.getmembers_static(kind, inspect.isfunction)
    return [(value.command, attribute) for attribute, value in members if hasattr(value, "command")]


class Prepare(msgspec.Struct, forbid_unknown_fields=True):
    """Begin a command in two phases.  `token`: names it in `decide`."""

    method: str
    args: dict[str, Any]
    token: str


class Decide(msgspec.Struct, forbid_unknown_fields=True):
    """Whether a prepared command takes effect.  `values`: what all engines set alike; `reason`: why it does not."""

    token: str
    go: bool
    values: dict[str, Any] = {}
    reason: str = "the command was taken back"


@dataclass(slots=True, eq=False)
class _Task:
    """A command that has begun, and what it waits for.  `identity`: its caller; None: the engine's own.  `token`: of
    one in two phases; `decision`: what was decided of it."""

    identity: bytes | None
    call_id: int
    command: Command
    wait: Wait
    token: str | None = None
    decision: Decide | None = None

    def resume(self) -> Wait:
        """Go on until the next wait.  Raises StopIteration at the end, and what the command raises."""
        if self.wait is not PREPARED:
            return next(self.command)
        decision, self.decision = self.decision, None
        if decision is None:
            return self.command.send({})
        return self.command.send(decision.values) if decision.go else self.command.throw(Conflict(decision.reason))


class Commands:
    """The commands that the owners' methods implement, and those that have begun.  `at_boundary`: whether no step is in
    flight.  `on_progress` is called when a command has run, before its reply. `wake` may be called from any thread."""

    def __init__(
        self,
        owners: Iterable[object],
        *,
        emit: Emit,
        at_boundary: Callable[[], bool],
        on_progress: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._handlers = _handlers(owners)
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
        token = None
        if call.method == "decide":
            self._decide(identity, call)
            return
        if call.method == "prepare":
            prepare = msgspec.convert(call.args, Prepare)
            token, call = prepare.token, Call(call.call_id, prepare.method, prepare.args)
        if call.method not in self._handlers:
            self._emit(identity, Reply(call.call_id, error=f"the engine has no command {call.method!r}"))
            return
        task = _Task(identity, call.call_id, self._begin(identity, call), wait=lambda: True, token=token)
        self._tasks.append(task)
        self._advance(task)

    def _decide(self, identity: bytes, call: Call) -> None:
        """Let a prepared command go on, or end it; the answer is what it comes to."""
        decision = msgspec.convert(call.args, Decide)
        for task in self._tasks:
            if task.identity == identity and task.token == decision.token and task.wait is PREPARED:
                task.call_id, task.decision = call.call_id, decision
                self._advance(task)
                return
        self._emit(identity, Reply(call.call_id, error="no such command is prepared", status=Conflict.status))

    def leave(self, identity: bytes) -> None:
        """A front end has gone: what waits for its decision ends."""
        for task in list(self._tasks):
            if task.identity == identity and task.token is not None:
                task.decision = Decide(task.token, go=False, reason="the front end that called it has gone")
                self._advance(task)

    def begin(self, command: Command) -> None:
        """Begin a command that no front end has called."""
        task = _Task(None, 0, command, wait=lambda: True)
        self._tasks.append(task)
        self._advance(task)

    def _begin(self, identity: bytes, call: Call) -> Command:
        handler = self._handlers[call.method]
        args = _parameters(call)
        if "caller" in inspect.signature(handler).parameters:
            args["caller"] = identity
        if inspect.isgeneratorfunction(handler):
            return (yield from handler(**args))
        return handler(**args)

    def resume(self) -> None:
        """Let commands go on whose wait is over; one may have waited for what another has just done."""
        while any([self._advance(task) for task in list(self._tasks)]):
            pass

    def _advance(self, task: _Task) -> bool:
        """Resume a command for as long as its wait is over, and answer at its end; whether it was resumed."""
        resumed = False
        while self._is_over(task):
            resumed = True
            try:
                task.wait = task.resume()
                if isinstance(task.wait, Future):
                    task.wait.add_done_callback(lambda _: self._wake())
            except StopIteration as end:
                result = end.value if task.token is None else {"result": end.value}
                return self._end(task, result if isinstance(result, Ready) else Reply(task.call_id, result))
            except Exception as error:  # a failed command is an error of its caller, and the loop goes on
                return self._end(task, _error_reply(task.call_id, error))
        if resumed:
            self._on_progress()
            if task.wait is PREPARED and task.identity is not None:
                self._emit(task.identity, Reply(task.call_id, {"prepared": True}))
        return resumed

    def _is_over(self, task: _Task) -> bool:
        wait = task.wait
        if wait is STEP_BOUNDARY:
            return self._at_boundary()
        if isinstance(wait, _DecisionWait):
            return task.token is None or task.decision is not None
        return wait.done() if isinstance(wait, Future) else wait()

    def _end(self, task: _Task, reply: Reply | Ready) -> bool:
        self._tasks.remove(task)
        self._on_progress()
        if task.identity is not None:
            self._emit(task.identity, reply)
        return True


def _parameters(call: Call) -> dict[str, Any]:
    """The arguments of a call, complete and with the declared types.  Raises RequestError."""
    if call.method not in COMMANDS:
        return dict(call.args)
    try:
        parameters = msgspec.convert(call.args, COMMANDS[call.method].parameters)
    except msgspec.ValidationError as error:
        raise RequestError(f"{call.method}: {error}", field=violation(error).field or None) from None
    return {name: getattr(parameters, name) for name in parameters.__struct_fields__}


def _error_reply(call_id: int, error: Exception) -> Reply:
    if isinstance(error, RequestError):
        return Reply(call_id, error=error.message, status=error.status, field=error.field, code=error.code)
    if isinstance(error, StartError):  # memory that a sleep gave back cannot be had again
        return Reply(call_id, error=str(error), status=Unavailable.status)
    logger.error("a command failed", exc_info=error)
    return Reply(call_id, error=f"{type(error).__name__} in the engine; its log says more")
