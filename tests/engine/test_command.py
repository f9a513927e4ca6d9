"""Commands: begun by name, resumed between steps, always answered."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tokserve.base.errors import Conflict, StartError
from tokserve.engine.admin.command import PREPARED, STEP_BOUNDARY, Command, Commands, command
from tokserve.protocol.messages import Call, Ready, Reply


class Caller:
    """Commands of a table of its own, and what they have sent."""

    def __init__(self, **table: Any) -> None:
        self.sent: list[Any] = []
        self.in_flight = False
        self.progress = self.wakes = 0
        handlers = {name: command(name)(function) for name, function in table.items()}
        self.commands = Commands(
            [type("Owner", (), handlers)()],
            emit=lambda identity, message: self.sent.append((identity, message)),
            at_boundary=lambda: not self.in_flight,
            on_progress=self._on_progress,
            wake=self._wake,
        )

    def _on_progress(self) -> None:
        self.progress += 1

    def _wake(self) -> None:
        self.wakes += 1

    def call(self, method: str, **args: Any) -> None:
        self.commands.call(b"A", Call(7, method, args))


def test_a_command_that_waits_for_nothing_is_answered_at_once() -> None:
    caller = Caller(plus=lambda self, x, y: x + y)
    caller.call("plus", x=1, y=2)
    assert caller.sent == [(b"A", Reply(7, 3))] and caller.progress == 1


@pytest.mark.parametrize(
    ("error", "reply"),
    [
        (Conflict("no", field="mode"), Reply(7, error="no", status=409, field="mode")),
        (StartError("no memory"), Reply(7, error="no memory", status=503)),
        (ZeroDivisionError("x"), Reply(7, error="ZeroDivisionError in the engine; its log says more")),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_a_reply_to_its_caller(error: Exception, reply: Reply, late: bool) -> None:
    def fail(self: object) -> Command:
        if late:
            yield STEP_BOUNDARY
        raise error
        yield

    caller = Caller(fail=fail)
    caller.in_flight = late
    caller.call("fail")
    assert bool(caller.sent) != late
    caller.in_flight = False
    caller.commands.resume()
    assert caller.sent == [(b"A", reply)] and not caller.commands.wait_for_boundary


@pytest.mark.parametrize(("method", "args"), [("nothing", {}), ("one", {"y": 1}), ("one", {})])
def test_a_wrong_call_is_answered(method: str, args: dict[str, Any]) -> None:
    caller = Caller(one=lambda self, x: x)
    caller.call(method, **args)
    ((_, reply),) = caller.sent
    assert reply.call_id == 7 and reply.error and reply.status == 500


def test_it_waits_for_a_boundary_a_future_and_a_condition() -> None:
    future: Future[int] = Future()
    ready = False

    def work(self: object) -> Command:
        yield STEP_BOUNDARY
        yield future
        yield lambda: ready
        return future.result()

    caller = Caller(work=work)
    caller.in_flight = True
    caller.call("work")
    assert caller.commands.wait_for_boundary
    caller.in_flight = False
    caller.commands.resume()
    assert not caller.commands.wait_for_boundary and not caller.wakes
    future.set_result(5)
    assert caller.wakes == 1
    caller.commands.resume()
    assert not caller.sent
    ready = True
    caller.commands.resume()
    assert caller.sent == [(b"A", Reply(7, 5))]


def test_one_command_may_wait_for_another() -> None:
    order: list[str] = []

    def first(self: object) -> Command:
        yield lambda: "second" in order
        order.append("first")

    def second(self: object) -> Command:
        yield STEP_BOUNDARY
        order.append("second")

    caller = Caller(first=first, second=second)
    caller.in_flight = True
    caller.call("first")
    caller.call("second")
    caller.in_flight = False
    caller.commands.resume()
    assert order == ["second", "first"] and len(caller.sent) == 2


def test_a_caller_is_passed_only_to_commands_that_need_it() -> None:
    ready = Ready(1, 1, 1, 1, [], "v")
    caller = Caller(who=lambda self, caller: caller.decode(), hello=lambda self: ready)
    caller.call("who")
    caller.call("hello")
    assert caller.sent == [(b"A", Reply(7, "A")), (b"A", ready)]


# --- in two phases ---


def prepare(caller: Caller, method: str, token: str = "t", **args: Any) -> None:
    caller.commands.call(b"A", Call(7, "prepare", {"method": method, "args": args, "token": token}))


def decide(caller: Caller, token: str = "t", identity: bytes = b"A", **decision: Any) -> None:
    caller.commands.call(identity, Call(8, "decide", {"token": token, "go": True} | decision))


def twice(self: object, first: list[Any], taken_back: list[str]) -> Command:
    for _ in range(2):
        try:
            first.append((yield PREPARED))
        except Conflict as error:
            taken_back.append(error.message)
            raise
    yield STEP_BOUNDARY
    return len(first)


def test_a_prepared_command_continues_after_the_decision() -> None:
    values: list[Any] = []
    caller = Caller(twice=twice)
    prepare(caller, "twice", first=values, taken_back=[])
    assert caller.sent == [(b"A", Reply(7, {"prepared": True}))] and not values
    caller.commands.resume()
    assert len(caller.sent) == 1 and not caller.commands.wait_for_boundary, "steps go on meanwhile"
    decide(caller, values={"epoch": 5})
    assert values == [{"epoch": 5}] and caller.sent[1:] == [(b"A", Reply(8, {"prepared": True}))]
    caller.in_flight = True
    decide(caller)
    assert caller.commands.wait_for_boundary
    caller.in_flight = False
    caller.commands.resume()
    assert caller.sent[2:] == [(b"A", Reply(8, {"result": 2}))]


def test_a_prepared_command_is_taken_back() -> None:
    taken_back: list[str] = []
    caller = Caller(twice=twice)
    prepare(caller, "twice", first=[], taken_back=taken_back)
    decide(caller, go=False, reason="engine 1: no")
    assert taken_back == ["engine 1: no"]
    assert caller.sent[1:] == [(b"A", Reply(8, error="engine 1: no", status=409))]


def test_without_phases_it_waits_for_no_decision() -> None:
    values: list[Any] = []
    caller = Caller(twice=twice)
    caller.call("twice", first=values, taken_back=[])
    assert values == [{}, {}] and caller.sent == [(b"A", Reply(7, 2))]


def test_a_command_that_needs_no_decision_ends_at_once() -> None:
    caller = Caller(plus=lambda self, x: x + 1)
    prepare(caller, "plus", x=1)
    assert caller.sent == [(b"A", Reply(7, {"result": 2}))]


@pytest.mark.parametrize("by", [{"token": "other"}, {"identity": b"B"}])
def test_only_its_caller_decides(by: dict[str, Any]) -> None:
    caller = Caller(twice=twice)
    prepare(caller, "twice", first=[], taken_back=[])
    decide(caller, **by)
    assert caller.sent[-1][1] == Reply(8, error="no such command is prepared", status=409)


def test_a_caller_that_leaves_takes_its_commands_back() -> None:
    taken_back: list[str] = []
    future: Future[None] = Future()

    def slow(self: object) -> Command:
        yield future
        yield from twice(self, [], taken_back)

    caller = Caller(twice=twice, slow=slow)
    prepare(caller, "twice", first=[], taken_back=taken_back)
    prepare(caller, "slow", "u")
    caller.commands.leave(b"A")
    assert len(taken_back) == 1
    future.set_result(None)
    caller.commands.resume()
    assert taken_back == ["the front end that called it has gone"] * 2
