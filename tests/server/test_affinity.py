"""The engine of a session: the same one for all requests, and another only while that one is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tokserve.client.outputs import EngineReport, Status, StepStats
from tokserve.server.affinity import session_rank

SESSIONS = [f"session-{number}" for number in range(200)]


def engines(count: int, *, down: tuple[int, ...] = (), quarantined: tuple[int, ...] = ()) -> Any:
    reports = [
        EngineReport(rank, StepStats(), Status(quarantine="NaN" if rank in quarantined else None), None, rank in down)
        for rank in range(count)
    ]
    return SimpleNamespace(num_engines=count, reports=reports)


def test_one_engine_needs_no_choice() -> None:
    assert session_rank(engines(1), "a") is None


def test_sessions_spread_over_the_engines() -> None:
    ranks = [session_rank(engines(4), session) for session in SESSIONS]
    assert ranks == [session_rank(engines(4), session) for session in SESSIONS]
    assert all(ranks.count(rank) > len(SESSIONS) // 8 for rank in range(4))


def test_only_the_sessions_of_an_engine_that_is_gone_move() -> None:
    before = [session_rank(engines(4), session) for session in SESSIONS]
    for without in (engines(4, down=(2,)), engines(4, quarantined=(2,))):
        after = [session_rank(without, session) for session in SESSIONS]
        assert all(now == then for now, then in zip(after, before, strict=True) if then != 2)
        assert {now for now, then in zip(after, before, strict=True) if then == 2} == {0, 1, 3}


def test_without_an_engine_the_session_has_none() -> None:
    assert session_rank(engines(2, down=(0, 1)), "a") is None
