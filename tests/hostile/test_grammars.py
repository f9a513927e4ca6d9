"""Grammars that cost too much, or are too many: no other client waits for them, and their memory is freed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.hostile import grammar_attacks as attacks
from tests.hostile.bystander import Bystander, resident
from tests.hostile.grammar_attacks import GENERATE, HOPELESS, body, bomb, choices

MIB = 1 << 20

pytestmark = pytest.mark.slow  # engine/test_trials.py has the parts


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("demo", "--grammar-cache-bytes", "32M") as running:
        yield running


def trials(server: Server) -> list[Any]:
    """The children in which grammars are being tried."""
    return [child for process in server.engine().children() for child in process.children()]


def until_quiet(server: Server) -> None:
    end = time.monotonic() + 60
    while trials(server) or server.metric("tokserve:grammars_compiling"):
        assert time.monotonic() < end, "a trial continues although no request waits for it"
        time.sleep(0.05)


@pytest.mark.parametrize("form", HOPELESS, ids=["optional", "regex", "doubling"])
def test_what_fails_with_its_second_token_is_refused_by_name(server: Server, form: dict[str, Any]) -> None:
    (field,) = form
    for stream in (False, True):
        answer = server.post(GENERATE, body(form) | {"stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == f"sampling_params.structured_outputs.{field}" and "limit" in error["message"]


def test_response_format_is_named_where_it_was_used(server: Server) -> None:
    schema = {"name": "n", "schema": HOPELESS[0]["json"]}
    request = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    answer = server.post("/v1/chat/completions", request)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format", answer.text


def test_a_limit_reached_during_generation_ends_the_request(server: Server) -> None:
    form = {"regex": r"(\w+\s*\d*){0,2000}"}  # its memory of expressions is used up after some hundred tokens
    params = {"max_tokens": 1500, "seed": 1, "ignore_eos": True, "temperature": 2.0}
    answer = server.post(GENERATE, body(form, **params))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "sampling_params.structured_outputs" and "cannot be followed" in error["message"]


def test_a_cheap_grammar_does_not_wait_for_costly_ones(server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        sent = [pool.submit(httpx.post, server.url + GENERATE, json=body(bomb(i)), timeout=120) for i in range(12)]
        for number in range(3):
            answer = server.post(GENERATE, body({"choice": ["yes", "no", f"number {number}"]}))
            assert answer.status_code == 200, answer.text
        assert not all(request.done() for request in sent), "the bombs were refused first"
        server.post("/abort_requests", {"all": True})  # the rest need not be waited for
        for request in sent:
            assert request.result().status_code in (200, 400)
    until_quiet(server)


def test_a_costly_grammar_is_refused_at_once_the_second_time(server: Server) -> None:
    first = server.post(GENERATE, body(bomb(77)))
    assert first.status_code == 400
    refused = server.metric("tokserve:grammar_refusals_total")
    again = server.post(GENERATE, body(bomb(77)))
    assert again.json()["error"]["message"] == first.json()["error"]["message"]
    assert server.metric("tokserve:grammar_refusals_total") == refused, "it was tried again"


def test_costly_grammars_of_disconnected_clients_are_cancelled(server: Server) -> None:
    asyncio.run(attacks.bombs_and_away(server.url, random.Random(1), time.monotonic() + 1.0))
    until_quiet(server)


def test_a_deadline_ends_a_trial(server: Server) -> None:
    answer = server.post(GENERATE, body(bomb(78)) | {"deadline_ms": 100})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "deadline"
    until_quiet(server)


def test_many_large_grammars_stay_within_the_cache() -> None:
    with Server("demo") as server:
        chance = random.Random(4)
        assert server.post(GENERATE, body(choices(chance))).status_code == 200  # all processes are there
        before = resident(server)
        for _ in range(140):
            assert server.post(GENERATE, body(choices(chance), max_tokens=2)).status_code == 200
        assert server.metric("tokserve:grammar_cache_bytes") <= 128 * MIB
        assert resident(server) < before + 150 * MIB


@pytest.mark.second_try("it counts rounds in seconds and resident memory: a stalled machine has fewer and more")
@pytest.mark.parametrize("attack", attacks.ATTACKS, ids=lambda attack: attack.__name__)
def test_other_clients_get_the_same_bits_during_attacks(attack: attacks.Attack) -> None:
    with Server("demo") as server:
        bystander = Bystander(server.url)
        asyncio.run(bystander.run_during([], 1.0))
        before = resident(server)
        assert asyncio.run(bystander.run_during([attack], 10.0)) >= 3
        until_quiet(server)
        server.wait_idle()
        assert resident(server) < before + 150 * MIB
