"""Turns of prompts: their order, and aborts and cancellations of those that wait."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import httpx
import msgspec
import pytest

from tests.rl.distribution import rl
from tests.rl.scripted_http import connected, refusal

turns = importlib.import_module(f"{rl.__name__}.turns")
REPLY = {"choices": [{"index": 0, "token_ids": b"", "logprobs": None, "finish_reason": "stop"}]}


async def settle() -> None:
    """Lets every task run until it waits for a turn or an answer."""
    for _ in range(20):
        await asyncio.sleep(0)


class SlowServer:
    """Answers when `go` is set.  `sent`: the group of each rollout."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.sent: list[Any] = []
        self.refusals: list[httpx.Response] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/abort_requests":
            return httpx.Response(200, json={"aborted": 0, "results": {}})
        content = await request.aread()
        is_json = request.headers["content-type"] == "application/json"
        body = msgspec.json.decode(content) if is_json else msgspec.msgpack.decode(content)
        self.sent.append(body.get("group_id"))
        if self.refusals:
            return self.refusals.pop()
        await self.go.wait()
        return httpx.Response(200, content=msgspec.msgpack.encode(REPLY))


def test_turns_are_taken_in_order_and_given_back() -> None:
    async def scene() -> None:
        limited = turns.PromptTurns(2)
        order: list[int] = []
        go = asyncio.Event()

        async def take(number: int) -> None:
            try:
                async with limited.turn():
                    order.append(number)
                    await go.wait()
            finally:
                if number == 1:
                    tasks[4].cancel()  # which has its turn, and has not heard of it

        tasks = [asyncio.create_task(take(number)) for number in range(6)]
        await settle()
        assert order == [0, 1]
        tasks[2].cancel()  # waits
        tasks[0].cancel()  # has a turn, which 3 gets
        await settle()
        assert order == [0, 1, 3]
        tasks[1].cancel()
        await settle()
        assert order == [0, 1, 3, 5]
        go.set()
        await asyncio.wait(tasks)
        async with limited.turn(), limited.turn():
            pass

    asyncio.run(scene())


def test_an_abort_ends_waiting_prompts_of_its_group_only() -> None:
    async def scene() -> None:
        server = SlowServer()
        async with connected(server.answer, connections=1) as client:
            calls = [
                asyncio.create_task(client.generate([[1]], n=2, group_id=group, return_sampling_mask=True))
                for group in ("a", "b", None, "b", "c")
            ]
            await settle()
            assert server.sent == ["a"] and await client.abort("b") == 2 and await client.abort("b") == 0
            for call in (calls[1], calls[3]):
                for index, rollout in enumerate(await call):
                    assert (rollout.index, rollout.finish_reason, rollout.weight_versions) == (index, "abort", [])
                    assert rollout.prompt_ids.tolist() == [1] and rollout.sampling_mask == []
                    columns = rollout.token_ids, rollout.logprobs, rollout.kept_logprob, rollout.mask_truncated
                    assert [len(column) for column in columns] == [0] * 4
            server.go.set()
            await asyncio.gather(*calls)
            assert server.sent == ["a", None, "c"]

    asyncio.run(scene())


def test_a_waiting_stream_is_aborted_by_its_id_or_its_group() -> None:
    async def deltas(client: Any, **options: Any) -> list[tuple[int, str | None]]:
        return [(delta.index, delta.finish_reason) async for delta in client.stream([1], n=2, **options)]

    async def scene() -> None:
        server = SlowServer()
        async with connected(server.answer, connections=1) as client:
            first = asyncio.create_task(client.generate([[1]]))
            await settle()
            streams = [
                asyncio.create_task(deltas(client, request_id="r")),
                asyncio.create_task(deltas(client, group_id="g")),
            ]
            scores = asyncio.create_task(client.score([[1, 2]]))
            await settle()
            assert await client.abort(request_ids=["r", "other"]) == 1 and await client.abort("g") == 1
            assert await asyncio.gather(*streams) == [[(0, "abort"), (1, "abort")]] * 2
            assert len(server.sent) == 1 and not scores.done()
            scores.cancel()
            server.go.set()
            await first

    asyncio.run(scene())


@pytest.mark.parametrize("status", [429, 503])
def test_a_prompt_that_waits_to_be_sent_again_is_aborted(status: int) -> None:
    async def scene() -> None:
        server = SlowServer()
        server.refusals = [refusal(status, **{"retry-after": "500"})]
        async with connected(server.answer) as client:
            call = asyncio.create_task(client.generate([[1]], group_id="g"))
            await settle()
            assert server.sent == ["g"] and await client.abort("g") == 1
            assert [rollout.finish_reason for rollout in await call] == ["abort"]

    asyncio.run(scene())
