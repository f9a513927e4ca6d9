"""The store of a server with several API processes, over its socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.sessions.simulation import CONTEXT
from tokserve.base.errors import Conflict, NotFound, QueueFull, RequestError, RequestFailed
from tokserve.config import Config
from tokserve.features.sessions import calls
from tokserve.features.sessions.canonical import chain
from tokserve.features.sessions.host import RemoteSessions, SessionHost, make_host
from tokserve.features.sessions.store import SessionStore
from tokserve.features.sessions.turns import Session, TurnAnswer, TurnPrompt

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def prompt() -> TurnPrompt:
    return TurnPrompt(
        context=CONTEXT, parent=None, because="first", new_ids=b"abcd", chain=chain([USER]), messages=b"[]"
    )


def answer() -> TurnAnswer:
    return TurnAnswer(
        token_ids=b"efgh",
        token_logprobs=b"ijkl",
        mode="raw",
        finish_reason="stop",
        stop_detail="eos",
        seed=3,
        weight_versions=[("0", 0, 1)],
        prompt_weight_versions=[],
        message=ANSWER,
        request_id="r",
    )


def served(scene: Callable[..., Awaitable[Any]], *, with_host: bool = False, **options: Any) -> Path:
    """Run a scene of two processes that ask one host; returns the host's directory, which is gone."""

    async def run() -> Path:
        host = SessionHost(Config.make(sessions=True, **options))
        one, other = RemoteSessions(host.address, 0), RemoteSessions(host.address, 1)
        try:
            await scene(*((one, other, host) if with_host else (one, other)))
        finally:
            await one.close()
            await other.close()
            await host.close()
        return Path(host.address.removeprefix("ipc://")).parent

    return asyncio.run(run())


def test_what_one_process_adds_another_finds() -> None:
    async def scene(one: RemoteSessions, other: RemoteSessions) -> None:
        find = calls.FindTurn("", "s", CONTEXT, chain([USER]))
        assert (await one.call(find)).because == "it is the first turn of the session"
        one.notify(calls.AddTurn("", "s", 1, prompt(), answer()))
        again = calls.FindTurn("", "s", CONTEXT, chain([USER, ANSWER, USER]))
        match = await one.call(again)  # behind the notice
        assert (match.turn_id, match.ids, match.ended, match.message) == ("t0", b"abcdefgh", True, ANSWER)
        assert match.number == 1
        assert await other.call(again) == match
        session: Session = await other.call(calls.ReadSession("", "s"))
        assert session.turns["t0"].answer == answer() and session.turns["t0"].prompt == prompt()
        counters = await other.call(calls.CountSessions())
        assert (counters.sessions, counters.turns, counters.roots, counters.continued) == (1, 1, 1, 0)

    assert not served(scene).exists()


def test_errors_are_those_of_the_store() -> None:
    async def scene(one: RemoteSessions, other: RemoteSessions) -> None:
        await one.call(calls.CreateSession("", "s", {}))
        for call, kind, code in (
            (calls.CreateSession("", "s", {}), Conflict, "session_exists"),
            (calls.CreateSession("", "t", {}), QueueFull, "too_many_sessions"),
            (calls.ReadSession("", "x"), NotFound, "session_not_found"),
            (calls.AddMetadata("", "s", {"x": "y" * (1 << 20)}, None), RequestError, None),
        ):
            with pytest.raises(kind) as caught:
                await other.call(call)
            assert caught.value.code == code

    served(scene, max_sessions=1)


def test_a_trainer_waits_for_a_session_that_another_process_closes() -> None:
    async def scene(one: RemoteSessions, other: RemoteSessions) -> None:
        waiting = asyncio.create_task(one.call(calls.NextSession("", 60.0, 60.0)))
        listing = asyncio.create_task(one.call(calls.ListSessions("", "closed", 10, None, 60.0)))
        await other.call(calls.CreateSession("", "s", {"x": 1}))
        await other.call(calls.CloseSession("", "s"))
        session = await waiting
        assert (session.session_id, session.metadata, session.closed) == ("s", {"x": 1}, True)
        assert [summary.session_id for summary in await listing] == ["s"]
        assert await one.call(calls.NextSession("", 0.0, 60.0)) is None

    served(scene)


def test_a_request_waits_for_the_answer_that_it_continues() -> None:
    async def scene(one: RemoteSessions, other: RemoteSessions) -> None:
        before = chain([USER])
        await one.call(calls.FindTurn("", "s", CONTEXT, before))
        one.notify(calls.BeginRequest("", "s", 1, "r", before[-1]))
        await one.call(calls.CountSessions())
        find = asyncio.create_task(
            other.call(calls.FindTurn("", "s", CONTEXT, chain([USER, ANSWER, USER]), [before[-1]]))
        )
        await other.call(calls.CountSessions())
        assert not find.done()
        one.notify(calls.AddTurn("", "s", 1, prompt(), answer()))
        one.notify(calls.EndRequest("", "s", "r"))
        assert (await find).turn_id == "t0"

    served(scene)


def test_a_request_waits_for_no_answer_but_the_one_that_it_continues() -> None:
    async def scene(one: RemoteSessions, other: RemoteSessions) -> None:
        before, after = chain([USER]), chain([USER, ANSWER, USER])
        await one.call(calls.FindTurn("", "s", CONTEXT, before))
        one.notify(calls.AddTurn("", "s", 1, prompt(), answer()))
        one.notify(calls.BeginRequest("", "s", 1, "retry", before[-1]))
        waited = await asyncio.wait_for(one.call(calls.FindTurn("", "s", CONTEXT, after, [before[-1]])), 60.0)
        assert waited.turn_id == "t0"

    with mock.patch.object(calls, "CONTINUES_SOON", 1e9):
        served(scene)


def test_a_process_that_ends_leaves_no_request() -> None:
    async def scene(one: RemoteSessions, other: RemoteSessions, host: SessionHost) -> None:
        before = chain([USER])
        for process, name in ((one, "s"), (other, "t")):
            number = (await process.call(calls.FindTurn("", name, CONTEXT, before))).number
            for request in ("r", "q"):
                process.notify(calls.BeginRequest("", name, number, request, before[-1]))
            process.notify(calls.AddTurn("", name, number, prompt(), answer()))
            process.notify(calls.EndRequest("", name, "q"))
        waiting = asyncio.create_task(one.call(calls.NextSession("", 60.0, 60.0)))
        assert (await one.call(calls.SummarizeSession("", "s"))).state == "open"
        assert (await other.call(calls.SummarizeSession("", "t"))).state == "open"
        host.on_process_end(0)
        assert (await other.call(calls.SummarizeSession("", "s"))).state == "idle"
        assert (await other.call(calls.SummarizeSession("", "t"))).state == "open"
        await other.call(calls.CloseSession("", "s"))
        assert (await other.call(calls.NextSession("", 0.0, 60.0))).session_id == "s"
        waiting.cancel()

    served(scene, with_host=True)


def test_a_trainer_that_is_gone_gets_no_session() -> None:
    async def scene(one: RemoteSessions, other: RemoteSessions) -> None:
        waiting = asyncio.create_task(one.call(calls.NextSession("", 60.0, 60.0)))
        await one.call(calls.CreateSession("", "s", {}))
        waiting.cancel()
        await asyncio.wait([waiting])
        await one.call(calls.CloseSession("", "s"))
        assert (await other.call(calls.NextSession("", 0.0, 60.0))).session_id == "s"

    served(scene)


def test_the_host_outlives_a_call_that_fails() -> None:
    async def scene(one: RemoteSessions, other: RemoteSessions) -> None:
        with mock.patch.object(SessionStore, "create", side_effect=OverflowError), pytest.raises(RequestFailed):
            await one.call(calls.CreateSession("", "s", {}))
        with mock.patch.object(SessionStore, "end", side_effect=OverflowError):
            one.notify(calls.EndRequest("", "s", "r"))
            await one.call(calls.CountSessions())
        assert await other.call(calls.CreateSession("", "s", {})) == "s"

    served(scene)


def test_a_server_without_sessions_has_no_host() -> None:
    assert make_host(Config()) is None
