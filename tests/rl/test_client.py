"""The trainer's client against scripted answers: requests that are sent again, and how replies are read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.rl.distribution import rl
from tests.rl.scripted_http import OK, Answer, connected, refusal, run

REPLY = {"choices": [{"index": 0, "token_ids": b"", "logprobs": None, "finish_reason": "stop", "weight_versions": []}]}

SCORED = {"token_logprobs": np.array([-0.5], "<f4").tobytes()}


def generated() -> httpx.Response:
    return httpx.Response(200, content=msgspec.msgpack.encode(REPLY))


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
    again: tuple[Answer, ...] = (
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("dropped"),
        refusal(503, **{"retry-after": "0"}),
        refusal(429, **{"retry-after": "0"}),
    )
    for first in again:
        sent, rollouts = run({path: [first, generated()]}, lambda client: client.generate([[1]]))
        assert sent == [path] * 2 and rollouts[0].finish_reason == "stop"
    final: tuple[Answer, ...] = (
        httpx.ReadError("cut"),
        httpx.RemoteProtocolError("cut"),
        refusal(503),
        refusal(429),
        refusal(500),
        refusal(409),
        refusal(500, **{"retry-after": "0"}),
        refusal(503, **{"retry-after": "nan"}),
    )
    for first in final:
        sent, error = run({path: [first, generated()]}, lambda client: client.generate([[1]]))
        assert sent == [path] and isinstance(error, rl.ServerError | httpx.TransportError)
    restarted: list[Answer] = [httpx.ConnectError("refused"), refusal(503, **{"retry-after": "0"}), generated()]
    sent, rollouts = run({path: restarted}, lambda client: client.generate([[1]]))
    assert sent == [path] * 3 and rollouts[0].finish_reason == "stop"
    sent, error = run({path: [httpx.ConnectError("refused")]}, lambda client: client.generate([[1]]))
    assert sent == [path] * 2 and isinstance(error, httpx.ConnectError)


def test_a_server_that_stays_busy_is_asked_for_so_long_and_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    """rl-faults E4: retries are bounded, and never silent."""

    async def scene(status: int, after: str) -> list[str]:
        sent: list[str] = []

        async def answer(request: httpx.Request) -> httpx.Response:
            sent.append(request.url.path)
            return refusal(status, **{"retry-after": after})

        async with connected(answer, patience=0.2) as client:
            for call in (client.generate([[1]]), client.resume(), anext(client.stream([1]))):
                with pytest.raises(rl.ServerError) as caught:
                    await call
                assert caught.value.status == status
        return sent

    for status in (429, 503):
        assert len(asyncio.run(scene(status, "60"))) == 3, "what comes too late is not waited for"
        caplog.clear()
        assert len(asyncio.run(scene(status, "0.001"))) > 3
        assert len(caplog.records) == 1 and "sent again" in caplog.text and str(status) in caplog.text


def test_the_id_of_a_stream_that_was_left_may_be_used_again_at_once() -> None:
    """rl-faults E5: the server has not noticed yet that the first has gone."""
    taken = httpx.Response(409, json={"error": {"message": "m", "type": "t", "param": None, "code": "duplicate_id"}})
    event = json.dumps({"choices": [REPLY["choices"][0] | {"token_ids": "", "finish_reason": None}]})
    answers = [
        httpx.Response(200, text=f"data: {event}\n\n"),
        taken,
        taken,
        httpx.Response(200, text=f"data: {event}\n\ndata: [DONE]\n\n"),
        taken,
    ]

    async def answer(request: httpx.Request) -> httpx.Response:
        return answers.pop(0)

    async def scene() -> None:
        async with connected(answer) as client:
            first = client.stream([1], request_id="r")
            await anext(first)
            await first.aclose()
            assert len([delta async for delta in client.stream([1], request_id="r")]) == 1
            with pytest.raises(rl.ServerError, match="409"):
                await anext(client.stream([1], request_id="another"))

    asyncio.run(scene())
    assert not answers


def test_seeds_are_one_for_each_prompt() -> None:
    for seeds in ([1], [1, 2, 3], []):
        with pytest.raises(ValueError, match=f"2 prompts and {len(seeds)} seeds"):
            run({}, lambda client, seeds=seeds: client.generate([[1], [2]], seeds=seeds))  # type: ignore[misc]


@pytest.mark.parametrize("prompts", [[5, 6], ["text"], [[1], [1.5]], [[[1]]]])
def test_prompts_are_lists_of_ids_or_nothing_is_sent(prompts: Any) -> None:
    async def use(client: rl.AsyncClient) -> Any:
        with pytest.raises(ValueError, match=r"prompts\[[01]\] must be a list of token ids"):
            await client.generate(prompts)

    assert run({}, use)[0] == []


@pytest.mark.parametrize("prompt", [[1, 2**31], [-(2**31) - 1], np.array([2**32 + 5])])
def test_ids_that_no_message_can_hold_are_refused_here(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\] .* 32 bits"):
        run({}, lambda client: client.generate([[1], prompt]))


def first_id(request: httpx.Request) -> int:
    return int(np.frombuffer(msgspec.msgpack.decode(request.content)["token_ids"], "<i4")[0])


def test_a_lost_connection_cancels_the_other_prompts() -> None:
    left: list[bool] = []

    async def scene() -> None:
        others = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            if first_id(request) == 1:
                await others.wait()
                raise httpx.ReadError("cut")
            try:
                others.set()
                return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
            except asyncio.CancelledError:
                left.append(True)
                raise

        async with connected(answer) as client:
            with pytest.raises(httpx.ReadError):
                await client.generate([[1], [2]])
            await asyncio.sleep(0)
            assert left == [True]

    asyncio.run(scene())


def test_a_refused_prompt_leaves_the_others_their_results() -> None:
    """rl-faults E4: one prompt that is too long does not take the others' rollouts with it."""

    async def answer(request: httpx.Request) -> httpx.Response:
        if first_id(request) in (7, 8):
            return refusal(400)
        reply = REPLY if "prompt_logprobs" not in str(request.content) else REPLY | {"prompt_logprobs": SCORED}
        return httpx.Response(200, content=msgspec.msgpack.encode(reply))

    async def scene() -> None:
        async with connected(answer) as client:
            with pytest.raises(rl.PromptsFailed, match=r"2 of 4 prompts failed; prompts\[1\]: no") as caught:
                await client.generate([[1], [7], [2], [8]])
            assert [rollout.prompt_index for rollout in caught.value.results] == [0, 2]
            assert {index: error.status for index, error in caught.value.failures.items()} == {1: 400, 3: 400}
            assert isinstance(caught.value, rl.ServerError) and caught.value.status == 400
            with pytest.raises(rl.PromptsFailed) as caught:
                await client.score([[7, 7], [1, 1]])
            assert caught.value.results[0] is None and caught.value.results[1].tolist() == [-0.5]
            with pytest.raises(rl.ServerError) as all_failed:
                await client.generate([[7], [8]])
            assert type(all_failed.value) is rl.ServerError

    asyncio.run(scene())


def test_sticky_seeds_depend_on_the_prompt_and_the_base_alone() -> None:
    prompts = [[1, 2, 3], [1, 2], [3, 2, 1], [1, 2, 3]]
    seeds = rl.sticky_seeds(prompts)
    assert seeds[0] == seeds[3] and len({*seeds}) == 3 and all(0 <= seed < 1 << 62 for seed in seeds)
    assert rl.sticky_seeds(np.array([[1, 2, 3]])) == seeds[:1] == rl.sticky_seeds(iter(prompts[:1]))
    assert not {*rl.sticky_seeds(prompts, 1)} & {*seeds}


@pytest.mark.parametrize("when", ["while it pauses", "in the block", "while it resumes"])
def test_a_pause_does_not_outlive_its_block(when: str) -> None:
    sent: list[str] = []
    at = {"while it pauses": "/pause", "in the block": None, "while it resumes": "/resume"}[when]

    async def scene() -> None:
        arrived = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            sent.append(request.url.path)
            if request.url.path == at:
                arrived.set()
                await asyncio.sleep(0.01 if at == "/resume" else 60)
            sent.append(f"{request.url.path} done")
            return OK

        async def block(client: rl.AsyncClient) -> None:
            async with client.paused(lease=5):
                if at is None:
                    arrived.set()
                    await asyncio.sleep(60)

        async with connected(answer) as client:
            task = asyncio.create_task(block(client))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scene())
    assert sent[-1] == "/resume done" and sent.count("/resume") == 1


def test_a_pause_that_is_refused_is_not_resumed() -> None:
    async def use(client: rl.AsyncClient) -> None:
        async with client.paused():
            raise AssertionError

    sent, error = run({"/pause": [refusal(409)]}, use)
    assert sent == ["/pause"] and isinstance(error, rl.ServerError)


def test_of_several_pauses_the_last_one_that_ends_resumes() -> None:
    async def nested(client: rl.AsyncClient) -> None:
        for _ in range(2):
            async with client.paused():
                async with client.paused("abort"):
                    pass
                await client.state()

    once = ["/pause", "/pause", "/inference/v1/state", "/resume"]
    assert run({}, nested) == (once * 2, None)

    async def refused_within(client: rl.AsyncClient) -> None:
        async with client.paused():
            with pytest.raises(rl.ServerError):
                async with client.paused():
                    raise AssertionError
            await client.state()

    assert run({"/pause": [OK, refusal(409)]}, refused_within) == (once, None)

    async def at_once(client: rl.AsyncClient) -> None:
        first, second = client.paused(), client.paused()
        await first.__aenter__()
        await second.__aenter__()
        await first.__aexit__(None, None, None)
        await client.state()
        await second.__aexit__(None, None, None)

    assert run({}, at_once) == (once, None)


def test_a_pause_is_extended_until_it_is_ended() -> None:
    script: dict[str, list[Answer]] = {"/extend_pause": [OK, httpx.ReadError("cut"), OK, refusal(409), OK]}

    async def use(client: rl.AsyncClient) -> None:
        async with client.paused(lease=0.004):
            while len(script["/extend_pause"]) > 1:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)  # nothing is sent after the refusal

    sent, _ = run(script, use)
    assert sent == ["/pause", *["/extend_pause"] * 4, "/resume"]


def test_an_extension_without_an_answer_is_sent_again() -> None:
    """rl-faults F2: a call that hangs does not let the lease run out."""
    sent: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.url.path)
        if sent.count("/extend_pause") == 1:
            await asyncio.get_running_loop().create_future()
        return OK

    async def scene() -> None:
        async with connected(answer) as client, client.paused(lease=0.02):
            while sent.count("/extend_pause") < 3:
                await asyncio.sleep(0.001)

    asyncio.run(scene())
    assert sent[-1] == "/resume"


def test_a_pause_that_has_ended_is_extended_no_more() -> None:
    async def use(client: rl.AsyncClient) -> None:
        async with client.paused(lease=600):
            assert len(asyncio.all_tasks()) == 2
        assert asyncio.all_tasks() == {asyncio.current_task()}

    assert run({}, use) == (["/pause", "/resume"], None)
