"""The trainer's client against scripted answers: what is sent again, and what becomes of an update that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load

from tokserve.errors import RequestError, TransferFailed
from tokserve.rl import ServerError, TokserveClient, sticky_seeds
from tokserve.rl.broadcast import TransferGroup
from tokserve.rl.deltas import file_pieces

Answer = httpx.Response | Exception
WEIGHTS = [("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]
OK = httpx.Response(200, json={"weight_version": "7", "epoch": 7})
REPLY = {"choices": [{"index": 0, "token_ids": b"", "logprobs": None, "finish_reason": "stop", "weight_versions": []}]}


def refusal(status: int, **headers: str) -> httpx.Response:
    error = {"message": "no", "type": "t", "param": None, "code": None}
    return httpx.Response(status, json={"error": error}, headers=headers)


def run(script: dict[str, list[Answer]], use: Callable[[TokserveClient], Any]) -> tuple[list[str], Any]:
    """What was sent (paths), and the result or the exception.  Of a path's answers the last one stays."""
    sent: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        await request.aread()
        sent.append(request.url.path)
        answers = script.get(request.url.path, [OK])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def scene() -> Any:
        async with TokserveClient("http://nowhere") as client:
            await client._http.aclose()
            client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://nowhere")
            try:
                return await use(client)
            except (ServerError, httpx.TransportError) as error:
                return error

    return sent, asyncio.run(scene())


def generated() -> httpx.Response:
    return httpx.Response(200, content=msgspec.msgpack.encode(REPLY))


def test_a_group_that_the_server_refuses_does_not_keep_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    others_came, formed = threading.Event(), threading.Event()

    def group(*_: Any) -> None:
        others_came.wait(60)
        formed.set()

    monkeypatch.setattr("tokserve.rl.client.TransferGroup", group)
    script: dict[str, list[Answer]] = {"/init_weight_transfer_engine": [refusal(409)]}
    try:
        _, error = run(script, lambda client: client.join("gloo", "127.0.0.1", 1))
        assert isinstance(error, ServerError) and error.status == 409 and not formed.is_set()
    finally:
        others_came.set()
    assert formed.wait(60)


def test_sampling_masks_of_a_rollout() -> None:
    packed = {"counts": np.array([2, -1, -2, 1], "<i4").tobytes(), "ids": np.array([4, 9, 7], "<i4").tobytes()}
    floats = np.array([-0.5, -1.0, -2.0, 0.0], "<f4").tobytes()
    choice = REPLY["choices"][0] | {"sampling_mask": packed, "sampling_logprobs": floats, "kept_logprob": floats}
    reply = httpx.Response(200, content=msgspec.msgpack.encode({"choices": [choice]}))
    _, (rollout,) = run({"/inference/v1/generate": [reply]}, lambda client: client.generate([[1]]))
    assert [None if row is None else row.tolist() for row in rollout.sampling_mask] == [[4, 9], None, None, [7]]
    assert rollout.mask_truncated.tolist() == [False, False, True, False]
    assert rollout.sampling_logprobs.tolist() == rollout.kept_logprob.tolist() == [-0.5, -1.0, -2.0, 0.0]


def test_a_rollout_is_sent_again_only_if_it_cannot_have_run() -> None:
    path = "/inference/v1/generate"
    for first in (httpx.ConnectError("refused"), refusal(503, **{"retry-after": "0"})):
        sent, rollouts = run({path: [first, generated()]}, lambda client: client.generate([[1]]))
        assert sent == [path] * 2 and rollouts[0].finish_reason == "stop"
    for first in (httpx.ReadError("cut"), httpx.RemoteProtocolError("cut"), refusal(503), refusal(500), refusal(409)):
        sent, error = run({path: [first, generated()]}, lambda client: client.generate([[1]]))
        assert sent == [path] and isinstance(error, ServerError | httpx.TransportError)
    restarted: list[Answer] = [httpx.ConnectError("refused"), refusal(503, **{"retry-after": "0"}), generated()]
    sent, rollouts = run({path: restarted}, lambda client: client.generate([[1]]))
    assert sent == [path] * 3 and rollouts[0].finish_reason == "stop"
    sent, error = run({path: [httpx.ConnectError("refused")]}, lambda client: client.generate([[1]]))
    assert sent == [path] * 2 and isinstance(error, httpx.ConnectError)


def test_seeds_are_one_for_each_prompt() -> None:
    for seeds in ([1], [1, 2, 3], []):
        with pytest.raises(ValueError, match=f"2 prompts and {len(seeds)} seeds"):
            run({}, lambda client, seeds=seeds: client.generate([[1], [2]], seeds=seeds))  # type: ignore[misc]


@pytest.mark.parametrize("prompts", [[5, 6], ["text"], [[1], [1.5]], [[[1]]]])
def test_prompts_are_lists_of_ids_or_nothing_is_sent(prompts: Any) -> None:
    async def use(client: TokserveClient) -> Any:
        with pytest.raises(ValueError, match=r"prompts\[[01]\] must be a list of token ids"):
            await client.generate(prompts)

    assert run({}, use)[0] == []


def test_a_backend_that_there_is_not_is_told_before_anybody_is_met() -> None:
    with pytest.raises(RequestError, match="backend must be one of gloo, nccl, got 'mpi'"):
        TransferGroup("mpi", "127.0.0.1", 1, 0, 2, 1.0)


@pytest.mark.parametrize("prompt", [[1, 2**31], [-(2**31) - 1], np.array([2**32 + 5])])
def test_ids_that_no_message_can_hold_are_refused_here(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\] .* 32 bits"):
        run({}, lambda client: client.generate([[1], prompt]))


def test_a_rollout_that_fails_takes_the_others_along() -> None:
    left: list[bool] = []

    async def scene() -> None:
        others = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            if msgspec.msgpack.decode(await request.aread())["token_ids"][0] == 1:
                await others.wait()
                return refusal(400)
            try:
                others.set()
                return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
            except asyncio.CancelledError:
                left.append(True)
                raise

        async with TokserveClient("http://nowhere") as client:
            await client._http.aclose()
            client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://nowhere")
            with pytest.raises(ServerError):
                await client.generate([[1], [2]])
            await asyncio.sleep(0)
            assert left == [True]

    asyncio.run(scene())


START, PUT, FINISH, ABORT = "/start_weight_update", "/update_weights", "/finish_weight_update", "/abort_weight_update"


@pytest.mark.parametrize(
    ("script", "sent"),
    [
        ({}, [START, PUT, FINISH]),
        ({START: [refusal(409)]}, [START]),  # somebody else's is open: it is not ours to abort
        ({START: [httpx.ConnectError("refused")]}, [START]),
        ({START: [httpx.ReadError("cut")]}, [START, ABORT]),  # the answer may have been lost
        ({PUT: [refusal(400)]}, [START, PUT, ABORT]),
        ({PUT: [httpx.ReadError("cut")]}, [START, PUT, ABORT]),
        ({FINISH: [refusal(400)]}, [START, PUT, FINISH, ABORT]),
        ({FINISH: [refusal(400)], ABORT: [refusal(409)]}, [START, PUT, FINISH, ABORT]),
    ],
    ids=str,
)
def test_an_update_is_never_left_open_and_never_sent_twice(script: dict[str, list[Answer]], sent: list[str]) -> None:
    found, result = run(dict(script), lambda client: client.update_weights(WEIGHTS))
    assert found == sent
    assert (result == {"weight_version": "7", "epoch": 7}) is (not script)


def test_weights_are_sent_as_a_safetensors_file_float8_as_it_is() -> None:
    tensors = {"a": torch.randn(5, 3).to(torch.float8_e4m3fn), "b": torch.randn(5, 1), "c": torch.ones(3).bfloat16()}

    found = load(b"".join(file_pieces(tensors)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].float(), tensor.float())


class DeafGroup:
    """A process group whose other end never comes."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert self.interrupted.wait(60), "nobody ends the broadcast"
        raise TransferFailed("the transfer was interrupted")

    def interrupt(self) -> None:
        self.interrupted.set()


@pytest.mark.parametrize("failure", [refusal(400), httpx.ReadError("cut")], ids=["refused", "cut"])
def test_nobody_goes_on_sending_what_the_server_does_not_receive(failure: Answer) -> None:
    group = DeafGroup()

    async def push(client: TokserveClient) -> None:
        client._group = group  # type: ignore[assignment]
        try:
            await client.update_weights(WEIGHTS)
        finally:
            assert client._group is None and group.interrupted.is_set()

    sent, error = run({"/update_weights": [failure]}, push)
    assert sent == ["/start_weight_update", "/update_weights", "/abort_weight_update"]
    assert isinstance(error, ServerError | httpx.ReadError)


def test_sticky_seeds_depend_on_the_prompt_and_the_base_alone() -> None:
    prompts = [[1, 2, 3], [1, 2], [3, 2, 1], [1, 2, 3]]
    seeds = sticky_seeds(prompts)
    assert seeds[0] == seeds[3] and len({*seeds}) == 3 and all(0 <= seed < 1 << 62 for seed in seeds)
    assert sticky_seeds(np.array([[1, 2, 3]])) == seeds[:1] == sticky_seeds(iter(prompts[:1]))
    assert not {*sticky_seeds(prompts, 1)} & {*seeds}
