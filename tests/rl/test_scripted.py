"""Both clients against the scripted server: replies and faults that are known beforehand.

TOKSERVE_TEST_URL: a server that test_distribution.py has started, where this environment has none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from tests.rl.distribution import HAS_SERVER, rl
from tests.rl.script import LONG, OUTPUTS, reply

URL = os.environ.get("TOKSERVE_TEST_URL")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if URL is not None:
        yield URL
        return
    assert HAS_SERVER
    import tokserve.testing

    with tokserve.testing.scripted_server(reply, tokens_only=True, max_num_seqs=16) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[rl.Client]:
    with rl.Client(url) as client:
        client.wait_ready(60)
        yield client


@pytest.mark.slow
def test_rollouts(client: rl.Client) -> None:
    rollouts = client.generate([[1], [2]], n=2, seeds=[3, 4])
    assert [(r.prompt_index, r.index) for r in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rollout in rollouts:
        ids, logprobs = OUTPUTS[rollout.prompt_ids[0]]
        assert rollout.token_ids.tolist()[: len(ids)] == ids
        assert np.array_equal(rollout.logprobs[: len(ids)], np.array(logprobs, np.float32))
        assert rollout.weight_versions[0][0] == "0" and rollout.finish_reason == "stop"


def test_a_stream_has_what_the_whole_reply_has(client: rl.Client) -> None:
    rollouts = client.generate([[1]], n=2)
    ids: dict[int, list[int]] = {0: [], 1: []}
    logprobs: dict[int, list[float]] = {0: [], 1: []}
    ends = {}
    for delta in client.stream([1], n=2):
        ids[delta.index] += delta.tokens.token_ids.tolist()
        logprobs[delta.index] += delta.tokens.logprobs.tolist()
        if delta.finish_reason:
            ends[delta.index] = delta.finish_reason, delta.weight_versions
    for rollout in rollouts:
        assert ids[rollout.index] == rollout.token_ids.tolist()
        assert logprobs[rollout.index] == rollout.logprobs.tolist()
        assert ends[rollout.index] == (rollout.finish_reason, rollout.weight_versions)


def test_a_stream_that_is_left_aborts_its_request(client: rl.Client) -> None:
    deltas = client.stream([LONG])
    next(deltas)
    assert client.state()["running"] == 1
    deltas.close()  # type: ignore[attr-defined]
    for _ in range(200):
        if client.state()["running"] == 0:
            return
    raise AssertionError("it is still running")


def test_requests_are_aborted_by_id_and_by_group(client: rl.Client, url: str) -> None:
    async def scene() -> None:
        async with rl.AsyncClient(url) as other:
            for names, target in (
                ({"request_id": "r1"}, {"request_ids": ["r1"]}),
                ({"group_id": "g1"}, {"group_id": "g1"}),
            ):
                async with aclosing(other.stream([LONG], **names)) as deltas:
                    await anext(deltas)
                    assert await other.abort(**target) == 1
                    last: Any = [delta async for delta in deltas][-1]
                    assert last.finish_reason == "abort"

    asyncio.run(scene())
    with pytest.raises(ValueError, match="group_id or request_ids"):
        client.abort()


def test_a_refusal_with_retry_after_is_tried_again(client: rl.Client) -> None:
    assert client.generate([[3]])[0].token_ids.tolist()[:1] == [9]


def test_control(client: rl.Client) -> None:
    with client.paused(lease=5):
        assert client.state()["state"] == "paused"
    assert client.state()["state"] == "running"
    client.update_weight_version("step-1")
    assert client.served_weights()["weight_version"] == "step-1"
    client.update_weight_version("0")
    assert client.models() == [client.config()["model"]["model"]] or client.models()
    client.sleep(0)
    assert client.is_sleeping()
    client.wake_up()
    client.reset_prefix_cache()
    with pytest.raises(rl.ServerError) as refused:
        client.abort_weight_update()
    assert refused.value.status == 409


def test_scores_are_one_for_each_scored_token(client: rl.Client) -> None:
    scores = client.score([[1, 2, 3, 4], [5, 6]], [2, 1])
    assert [row.shape for row in scores] == [(2,), (1,)] and scores[0].dtype == np.float32
    assert client.score([[1, 2]], [2])[0].shape == (0,)
    for starts in ([0], [3], [1, 1]):
        with pytest.raises(ValueError, match="starts"):
            client.score([[1, 2]], starts)
