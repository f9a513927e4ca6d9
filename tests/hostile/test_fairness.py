"""Clients with very many requests, or that do not read replies: other clients are served, with the same bits.

The attacker and the bystander have different addresses of the loopback network.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.hostile import stream_attacks as attacks
from tests.hostile.bystander import Bystander, resident
from tests.hostile.grammar_attacks import GENERATE, body
from tests.hostile.stream_attacks import connect, large
from tests.waiting import until

MIB = 1 << 20
ATTACKER = "127.0.0.2"
SECONDS = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("demo", "--max-num-seqs", "16") as running:
        yield running


def attacker(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=SECONDS, transport=httpx.HTTPTransport(local_address=ATTACKER))


def answered(server: Server, request: dict[str, Any]) -> list[Any]:
    answer = server.post(GENERATE, request)
    assert answer.status_code == 200, answer.text
    return [(choice["token_ids"], choice["logprobs"]) for choice in answer.json()["choices"]]


@pytest.mark.slow
def test_an_unread_stream_is_stalled_until_it_is_read(server: Server) -> None:
    request = large(random.Random(5), n=8) | {"speculate": False}  # so many that they are stalled before they end
    expected = answered(server, request | {"stream": False})

    async def scene() -> bytes:
        loop = asyncio.get_running_loop()
        sock = await connect(server.url, request)
        await asyncio.to_thread(until, lambda: server.metric("tokserve:num_requests_stalled") == 8)
        tokens = server.metric("tokserve:generation_tokens_total")
        request_body = body(None, max_tokens=16, ignore_eos=True)
        await asyncio.to_thread(answered, server, request_body)
        assert server.metric("tokserve:generation_tokens_total") == tokens + 16, "the stalled stream got tokens"
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), SECONDS)
        sock.close()
        return received

    received = asyncio.run(scene())
    events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
    streamed: dict[int, list[int]] = {}
    for event in events:
        for choice in json.loads(event)["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [streamed[i] for i in range(8)] == [tokens for tokens, _ in expected]
    server.wait_idle()


@pytest.mark.slow
def test_unread_streams_give_up_their_slots(server: Server) -> None:
    async def scene() -> None:
        socks = [await connect(server.url, large(random.Random(i))) for i in range(4)]
        await asyncio.to_thread(until, lambda: server.metric("tokserve:num_requests_stalled") >= 16)
        for seed in range(3):  # from the same address
            assert await asyncio.to_thread(answered, server, body(None, seed=seed))
        for sock in socks:
            sock.close()

    asyncio.run(scene())
    server.wait_idle()


@pytest.mark.slow
def test_a_client_does_not_wait_for_many_requests_of_another(server: Server) -> None:
    request = body(None, max_tokens=8, ignore_eos=True, seed=1, logprobs=2)
    expected = answered(server, request)

    async def scene() -> None:
        params = {"n": 32, "max_tokens": 1500, "ignore_eos": True}
        transport = httpx.AsyncHTTPTransport(local_address=ATTACKER)
        async with httpx.AsyncClient(base_url=server.url, timeout=SECONDS, transport=transport) as client:
            crowd = [asyncio.ensure_future(client.post(GENERATE, json=body(None, seed=i, **params))) for i in range(8)]
            await asyncio.to_thread(until, lambda: server.metric("tokserve:num_requests_waiting") > 100)
            for _ in range(3):
                assert await asyncio.to_thread(answered, server, request) == expected
            assert not any(task.done() for task in crowd), "the crowd was served first"
            assert server.metric("tokserve:displaced_requests_total") >= 1
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(scene())
    server.wait_idle()


@pytest.mark.slow
def test_a_share_per_client() -> None:
    with Server("demo", "--max-requests-per-client", "4", "--api-server-count", "2") as server:
        with attacker(server) as client:
            answer = client.post(GENERATE, json=body(None, n=5))
            assert answer.status_code == 429 and answer.json()["error"]["code"] == "client_limit", answer.text
            assert "--max-requests-per-client" in answer.json()["error"]["message"] and answer.headers["retry-after"]
            with client.stream(
                "POST", GENERATE, json=body(None, n=4, max_tokens=1900, ignore_eos=True) | {"stream": True}
            ):
                assert client.post(GENERATE, json=body(None)).status_code == 429
                assert server.post(GENERATE, body(None, n=4)).status_code == 200  # another client
        until(lambda: server.post(GENERATE, body(None, n=4)).status_code == 200)
        assert server.metric("tokserve:request_refusals_total") == 2


@pytest.mark.slow
def test_a_header_distinguishes_the_clients_of_a_proxy() -> None:
    with Server("demo", "--max-requests-per-client", "1", "--client-header", "X-Forwarded-For") as server:
        hold = body(None, max_tokens=1900, ignore_eos=True) | {"stream": True}
        with httpx.stream("POST", server.url + GENERATE, json=hold, headers={"x-forwarded-for": "6.6.6.6, 1.1.1.1"}):
            one, other = (
                server.post(GENERATE, body(None), headers={"x-forwarded-for": address})
                for address in ("1.1.1.1", "2.2.2.2")
            )
        assert (one.status_code, other.status_code) == (429, 200)


@pytest.mark.slow
@pytest.mark.second_try("it counts rounds in seconds and resident memory: a stalled machine has fewer and more")
@pytest.mark.parametrize("attack", attacks.ATTACKS, ids=lambda attack: attack.__name__)
def test_other_clients_get_the_same_bits_during_attacks(attack: Any) -> None:
    with Server("demo", "--kv-cache-memory-bytes", "64M") as server:  # pages count when they are used first
        bystander = Bystander(server.url)
        asyncio.run(bystander.run_during([], 2.0))
        quiet = sorted(bystander.seconds)
        before = resident(server)
        bystander.seconds.clear()
        assert asyncio.run(bystander.run_during([partial(attack, source=ATTACKER)], 15.0)) >= 3
        loud = sorted(bystander.seconds)
        print(
            f"quiet median {quiet[len(quiet) // 2]:.3f} s, worst {quiet[-1]:.3f} s; beside the attack {len(loud)} "
            f"requests, median {loud[len(loud) // 2]:.3f} s, worst {loud[-1]:.3f} s; "
            f"memory {(resident(server) - before) / MIB:+.0f} MiB"
        )
        server.wait_idle()
        assert resident(server) < before + 150 * MIB
