"""numpy's and torch's scalars and arrays in the client's arguments (rl-faults F13)."""

from __future__ import annotations

import asyncio
import enum
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.rl.distribution import rl
from tests.rl.scripted_http import bodies, connected, refusal, run

SAMPLED = {
    "max_tokens": np.int64(3),
    "temperature": np.float32(0.5),
    "top_p": np.float64(0.5),
    "min_tokens": np.array(1),
    "stop_token_ids": np.array([4, 5]),
    "ignore_eos": np.bool_(True),
    "stop": np.array(["a", "b"]),
    "logit_bias": {np.int64(5): np.float32(4.0)},
    "bad_token_sequences": [np.array([1, 2]), (3, np.int32(4))],
}
PLAIN = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "min_tokens": 1,
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "stop": ["a", "b"],
    "logit_bias": {5: 4.0},
    "bad_token_sequences": [[1, 2], [3, 4]],
}


class Level(enum.IntEnum):
    KV = 1


def sent(use: Any) -> list[dict[str, Any]]:
    """The msgpack bodies that are sent, each refused."""
    received: list[dict[str, Any]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        received.append(msgspec.msgpack.decode(request.content))
        return refusal(400)

    async def scene() -> None:
        async with connected(answer) as client:
            with pytest.raises(rl.ServerError):
                await use(client)

    asyncio.run(scene())
    return received


def test_sampling_parameters_of_numpy_are_sent_as_plain_ones() -> None:
    prompts = np.array([[1, 2], [3, 4]])
    calls = sent(
        lambda client: client.generate(
            prompts,
            n=np.int64(2),
            seeds=np.array([7, 8], np.uint64),
            priority=np.int8(1),
            deadline_ms=np.int64(9),
            speculate=np.bool_(False),
            **SAMPLED,
        )
    )
    assert sorted(call["sampling_params"]["seed"] for call in calls) == [7, 8]
    for call in calls:
        params = call["sampling_params"]
        assert {name: params[name] for name in PLAIN} == PLAIN and params["n"] == 2
        assert (call["priority"], call["deadline_ms"], call["speculate"]) == (1, 9, False)


def test_starts_and_seeds_may_be_arrays_and_must_be_integers() -> None:
    (call,) = sent(lambda client: client.score([[1, 2, 3]], np.array([2]), temperature=np.float16(0.5)))
    assert call["sampling_params"] | {"prompt_logprobs_start": 2, "temperature": 0.5} == call["sampling_params"]
    for values in (np.array([1.5]), [2.0], [None], 5, np.int64(5), "1", iter([1])):
        for name, use in (
            ("starts", lambda client, values=values: client.score([[1, 2]], values)),
            ("seeds", lambda client, values=values: client.generate([[1]], seeds=values)),
        ):
            with pytest.raises(TypeError, match=name):
                run({}, use)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"stop": object()}, r"sampling_params\.stop: a value of type object cannot be sent"),
        ({"logit_bias": {"5": {1j}}}, r"sampling_params\.logit_bias\.5\[0\]: a value of type complex"),
        ({"logit_bias": {None: 1.0}}, r"sampling_params\.logit_bias: a name of type NoneType"),
        ({"temperature": np.complex64(1)}, r"sampling_params\.temperature: a value of type complex"),
        ({"group_id": object()}, "group_id: a value of type object"),
    ],
)
def test_what_cannot_be_sent_is_a_type_error_with_the_fields_name(arguments: dict[str, Any], field: str) -> None:
    for use in (
        lambda client: client.generate([[1]], **arguments),
        lambda client: anext(client.stream([1], **arguments)),
    ):
        with pytest.raises(TypeError, match=field):
            run({}, use)


def test_control_calls_take_them_too() -> None:
    async def use(client: rl.AsyncClient) -> None:
        await client.pause(lease=np.float32(2.0))
        await client.sleep(np.int64(2))
        await client.sleep(Level.KV)
        await client.wake_up(np.array(["weights"]))
        await client.abort(request_ids=np.array(["a"]))
        await client.collective_rpc("m", (np.arange(2), Path("a/b")), {"x": {np.float64(0.5)}})
        with pytest.raises(TypeError, match=r"args\[0\]"):
            await client.collective_rpc("m", [object()])

    answers = {
        path: [httpx.Response(200, json={"aborted": 1, "results": []})]
        for path in ("/abort_requests", "/collective_rpc")
    }
    sent = [json.loads(json.dumps(body)) for _, body in bodies(answers, use, take_over=False)]
    assert sent == [
        {"mode": "abort", "clear_cache": False, "lease": 2.0},
        {"level": 2, "mode": "abort"},
        {"level": 1, "mode": "abort"},
        {"tags": ["weights"]},
        {"request_ids": ["a"]},
        {"method": "m", "args": [[0, 1], "a/b"], "kwargs": {"x": [0.5]}},
    ]


def test_seeds_of_prompts_take_them_too() -> None:
    prompts = [[1, 2], [3]]
    assert rl.sticky_seeds([np.array(prompt) for prompt in prompts], np.int64(7)) == rl.sticky_seeds(prompts, 7)


def test_tensors_are_converted_where_torch_is_there() -> None:
    if rl.__name__ != "tokserve.rl":  # the client alone, which needs no torch
        return
    import torch

    (call,) = sent(
        lambda client: client.generate(
            torch.tensor([[1, 2]]),
            seeds=torch.tensor([7]),
            max_tokens=torch.tensor(3),
            min_p=torch.tensor(0.5, dtype=torch.bfloat16),
        )
    )
    params = call["sampling_params"]
    assert (params["seed"], params["max_tokens"], params["min_p"]) == (7, 3, 0.5)
    assert np.frombuffer(call["token_ids"], "<i4").tolist() == [1, 2]
