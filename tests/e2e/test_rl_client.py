"""The trainer's client and the examples that use it, against a real server."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.adapters import write_adapter
from tests.e2e.server import Served, Server
from tests.threads import ServerThread
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import Client, ServerError, TokserveClient, checksum

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with ServerThread(
        "demo", "--dtype", "float32", "--tokens-only", "--admin-api-key", "secret", "--enable-lora"
    ) as server:
        yield server


def test_rollouts_and_a_push(server: Served) -> None:
    weights = load_file(DEMO_DIR / "model.safetensors")

    async def scene() -> None:
        async with TokserveClient(server.url, api_key="secret") as client:
            await client.wait_ready(60)
            version = (await client.state())["weight_version"]
            rollouts = await client.generate(PROMPTS, n=3, seeds=[7, 8], max_tokens=5, ignore_eos=True)
            assert [(r.prompt_index, r.index) for r in rollouts] == [(p, i) for p in range(2) for i in range(3)]
            for r in rollouts:
                assert r.token_ids.dtype == np.int32 and r.logprobs.dtype == np.float32
                assert len(r.token_ids) == len(r.logprobs) == 5 and (r.logprobs <= 0).all()
                assert r.weight_versions == [(version, 0, 5)] and r.finish_reason == "length"
            assert r.prompt_ids.tolist() == PROMPTS[1]
            async with client.paused():
                assert (await client.state())["state"] == "paused"
                done = await client.update_weights(weights.items(), version="one")
            assert done["weight_version"] == "one" and (await client.state())["state"] == "running"
            again = await client.generate(PROMPTS, n=3, seeds=[7, 8], max_tokens=5, ignore_eos=True)
            for r, other in zip(rollouts, again, strict=True):
                assert (r.token_ids == other.token_ids).all() and (r.logprobs == other.logprobs).all()
                assert other.weight_versions == [("one", 0, 5)]
            known = await client.weight_checksums()
            assert all(known[name] == checksum(tensor) for name, tensor in weights.items())
            assert await client.compare_weights(weights.items()) == []
            name = "model.norm.weight"
            changed = weights | {name: weights[name] * 2, "other": weights[name]}
            assert await client.compare_weights(changed.items()) == [name, "other"]
            with pytest.raises(ServerError, match="unexpected: nobody") as refused:
                await client.update_weights([("nobody", weights["model.norm.weight"])])
            assert refused.value.status == 400 and (await client.state())["weight_version"] == "one"
            with pytest.raises(ServerError) as refused:
                await client.generate([[-1]])
            assert refused.value.field == "token_ids"

    asyncio.run(scene())


def test_the_blocking_client(server: Served) -> None:
    weights = load_file(DEMO_DIR / "model.safetensors")
    with Client(server.url, api_key="secret") as client:
        client.wait_ready(60)
        rollouts = client.generate(PROMPTS, n=2, max_tokens=6, temperature=0.7, logprobs_mode="temperature")
        sequences = [[*r.prompt_ids, *r.token_ids] for r in rollouts]
        scores = client.score(
            sequences, [len(r.prompt_ids) for r in rollouts], temperature=0.7, logprobs_mode="temperature"
        )
        assert all((score == r.logprobs).all() for score, r in zip(scores, rollouts, strict=True))
        deltas = [delta.tokens.token_ids for delta in client.stream(PROMPTS[0], max_tokens=6, seed=1)]
        (rollout,) = client.generate(PROMPTS[:1], seeds=[1], max_tokens=6)
        assert np.concatenate(deltas).tolist() == rollout.token_ids.tolist()
        with client.paused():
            assert client.state()["state"] == "paused"
            assert client.push(weights, "blocking-1", delta=True).mode == "full"
        changed = {name: tensor.clone() for name, tensor in weights.items()}
        changed["model.norm.weight"][0] += 0.5
        pushed = client.push(changed, "blocking-2", delta=True)
        assert (pushed.mode, pushed.num_changed) == ("delta", 1)
        client.push(weights, "blocking-3")
        assert client.served_weights()["weight_version"] == "blocking-3"


@pytest.mark.parametrize("running", ["g", "h"])
def test_an_abort_finds_prompts_that_wait_for_a_connection(server: Served, running: str) -> None:
    async def scene() -> None:
        async with TokserveClient(server.url, api_key="secret", connections=2) as client:
            await client.pause("keep")
            options = {"n": 2, "max_tokens": 3, "ignore_eos": True}
            calls = {}
            for group in (running, "g" if running == "h" else "h"):
                prompts = [[1, 2, number + 3] for number in range(7 if group == "g" else 2)]
                calls[group] = asyncio.create_task(client.generate(prompts, group_id=group, **options))
                await asyncio.sleep(0)  # the first group is the first to be sent
            async with asyncio.timeout(120):
                while (await client.state())["waiting"] < 4:
                    await asyncio.sleep(0.01)
            assert await client.abort("g") == 7
            rollouts = await calls["g"]
            assert [(r.prompt_index, r.index) for r in rollouts] == [(p, i) for p in range(7) for i in range(2)]
            for r in rollouts:
                assert (r.finish_reason, len(r.token_ids), len(r.logprobs), r.weight_versions) == ("abort", 0, 0, [])
            await client.resume()
            assert [len(r.token_ids) for r in await calls["h"]] == [3] * 4

    asyncio.run(scene())


def test_rollouts_of_an_adapter(server: Served, tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path, DEMO_DIR, rank=4))

    async def scene() -> None:
        async with TokserveClient(server.url, api_key="secret") as client:
            version = (await client.state())["weight_version"]
            first = await client.load_lora_adapter("mine", path)
            assert await client.load_lora_adapter("mine", path) == first + 1
            rollouts = await client.generate(PROMPTS, model="mine", seeds=[7, 8], max_tokens=5, ignore_eos=True)
            assert [r.weight_versions for r in rollouts] == [[(f"{version}+mine@{first + 1}", 0, 5)]] * 2
            await client.unload_lora_adapter("mine")
            with pytest.raises(ServerError) as refused:
                await client.generate(PROMPTS, model="mine")
            assert (refused.value.status, refused.value.field) == (404, "model")

    asyncio.run(scene())


def test_control_needs_the_admin_key(server: Served) -> None:
    async def scene() -> None:
        async with TokserveClient(server.url) as client:
            assert len(await client.generate([[1]], max_tokens=1)) == 1
            with pytest.raises(ServerError) as refused:
                await client.pause()
            assert refused.value.status == 401

    asyncio.run(scene())


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def open_server() -> Iterator[Served]:
    with Server("demo", "--dtype", "float32") as server:
        yield server


@pytest.mark.slow
def test_weight_update_gloo(open_server: Served) -> None:
    shown = run(str(EXAMPLES / "weight_update_gloo.py"), open_server.url)
    assert "serving version pushed" in shown and "new request: 4 tokens by [('pushed', 0, 4)]" in shown


@pytest.mark.slow
def test_async_rollouts(open_server: Served) -> None:
    shown = run(str(EXAMPLES / "async_rollouts.py"), open_server.url)
    assert "all 19200 tokens are accounted for; state: running" in shown


@pytest.mark.slow
def test_rl_loop_reaches_its_goal() -> None:
    with Server("demo", "--dtype", "float32") as server:
        shown = run(str(EXAMPLES / "rl_loop.py"), server.url)
    match = re.search(r"reward ([\d.]+) -> ([\d.]+) in \d+ s; mean .* ([\d.e-]+)$", shown.strip())
    assert match, shown
    assert float(match[1]) < 0.8 and float(match[2]) > 0.85 and float(match[3]) < 1e-4


@pytest.mark.slow
def test_rl_loop_is_the_same_with_drafts_and_takes_fewer_steps() -> None:
    with Server("demo", "--dtype", "float32", "--max-num-seqs", "16") as server:
        shown = run(str(EXAMPLES / "rl_loop.py"), server.url, "--speculate", "--steps", "4", "--epoch", "2")
    assert shown.endswith("rewards and losses are equal, without drafts and with them\n")
    steps = [int(count) for count in re.findall(r"(\d+) engine steps", shown)]
    plain, drafting = steps[:4], steps[4:]
    assert sum(drafting[2:]) < 0.9 * sum(plain[2:]), steps
