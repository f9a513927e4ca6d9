"""Many clients at once, some of which disconnect: replies equal those of single requests, and nothing remains."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

N = 200


def request(i: int) -> dict[str, Any]:
    rng = random.Random(i)
    prompt = [rng.randrange(3, 250) for _ in range(rng.choice([1, 5, 17, 40, 130, 300]))]
    if i % 3 == 0:  # a common beginning, so that prefixes are shared
        prompt = list(range(5, 70)) + prompt
    params = {"max_tokens": rng.randrange(1, 40), "temperature": rng.choice([0.0, 0.7, 1.0]), "seed": i, "logprobs": 1}
    return {"token_ids": prompt, "sampling_params": params | {"ignore_eos": True}}


async def full(client: httpx.AsyncClient, i: int) -> tuple[list[int], list[float]]:
    answer = await client.post("/inference/v1/generate", json=request(i))
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def streamed(client: httpx.AsyncClient, i: int, stop_after: int | None) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    body = request(i) | {"stream": True}
    async with client.stream("POST", "/inference/v1/generate", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["token_ids"]
                    logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
            if stop_after is not None and len(tokens) >= stop_after:
                break
    return tokens, logprobs


async def crowd(url: str) -> dict[int, tuple[list[int], list[float]]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as client:
        leaving = {i for i in range(N) if i % 5 == 4}

        async def one(i: int) -> tuple[list[int], list[float]]:
            if i in leaving and i % 2:
                task = asyncio.create_task(full(client, i))
                await asyncio.sleep(0.05 * (i % 7))
                task.cancel()
                return [], []
            if i % 2 == 0:
                return await streamed(client, i, 1 if i in leaving else None)
            return await full(client, i)

        answers = await asyncio.gather(*[one(i) for i in range(N)])
        return {i: answer for i, answer in enumerate(answers) if i not in leaving}


async def alone(url: str, numbers: list[int]) -> dict[int, tuple[list[int], list[float]]]:
    async with httpx.AsyncClient(base_url=url, timeout=240) as client:
        return {i: await full(client, i) for i in numbers}


@pytest.mark.slow
def test_two_hundred_requests_and_forty_disconnects(demo: Server) -> None:
    survivors = asyncio.run(crowd(demo.url))
    demo.wait_idle()
    assert len(survivors) == 160
    solo = asyncio.run(alone(demo.url, sorted(survivors)))
    assert survivors == solo
    state = demo.get("/health?deep=1")
    assert state.status_code == 200
    assert demo.process.poll() is None
