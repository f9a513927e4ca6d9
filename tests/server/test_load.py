"""/load: what is in flight in each engine, by which clients see that a server is drained."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.site import Site, site
from tests.server.test_aborts import BODIES, GENERATE, begin, play


def queues(reply: dict[str, Any]) -> dict[str, tuple[int, list[str]]]:
    (engine,) = reply["inflight"]
    assert engine["data_parallel_rank"] == 0
    return {
        queue["name"]: (queue["num_requests"], [request["request_id"] for request in queue["requests"]])
        for queue in engine["queues"]
    }


def test_a_client_drains_the_server_by_aborting_and_polling() -> None:
    """vime's sequence: `POST /abort_requests {}`, then `GET /load` until all queues are empty."""

    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        callers = [await begin(s, "a", stream=True), await begin(s, "b")]
        path = "/load?include_inflight=true&inflight_limit=1"
        before = queues((await client.get(path)).json())
        assert sum(count for count, _ in before.values()) == 2
        assert sum(len(ids) for _, ids in before.values()) == 1, "the limit counts names, not requests"
        assert (await client.post("/abort_requests", json={})).json()["aborted"] == 2
        assert queues((await client.get(path)).json()) == {"running": (0, []), "waiting": (0, [])}
        await asyncio.gather(*(caller.task for caller in callers))

    play(scene)


def test_requests_are_listed_without_their_contents() -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        caller = await begin(s, "a")
        reply = (await client.get("/load?include_inflight=1")).json()
        (entry,) = [request for queue in reply["inflight"][0]["queues"] for request in queue["requests"]]
        age = entry.pop("age")
        assert age >= 0 and entry.pop("status") in ("running", "waiting")
        prompt = len(BODIES[GENERATE]["token_ids"])
        assert entry == {"request_id": "a", "num_prompt_tokens": prompt, "num_output_tokens": 0}
        await client.post("/abort_requests")
        await caller.task

    play(scene)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("include_inflight=yes", "include_inflight"),
        ("inflight_limit=1001", "inflight_limit"),
        ("inflight_limit=-1", "inflight_limit"),
    ],
)
def test_bad_queries_are_refused(query: str, param: str) -> None:
    answer = site().get(f"/load?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_nothing_is_listed_unless_it_is_asked_for() -> None:
    assert site().get("/load?include_inflight=false").json() == {"server_load": 0, "running": 0, "waiting": 0}
