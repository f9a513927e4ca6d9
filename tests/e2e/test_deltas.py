"""`client.push` against a real server: what is sent, what it falls back to, and that nothing else is ever served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.e2e.server import Served, Server
from tests.ports import free_port
from tests.threads import ServerThread
from tests.tiers import slow_after
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.rl import PushResult, ServerError, TokserveClient, checksums, push

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("deltas"), tiny_config("gemma3_text"), seed=1)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with ServerThread(str(checkpoint), "--dtype", "bfloat16", "--tokens-only") as server:
        yield server


@pytest.fixture
def weights(checkpoint: Path) -> Weights:
    """float32 masters that bfloat16 does not hold."""
    torch.manual_seed(1)
    return {name: t.float() * (1 + torch.rand(())) for name, t in load_file(checkpoint / "model.safetensors").items()}


def in_client(server: Served, scene: Callable[[TokserveClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with TokserveClient(server.url) as client:
            return await scene(client)

    return asyncio.run(run())


def stepped(weights: Weights, share: float = 0.01) -> Weights:
    return {name: t + torch.randn_like(t) * (torch.rand_like(t) < share) for name, t in weights.items()}


async def memory(client: TokserveClient) -> dict[str, str]:
    digests: dict[str, str] = (await client.control("/weight_checker", {"action": "checksum", "names": "memory"}))[
        "checksums"
    ]
    return digests


@pytest.mark.slow
@pytest.mark.parametrize("part", slow_after([1, push.PART_BYTES], 1))  # all in one body, and each tensor in its own
def test_what_was_pushed_as_deltas_is_what_a_full_push_makes(
    server: Served, weights: Weights, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "PART_BYTES", part)

    async def scene(client: TokserveClient) -> None:
        first = await client.push(weights, "a", delta=True)
        assert (first.mode, first.weight_version) == ("full", "a") and "nothing was pushed" in str(first.reason)
        info = await client.served_weights(checksum=True)
        assert info["checksum"] == client._pusher._pushed.checksum  # type: ignore[union-attr]
        current = weights
        for step in range(3):
            current = stepped(current)
            done = await client.push(current.items(), f"a{step}", delta=True)
            assert (done.mode, done.reason, done.weight_version) == ("delta", None, f"a{step}")
            assert 0 < done.num_changed < 0.02 * done.num_elements
            assert done.num_bytes < first.num_bytes / 10
        same = await client.push(current, "a-same", delta=True)
        assert (same.mode, same.num_changed) == ("delta", 0)
        unnamed = await client.push(stepped(current), delta=True)
        assert unnamed.weight_version == str(unnamed.epoch)
        await client.push(current, "again", delta=True)
        by_deltas, tensors = await memory(client), await client.weight_checksums()
        await client.update_weights(current.items(), "whole")  # rounded by the server
        assert await memory(client) == by_deltas
        await client.push(current, "here")  # rounded by the client
        assert await memory(client) == by_deltas
        assert await client.weight_checksums() == tensors
        large = await client.push(stepped(current, 0.5), "large", delta=True)
        assert large.mode == "full"

    in_client(server, scene)


def test_modules_and_mappings_and_what_is_neither(server: Served, weights: Weights) -> None:
    module = nn.Module()
    for name, tensor in weights.items():
        *path, last = name.split(".")
        inner = module
        for part in path:
            if part not in inner._modules:
                inner.add_module(part, nn.Module())
            inner = inner.get_submodule(part)
        inner.register_parameter(last, nn.Parameter(tensor))

    async def scene(client: TokserveClient) -> None:
        await client.push(weights, "mapping")
        first = await memory(client)
        done = await client.push(module, "module", delta=True)
        assert done.mode == "full" and await memory(client) == first
        with pytest.raises(TypeError, match="pairs of"):
            await client.push([1, 2], "x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="no tensor"):
            await client.push({"a": 1}, "x")  # type: ignore[dict-item]
        with pytest.raises(ServerError, match="missing"):
            await client.push(dict(list(weights.items())[1:]), "x")
        assert await memory(client) == first

    in_client(server, scene)


def test_a_server_that_others_updated_gets_everything(server: Served, weights: Weights) -> None:
    async def scene(client: TokserveClient) -> None:
        await client.push(weights, "b0", delta=True)
        async with TokserveClient(server.url) as other:
            await other.push(stepped(weights), "other")
        later = stepped(weights)
        done = await client.push(later, "b1", delta=True)
        assert done.mode == "full" and "'b0'" in str(done.reason) and "'other'" in str(done.reason)
        assert (await client.push(stepped(later), "b2", delta=True)).mode == "delta"

    in_client(server, scene)


def test_a_version_is_one_set_of_weights(server: Served, weights: Weights) -> None:
    async def scene(client: TokserveClient) -> None:
        await client.push(weights, "c0", delta=True)
        later = stepped(weights)
        await client.push(later, "c1", delta=True)
        assert (await client.push(later, "c1", delta=True)).num_changed == 0
        await client.push(stepped(later), "c2", delta=True)
        for delta in (True, False):
            with pytest.raises(ServerError, match="version c2") as caught:
                await client.push(stepped(later), "c2", delta=delta)
            assert (caught.value.status, caught.value.code) == (409, "version_in_use")
        assert (await client.served_weights())["weight_version"] == "c2"
        await client.push(later, "c3", delta=True)

    in_client(server, scene)


@pytest.mark.some(2)
@pytest.mark.parametrize("way", ["full", "delta", "directory"])
def test_a_trainer_that_went_back_may_use_a_version_again(
    way: str, server: Served, weights: Weights, tmp_path: Path
) -> None:
    """The reply says so, whatever the way (rl-faults F12)."""
    names = [f"{way}-{number}" for number in (5, 6, 7, 6, 7)]
    steps = [weights]
    for _ in names:
        steps.append(stepped(steps[-1]))
    options: dict[str, Any] = {"delta": way != "full"} | ({"directory": tmp_path} if way == "directory" else {})

    async def scene(client: TokserveClient) -> None:
        await client.push(weights, f"{way}-start", **options)
        for number, name in enumerate(names):
            done = await client.push(steps[number + 1], name, **options)
            assert (done.weight_version, done.version_reused) == (name, number > 2)
            assert done.mode == ("full" if way == "full" else "delta")
            assert done.epoch == (await client.state())["epoch"]
        in_use = await memory(client)
        await client.push(steps[-1], f"{way}-again")
        assert await memory(client) == in_use
        if way == "directory":
            with pytest.raises(ServerError, match="different weights of version 'directory-6'"):
                await client.load_weights(tmp_path, "directory-6")
            assert (await client.load_weights(tmp_path))["weight_version"] == "directory-7"

    in_client(server, scene)


def test_errors_of_the_routes(server: Served, weights: Weights) -> None:
    async def scene(client: TokserveClient) -> None:
        await client.push(weights, "d0", delta=True)
        served = (await client.served_weights(checksum=True))["checksum"]
        before = await memory(client)
        for base, code in (
            ({"base_version": "d9", "base_checksum": served}, "base_mismatch"),
            ({"base_version": "d0", "base_checksum": "0" * 64}, "base_mismatch"),
        ):
            with pytest.raises(ServerError, match="'d0'") as caught:
                await client.control("/start_weight_update", base)
            assert (caught.value.status, caught.value.code) == (409, code)
        with pytest.raises(ServerError, match="base_checksum") as caught:
            await client.control("/start_weight_update", {"base_version": "d0"})
        assert caught.value.status == 400
        await client.control("/start_weight_update", {"base_version": "d0", "base_checksum": served})
        with pytest.raises(ServerError, match="result is missing") as caught:
            await client.control("/finish_weight_update", {"weight_version": "d1"})
        await client.control("/start_weight_update", {"base_version": "d0", "base_checksum": served})
        with pytest.raises(ServerError, match="push full weights") as caught:
            await client.control("/finish_weight_update", {"weight_version": "d1", "checksum": "1" * 64})
        assert (caught.value.status, caught.value.code) == (409, "checksum_mismatch")
        await client.control("/start_weight_update", {"base_version": "d0", "base_checksum": served})
        empty = await client.control("/finish_weight_update", {"weight_version": "d1", "checksum": served})
        assert empty["weight_version"] == "d1" and empty["checksum"] == served
        assert await memory(client) == before

    in_client(server, scene)


@pytest.mark.slow
def test_requests_in_flight_see_one_set_or_the_next(server: Served, weights: Weights) -> None:
    """A rollout over several pushes: its tokens are those of its versions, and every version has its spans."""

    async def scene(client: TokserveClient) -> None:
        await client.push(weights, "e0", delta=True)
        rollout = asyncio.ensure_future(
            client.generate([[5, 6, 7]], max_tokens=400, ignore_eos=True, temperature=1.0, seeds=[1])
        )
        current = weights
        for step in range(1, 4):
            await asyncio.sleep(0.05)
            current = stepped(current)
            assert (await client.push(current, f"e{step}", delta=True)).mode == "delta"
        [done] = await rollout
        assert done.weight_versions[0][0] == "e0" and len(done.token_ids) == 400
        fresh = await client.generate([[5, 6, 7]], max_tokens=20, ignore_eos=True, seeds=[2])
        await client.update_weights(current, "whole")
        again = await client.generate([[5, 6, 7]], max_tokens=20, ignore_eos=True, seeds=[2])
        assert fresh[0].logprobs.tolist() == again[0].logprobs.tolist()

    in_client(server, scene)


@pytest.mark.slow
def test_a_directory_between_servers(server: Served, checkpoint: Path, weights: Weights, tmp_path: Path) -> None:
    async def scene(client: TokserveClient) -> list[PushResult]:
        current, results = weights, []
        for step in range(5):
            results.append(await client.push(current, f"f{step}", delta=True, directory=tmp_path, anchor_every=3))
            current = stepped(current)
        with pytest.raises(ValueError, match="needs a version"):
            await client.push(current, delta=True, directory=tmp_path)
        return results

    results = in_client(server, scene)
    assert [result.mode for result in results] == ["full"] + ["delta"] * 4
    here = in_client(server, memory)
    with Server(str(checkpoint), "--dtype", "bfloat16", "--tokens-only") as other:
        assert in_client(other, lambda client: client.load_weights(tmp_path))["weight_version"] == "f4"
        assert in_client(other, memory) == here
        assert in_client(other, lambda client: client.load_weights(tmp_path, "f1"))["weight_version"] == "f1"
        assert in_client(other, lambda client: client.load_weights(tmp_path))["weight_version"] == "f4"
        assert in_client(other, memory) == here
        files = in_client(other, lambda client: client.served_weights(checksum=True))
        assert files["checksum"] == in_client(server, lambda client: client.served_weights(checksum=True))["checksum"]


@pytest.mark.slow
def test_a_process_group_and_a_quantized_server(checkpoint: Path, weights: Weights) -> None:
    async def joined(client: TokserveClient) -> None:
        await client.join("gloo", "127.0.0.1", free_port())
        first = await client.push(weights, "g0", delta=True)
        later = stepped(weights)
        assert (first.mode, (await client.push(later, "g1", delta=True)).mode) == ("full", "delta")
        by_delta = await memory(client)
        await client.push(later, "g2")
        assert await memory(client) == by_delta
        assert set(checksums(later)) <= set(await client.weight_checksums())

    async def quantized(client: TokserveClient) -> None:
        for version in ("q0", "q1"):
            done = await client.push(weights, version, delta=True)
            assert done.mode == "full" and "quantized" in str(done.reason)

    with Server(str(checkpoint), "--dtype", "bfloat16", "--tokens-only") as server:
        in_client(server, joined)
    with Server(str(checkpoint), "--dtype", "bfloat16", "--tokens-only", "--quantization", "int8") as server:
        in_client(server, quantized)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["-tp 2", "-tp 4", "-pp 2", "-tp 2 -pp 2", "-tp 2 -dp 2"])
def test_ranks_change_their_parts(checkpoint: Path, weights: Weights, ranks: str, tmp_path: Path) -> None:
    """Checksums are those of one rank, replies those after a push of full weights."""
    torch.manual_seed(2)
    steps = [weights]
    for _ in range(4):
        steps.append(stepped(steps[-1]))

    async def rollout(client: TokserveClient) -> Any:
        [done] = await client.generate([[5, 6, 7]], max_tokens=20, ignore_eos=True, temperature=1.0, seeds=[1])
        return list(done.token_ids), done.logprobs.tolist()

    async def scene(client: TokserveClient) -> list[Any]:
        seen = []
        for number, step in enumerate(steps):
            directory = tmp_path / "chain" if number > 2 else None
            done = await client.push(step, f"r{number}", delta=True, directory=directory)
            assert done.mode == ("delta" if number in (1, 2, 4) else "full"), done
            seen.append(((await client.served_weights(checksum=True))["checksum"], await rollout(client)))
        with pytest.raises(ServerError, match="no rank has whole tensors") as caught:
            await client.weight_checksums()
        assert caught.value.status == 409
        await client.push(steps[-1], "whole")
        assert await rollout(client) == seen[-1][1]
        assert set(checksums(steps[-1])) <= set(await client.weight_checksums())
        with pytest.raises(ServerError, match="'whole'") as caught:
            await client.control("/start_weight_update", {"base_version": "r4", "base_checksum": seen[-1][0]})
        assert caught.value.code == "base_mismatch"
        return seen

    with Server(str(checkpoint), "--dtype", "bfloat16", "--tokens-only", *ranks.split()) as server:
        seen = in_client(server, scene)
    with Server(str(checkpoint), "--dtype", "bfloat16", "--tokens-only") as one:

        async def again(client: TokserveClient) -> list[Any]:
            results = []
            for number, step in enumerate(steps):
                await client.push(step, f"r{number}", delta=True)
                results.append(((await client.served_weights(checksum=True))["checksum"], await rollout(client)))
            return results

        expected = in_client(one, again)
    assert [checksum for checksum, _ in seen] == [checksum for checksum, _ in expected]
    if "-tp" not in ranks:
        assert seen == expected
