"""Attacks with grammars.

Each runs against a server until a moment of `time.monotonic`, and raises `Fault` for an answer that the server must not
give.  A soak may run any of them beside the others.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

from tests.hostile.attack import answer_of

Attack = Callable[[str, random.Random, float], Awaitable[None]]

GENERATE = "/inference/v1/generate"
PATIENCE = 120.0
HOPELESS: list[dict[str, Any]] = [  # they compile, and come to a limit within a few tokens
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}},
    {"regex": "(a|b|ab)*" * 1800},
    {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a"'},
]


ANSWERS: Counter[str] = Counter()  # of the attacks of this process, by `Answer.outcome`


class Fault(AssertionError):
    """An answer that the server must not give."""


class Client(httpx.AsyncClient):
    """A patient client whose answers are counted in `ANSWERS`."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(base_url=url, timeout=PATIENCE, **options)

    async def post(self, *args: Any, **options: Any) -> httpx.Response:
        """POST, and count the answer."""
        reply = await super().post(*args, **options)
        ANSWERS[answer_of(reply.status_code, reply.content, "retry-after" in reply.headers).outcome] += 1
        return reply


def bomb(number: int) -> dict[str, Any]:
    """A grammar that takes gigabytes and minutes; different for every number."""
    parts = " & ".join(f"/[ab]*a[ab]{{{i}}}/" for i in range(600))
    return {"grammar": f"start: T\nT: {parts}\n// {number}"}


def choices(chance: random.Random) -> dict[str, Any]:
    """44 kB of choices."""
    return {"choice": ["".join(chance.choices("abcdefghij klm", k=10)) for _ in range(3500)]}


def body(form: dict[str, Any] | None, **params: Any) -> dict[str, Any]:
    """A request for up to 24 tokens."""
    request = {"max_tokens": 24, **params} | ({} if form is None else {"structured_outputs": form})
    return {"token_ids": [5, 20, 31, 44, 7], "sampling_params": request, "output_mode": "text"}


async def send(client: httpx.AsyncClient, form: dict[str, Any], **params: Any) -> httpx.Response:
    """Send a request with this form, again while a budget is used up.  Raises Fault for any other 5xx."""
    while True:
        answer = await client.post(GENERATE, json=body(form, **params))
        if answer.status_code == 503 and "retry-after" in answer.headers:
            await asyncio.sleep(1.0)
            continue
        if answer.status_code >= 500:
            raise Fault(f"{answer.status_code}: {answer.text[:300]}")
        return answer


async def bombs_and_away(url: str, chance: random.Random, deadline: float) -> None:
    """Costly grammars whose clients are gone after 20 ms."""
    async with Client(url) as client:

        async def leave(number: int) -> None:
            with suppress(TimeoutError, httpx.TransportError):
                await asyncio.wait_for(send(client, bomb(number)), 0.02)

        while time.monotonic() < deadline:
            await asyncio.gather(*(leave(chance.getrandbits(60)) for _ in range(30)))


async def bombs(url: str, chance: random.Random, deadline: float) -> None:
    """Costly grammars whose clients wait for the refusal, as far as the deadline lets them."""
    async with Client(url) as client:

        async def wait() -> None:
            answer = await send(client, bomb(chance.getrandbits(60)))
            if answer.status_code != 400 or "structured_outputs" not in answer.json()["error"]["param"]:
                raise Fault(answer.text[:300])

        waiting = [asyncio.ensure_future(wait()) for _ in range(10)]
        done, pending = await asyncio.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()


async def many_grammars(url: str, chance: random.Random, deadline: float) -> None:
    """Large choices, all of them different."""
    async with Client(url) as client:
        while time.monotonic() < deadline:
            answers = await asyncio.gather(*(send(client, choices(chance), max_tokens=2) for _ in range(4)))
            for answer in answers:
                if answer.status_code not in (200, 429):
                    raise Fault(answer.text[:300])


async def hopeless(url: str, chance: random.Random, deadline: float) -> None:
    """Grammars that fail within a few tokens: refused by the field's name, at admission or when they fail."""
    async with Client(url) as client:
        while time.monotonic() < deadline:
            form = dict(chance.choice(HOPELESS))
            if "grammar" in form:
                form["grammar"] += f"\n// {chance.getrandbits(60)}"
            answer = await send(client, form)
            if answer.status_code != 400 or "structured_outputs" not in answer.json()["error"]["param"]:
                raise Fault(answer.text[:300])


ATTACKS: list[Attack] = [bombs_and_away, bombs, many_grammars, hopeless]
