"""The blocking client: the same calls, from any thread, and nothing that outlives it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import pytest

from tests.rl.distribution import rl
from tests.rl.scripted_http import OK, connect, refusal
from tests.waiting import until

CHOICE = {"index": 0, "token_ids": b"", "logprobs": None, "finish_reason": "stop", "weight_versions": []}
Reply = Callable[[httpx.Request], Awaitable[httpx.Response]]


def blocking(answer: Reply) -> rl.Client:
    client = rl.Client("http://nowhere")
    connect(client._client, answer)
    return client


def test_both_clients_have_the_same_methods() -> None:
    for name, method in inspect.getmembers(rl.AsyncClient, inspect.isfunction):
        if not name.startswith("_"):
            twin = getattr(rl.Client, name)
            assert inspect.getdoc(twin), name
            expected = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
            assert [name for name in inspect.signature(twin).parameters if name != "self"] == expected, name


def test_many_prompts_are_in_flight_at_once() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        ids = msgspec.msgpack.decode(request.content)["token_ids"]
        arrived.append(ids)
        while len(arrived) < 3:  # none is answered until all are there
            await asyncio.sleep(0.001)
        return httpx.Response(200, content=msgspec.msgpack.encode({"choices": [CHOICE]}))

    arrived: list[bytes] = []
    with blocking(answer) as client:
        rollouts = client.generate([[1], [2], [3]])
    assert [rollout.prompt_ids.tolist() for rollout in rollouts] == [[1], [2], [3]]


def test_a_pause_is_extended_while_the_caller_computes_and_ended_when_it_raises() -> None:
    sent: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.url.path)
        return OK

    with blocking(answer) as client:
        with pytest.raises(KeyboardInterrupt), client.paused(lease=0.02):
            until(lambda: sent.count("/extend_pause") > 1)  # the trainer's step, which runs no event loop
            raise KeyboardInterrupt
        assert sent[0] == "/pause" and sent[-1] == "/resume" and sent.count("/extend_pause") > 1


def test_an_error_is_the_callers() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(409, json={"error": {"message": "no", "type": "t", "param": "p", "code": "c"}})

    with blocking(answer) as client, pytest.raises(rl.ServerError, match="409: no") as refused:
        client.update_weight_version("7")
    assert (refused.value.field, refused.value.code) == ("p", "c")


def test_a_closed_client_raises_client_closed() -> None:
    client = rl.Client("http://nowhere")
    client.close()
    client.close()
    with pytest.raises(rl.ClientClosed, match="closed"):
        client.state()


def test_closing_raises_in_a_waiting_thread() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        requested.set()
        return refusal(503, **{"retry-after": "500"})  # it is to be sent again

    def wait() -> None:
        with pytest.raises(rl.ClientClosed):
            client.state()
        notified.set()

    requested, notified = threading.Event(), threading.Event()
    client = blocking(answer)
    threading.Thread(target=wait, daemon=True).start()
    assert requested.wait(60)
    client.close()
    assert notified.wait(60)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_makes_its_own() -> None:
    with rl.Client("http://nowhere") as client:
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(30)  # ends what waits for ever
            try:
                client.close()  # does nothing, as there is no loop
                client.state()
            except rl.ClientClosed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_client_that_is_collected_ends_its_thread() -> None:
    before = set(threading.enumerate())
    client = rl.Client("http://nowhere")
    (thread,) = set(threading.enumerate()) - before
    del client
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
