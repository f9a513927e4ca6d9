"""Random requests in random batches, on servers with other options, during pauses and updates: equal replies.

What a plain server says to a request alone is checked by asking again in other words; then every other server has to
say the same, `==`, in every format.  `python -m pytest -m slow tests/chaos/test_crossings.py`
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.adapters import write_adapter
from tests.chaos import crossings
from tests.chaos.crossings import ADAPTERS, CONTEXT, PLAIN, Body, answer, ask, way
from tests.e2e.server import Server
from tokserve.checkpoint import DEMO_DIR

POOL, CROWD, CROWDS = 40, 25, 4  # requests
CUTTING = ("stop", "stop_token_ids", "stop_token_sequences", "repetition_detection")
LOOKING_AT_OUTPUT = ("presence_penalty", "frequency_penalty", "min_tokens", "structured_outputs")
ALL = ("--max-model-len", str(CONTEXT), "--max-logprobs", "-1")
OPTIONS = [
    ("--max-num-seqs", "2", "--block-size", "48", "--depth", "2", "--api-server-count", "2"),
    ("--kv-cache-memory-bytes", "600K", "--max-num-batched-tokens", "33", "--weight-staging", "in_place"),
    ("--no-enable-prefix-caching", "--enforce-eager", "--cpu-threads", "1", "--max-chunk", "7"),
    ("--block-size", "5", "--kv-cache-memory-bytes", "700K", "--depth", "2", "--max-num-batched-tokens", "7"),
    ("-dp", "3", "--kv-cache-memory-bytes", "600K", "--max-num-batched-tokens", "33"),
    ("-pp", "2", "--kv-cache-memory-bytes", "400K", "--max-num-batched-tokens", "33", "--depth", "2"),
]
TWO = ("-tp", "2")  # other bits than one rank, and equal bits with any other options
OPTIONS_OF_TWO = [
    (*TWO, "--kv-cache-memory-bytes", "300K", "--max-num-batched-tokens", "33", "--weight-staging", "in_place"),
    (*TWO, "--kv-cache-memory-bytes", "300K", "--max-num-batched-tokens", "33", "--kv-offloading-size", "0.01"),
    (*TWO, "-dp", "2", "--max-num-seqs", "2", "--block-size", "48", "--kv-offloading-size", "0.01"),
    (*TWO, "-pp", "2", "--no-enable-prefix-caching", "--max-chunk", "7"),
]
SERVERS = [*(((), options) for options in OPTIONS), *((TWO, options) for options in OPTIONS_OF_TWO)]
TROUBLE = [
    ["/pause?mode=keep&clear_cache=false", "/resume"],
    ["/pause?mode=keep", "/resume"],
    ["/reset_prefix_cache"],
    ["/sleep?level=1&mode=keep", "/wake_up"],
    ["/update_weights"],
    ["/release_kv_cache_memory", "/wake_up"],
]


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    modules = [
        f"{name}={write_adapter(tmp_path_factory.mktemp(name), DEMO_DIR, seed=ord(name[0]))}" for name in ADAPTERS
    ]
    return [*ALL, "--enable-lora", "--lora-modules", *modules]


@pytest.fixture(scope="module")
def plain(common: list[str], request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server("demo", *common, *request.param) as server:
        yield server


def run(server: Server, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def connected() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=280) as client:
            await work(client)

    asyncio.run(connected())
    server.wait_idle()
    assert server.get("/health?deep=1").status_code == 200  # the accounts of the KV cache
    assert not any("Traceback" in line or " ERROR" in line for line in server.log), "\n".join(server.log[-200:])


async def check_alone(client: httpx.AsyncClient, requested: Body) -> None:
    """An output's second half has the same logprobs as a prompt, and is what follows on the first."""
    status, reply = await ask(client, requested, PLAIN)
    if status != 200:
        return
    params, prompt = requested["sampling_params"], requested["token_ids"]
    tokens, _, _, _, logprobs, _ = answer(reply, requested)
    if any(params.get(name) for name in LOOKING_AT_OUTPUT) or len(prompt) + len(tokens) == CONTEXT:
        return
    kept = {name: value for name, value in params.items() if name not in CUTTING and "prompt" not in name}
    kept["ignore_eos"] = True
    half = len(tokens) // 2
    scores = {"prompt_logprobs": params.get("logprobs", 0), "prompt_logprobs_start": len(prompt) + half}
    again = requested | {"token_ids": prompt + tokens, "sampling_params": kept | scores | {"max_tokens": 1}}
    status, reply = await ask(client, again, PLAIN)
    if status == 200 and "logprobs" in params and "logprob_token_ids" not in params:
        assert answer(reply, again)[5] == logprobs[half:], requested
    again |= {"token_ids": prompt + tokens[:half], "sampling_params": kept | {"max_tokens": len(tokens) - half}}
    status, reply = await ask(client, again, PLAIN)
    if status == 200:
        assert (answer(reply, again)[0], answer(reply, again)[4]) == (tokens[half:], logprobs[half:]), requested


async def trouble(client: httpx.AsyncClient, rng: random.Random, over: asyncio.Event) -> None:
    """Pauses, sleeps and updates that must change no reply."""
    while not over.is_set():
        for path in rng.choice(TROUBLE):
            body = {"weight_dir": str(DEMO_DIR)} if path == "/update_weights" else {}
            assert (await client.post(path, json=body)).status_code == 200, path
            await asyncio.sleep(rng.random() * 0.1)


async def check_one(
    client: httpx.AsyncClient, requested: Body, ending: dict[str, Any], expected: Sequence[Any]
) -> None:
    """`expected`: the reply to each choice as a separate request."""
    status, reply = await ask(client, requested, ending)
    assert status == 200, reply
    for index, actual in enumerate(expected):
        assert answer(reply, requested, index)[:5] == answer(actual, requested)[:5], (requested, ending)
        text = actual["choices"][0]["text"] if ending["output_mode"] == "text" else ""
        assert reply["choices"][index].get("text", "") == text, (requested, ending)
    assert answer(reply, requested)[5] == answer(expected[0], requested)[5], (requested, ending)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("plain", "options"), SERVERS, indirect=["plain"], ids=" ".join)
def test_replies_are_the_same_alone_and_in_a_batch(common: list[str], plain: Server, options: tuple[str, ...]) -> None:
    rng = random.Random(" ".join(options))
    pool = [crossings.request(rng) for _ in range(POOL)]
    jobs: list[tuple[Body, dict[str, Any], list[Any]]] = []

    async def alone(client: httpx.AsyncClient) -> None:
        for requested in pool:
            await check_alone(client, requested)
        while len(jobs) < CROWD * CROWDS:
            requested = rng.choice(pool)
            ending, params = way(rng, requested), requested["sampling_params"]
            singles = [
                requested | {"sampling_params": params | {"seed": params["seed"] + i}} for i in range(ending["n"])
            ]
            replies = [await ask(client, single, PLAIN) for single in singles]
            if all(status == 200 for status, _ in replies):
                jobs.append((requested, ending, [reply for _, reply in replies]))

    async def together(client: httpx.AsyncClient) -> None:
        for first in range(0, len(jobs), CROWD):
            over = asyncio.Event()
            troubling = asyncio.create_task(trouble(client, rng, over))
            await asyncio.gather(*[check_one(client, *job) for job in jobs[first : first + CROWD]])
            over.set()
            await troubling

    run(plain, alone)
    with Server("demo", *common, *options) as server:
        run(server, together)
