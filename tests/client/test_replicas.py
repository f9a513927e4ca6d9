"""Several engine processes behind one `AsyncLLM`: real processes and sockets, a scripted executor behind them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import msgspec
import pytest

from tests.client.fake_engine import config
from tests.client.test_launch import has_ended
from tests.engine.solo import solo
from tokserve.base.errors import Conflict, EngineDead, RequestError, StartError
from tokserve.client import launch
from tokserve.client.async_llm import AsyncLLM, collect
from tokserve.client.engine_client import EngineClient
from tokserve.client.inputs import GenerateRequest
from tokserve.client.outputs import total
from tokserve.config import LoraConfig
from tokserve.features.fleet.replicas import Replicas
from tokserve.protocol.messages import StepStats
from tokserve.protocol.params import RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, pack_ids

PATIENCE = 60.0


pytestmark = pytest.mark.usefixtures("scripted")


def make(engines: int = 2, **options: Any) -> AsyncLLM:
    return AsyncLLM.from_config(config(tokens_only=True, start_timeout=60.0, engines=engines, **options))


def replicas(llm: AsyncLLM) -> Replicas:
    assert isinstance(llm._engine, Replicas)
    return llm._engine


def pids(llm: AsyncLLM) -> list[int]:
    return [engine.engine.pid for engine in replicas(llm).engines]


def tokens_of(prompt: list[int], seed: int, length: int, weights: str = "") -> list[int]:
    params = SamplingParams(max_tokens=length, ignore_eos=True, seed=seed)
    return solo(prompt, params, seed, 64, (), lambda index: weights).tokens


async def ask(llm: AsyncLLM, prompt: list[int], seed: int = 1, length: int = 4, **options: Any) -> list[int]:
    params = SamplingParams(max_tokens=length, ignore_eos=True, seed=seed)
    stream = llm.stream(prompt, params, **options)
    return (await asyncio.wait_for(collect(stream), PATIENCE))[0].token_ids


def rank_of(stream: Any) -> int:
    rank: int = stream._sender.rank
    return rank


async def call_each(llm: AsyncLLM, command: str, **args: Any) -> list[Any]:
    return [await engine.call(command, args) for engine in replicas(llm).engines]


def test_requests_of_any_engine_are_those_of_a_single_one() -> None:
    async def scene() -> None:
        async with make(3) as llm:
            prompts = [[index, 3, 4] for index in range(12)]
            results = await asyncio.gather(*(ask(llm, prompt, seed) for seed, prompt in enumerate(prompts)))
            assert results == [tokens_of(prompt, seed, 4) for seed, prompt in enumerate(prompts)]
            assert all([state["steps"] for state in await call_each(llm, "state")])
            for rank in range(3):
                stream = llm.stream(
                    [5, 6], SamplingParams(max_tokens=3, ignore_eos=True, seed=9), data_parallel_rank=rank
                )
                assert rank_of(stream) == rank
                assert (await collect(stream))[0].token_ids == tokens_of([5, 6], 9, 3)
            with pytest.raises(RequestError) as caught:
                llm.stream([1], SamplingParams(), data_parallel_rank=3)
            assert caught.value.field == "data_parallel_rank" and "below 3" in caught.value.message
            assert llm.num_inflight == 0 and llm.stats.output_tokens == 12 * 4 + 3 * 3
            ended = pids(llm)
        assert all(map(has_ended, ended))

    asyncio.run(scene())


@pytest.mark.slow
def test_aborts_groups_and_ids_are_those_of_all_engines() -> None:
    async def scene() -> None:
        async with make() as llm:
            await llm.pause_generation(mode="keep")
            long = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
            streams = [
                llm.stream([1], long, request_id=f"r{index}", data_parallel_rank=index % 2, group_id=f"g{index // 4}")
                for index in range(8)
            ]
            with pytest.raises(Conflict) as caught:
                llm.stream([1], long, request_id="r0", data_parallel_rank=1)
            assert caught.value.code == "duplicate_id"
            for stream in streams:
                await stream.accepted()
            listed = await llm.call("requests", limit=5)
            assert listed["total"] == 8 and len(listed["requests"]) == 5
            assert {row["engine"] for row in listed["requests"]} == {0, 1}
            assert await llm.abort(["r0", "r1", "none"]) == {"r0": "aborted", "r1": "aborted", "none": "not_found"}
            assert set((await llm.abort_group("g0")).values()) == {"aborted"}
            assert len(await llm.abort_all()) == 4
            for stream in streams:
                assert (await collect(stream))[0].finish_reason == "abort"
            await llm.resume_generation()

    asyncio.run(scene())


@pytest.mark.slow
def test_an_abort_reaches_a_prepared_request_on_any_engine() -> None:
    async def scene() -> None:
        async with make() as llm:
            for rank in range(2):
                announcement = llm.announce(f"r{rank}", "g")
                assert await llm.abort_group("g") == {f"r{rank}": "aborted"}
                request = GenerateRequest(
                    request_id=f"r{rank}",
                    prompt=TokenPrompt(pack_ids([5, 6])),
                    task=SamplingParams(max_tokens=3),
                    options=RequestOptions(group_id="g", data_parallel_rank=rank),
                )
                [stream] = llm.submit([llm.prepare(request)], announcement=announcement)
                announcement.end()
                [output] = await asyncio.wait_for(collect(stream), PATIENCE)
                assert rank_of(stream) == rank
                assert (output.finish_reason, output.stop_detail, output.token_ids) == ("abort", "abort_user", [])
            assert await ask(llm, [5, 6], request_id="r0") == tokens_of([5, 6], 1, 4)

    asyncio.run(scene())


@pytest.mark.slow
def test_control_acts_on_all_engines_and_answers_for_all() -> None:
    async def scene() -> None:
        async with make() as llm:
            await llm.pause_generation(mode="keep")
            assert [state["state"] for state in await call_each(llm, "state")] == ["paused", "paused"]
            assert await llm.is_paused()
            await llm.resume_generation()
            await llm.sleep(1)
            assert await llm.is_sleeping()
            assert [state["state"] for state in await call_each(llm, "state")] == ["sleeping", "sleeping"]
            await llm.wake_up()
            state = await llm.call("state")
            assert [one["state"] for one in state["engines"]] == ["running", "running"]
            started = await llm.start_weight_update()
            ids = started["update_id"].split(".")
            assert len(ids) == 2 and ids[0] != ids[1]
            await llm.update_weights({"update_info": {"weights": "w1"}, "update_id": started["update_id"]})
            done = await llm.finish_weight_update("one", update_id=started["update_id"])
            assert done["weight_version"] == "one" and done["epoch"] == 1
            for rank in range(2):
                assert await ask(llm, [1, 2], 5, data_parallel_rank=rank) == tokens_of([1, 2], 5, 4, "w1")
            with pytest.raises(RequestError, match=r"^this server serves no adapters"):
                await llm.unload_lora_adapter("none")

    asyncio.run(scene())


@pytest.mark.slow
def test_where_one_engine_refuses_tensors_all_roll_back() -> None:
    async def scene() -> None:
        async with make() as llm:
            await replicas(llm).engines[1].call("start_weight_update", {})
            with pytest.raises(Conflict, match=r"^engine 1: a weight update is open already") as caught:
                await llm.start_weight_update()
            assert caught.value.code == "update_open"
            assert [state["state"] for state in await call_each(llm, "state")] == ["running", "updating"]
            await llm.start_weight_update(take_over=True)
            await replicas(llm).engines[0].call("abort_weight_update", {})
            with pytest.raises(Conflict, match=r"^engine 0: no weight update is open"):
                await llm.update_weights({"update_info": {"weights": "w1"}})
            assert [state["state"] for state in await call_each(llm, "state")] == ["running", "running"]

    asyncio.run(scene())


@pytest.mark.slow
def test_weights_change_on_all_engines_or_on_none() -> None:
    async def scene() -> None:
        async with make() as llm:
            first, second = replicas(llm).engines
            await llm.start_weight_update()
            await first.call("update_weights", {"update": {"weights": "w1"}})  # the second lacks them
            with pytest.raises(RequestError, match=r"^engine 1: "):
                await llm.finish_weight_update("one")
            states = await call_each(llm, "state")
            assert [(state["state"], state["weight_version"], state["epoch"]) for state in states] == [
                ("running", "v1", 0)
            ] * 2
            assert first.status.failure is not None and first.status.failure.startswith("engine 1 refused: ")
            assert await ask(llm, [3], data_parallel_rank=0) == tokens_of([3], 1, 4)
            await second.call("update_weight_version", {"new_version": "v1"})  # its epoch is another one now
            await llm.start_weight_update()
            await llm.update_weights({"update_info": {"weights": "w2"}})
            done = await llm.finish_weight_update()
            assert done["weight_version"] == "2" and done["epoch"] == 2
            assert [engine.status.epoch for engine in (first, second)] == [2, 2]
            await llm.update_weight_version("three")
            assert [state["epoch"] for state in await call_each(llm, "state")] == [3, 3]
            for rank in range(2):
                assert await ask(llm, [3], data_parallel_rank=rank) == tokens_of([3], 1, 4, "w2")

    asyncio.run(scene())


@pytest.mark.slow
def test_an_adapter_is_known_to_all_engines_whatever_uses_their_slots() -> None:
    async def scene() -> None:
        base = config(tokens_only=True, start_timeout=60.0, engines=2)
        lora = LoraConfig(enable_lora=True, max_loras=2, lora_eviction="lru")
        async with AsyncLLM.from_config(msgspec.structs.replace(base, lora=lora)) as llm:
            first, second = replicas(llm).engines
            for name in ("a", "b"):
                await llm.load_lora_adapter(name, f"/{name}")
            long = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
            await llm.pause_generation(mode="keep")
            using = [llm.stream([1], long, lora_request=name, data_parallel_rank=1) for name in ("a", "b")]
            for stream in using:
                await stream.accepted()
            loaded = await llm.load_lora_adapter("c", "/c")
            assert loaded["generation"] == 3
            await llm.abort_all()
            await llm.resume_generation()
            for rank, name in ((0, "a"), (1, "b"), (0, "c"), (1, "c"), (1, "a")):
                await ask(llm, [1], lora_request=name, data_parallel_rank=rank)
            assert [sorted(await llm.list_loras()), _names(first), _names(second)] == [["a", "b", "c"]] * 3
            for name in ("a", "b", "c"):
                await llm.unload_lora_adapter(name)
            assert await llm.list_loras() == {}

    asyncio.run(scene())


def _names(engine: EngineClient) -> list[str]:
    return [adapter.name for adapter in engine.status.adapters]


@pytest.mark.slow
def test_an_abort_comes_before_a_commit_on_all_engines_or_after_it() -> None:
    async def scene() -> None:
        async with make(3) as llm:
            for number in range(12):
                await llm.start_weight_update()
                await llm.update_weights({"update_info": {"weights": f"w{number}"}})
                finishing = asyncio.ensure_future(llm.finish_weight_update(f"v-{number}"))
                for _ in range(number):
                    await asyncio.sleep(0)
                aborted = await asyncio.gather(llm.abort_weight_update(), return_exceptions=True)
                finished = await asyncio.gather(finishing, return_exceptions=True)
                states = await call_each(llm, "state")
                assert len({(state["state"], state["weight_version"], state["epoch"]) for state in states}) == 1, states
                assert isinstance(aborted[0], Conflict) != isinstance(finished[0], Conflict)
                assert (states[0]["weight_version"] == f"v-{number}") is isinstance(aborted[0], Conflict)

    asyncio.run(scene())


@pytest.mark.slow
def test_a_caller_that_gives_up_leaves_the_engines_alike() -> None:
    async def scene() -> None:
        async with make() as llm:
            for turns in range(1, 6):
                await llm.start_weight_update()
                await llm.update_weights({"update_info": {"weights": f"w{turns}"}})
                finishing = asyncio.ensure_future(llm.finish_weight_update(f"v-{turns}"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                finishing.cancel()
                async with asyncio.timeout(PATIENCE):
                    while {state["weight_version"] for state in await call_each(llm, "state")} != {f"v-{turns}"}:
                        await asyncio.sleep(0.01)

    asyncio.run(scene())


def test_a_dead_engine_loses_only_its_requests() -> None:
    async def scene() -> None:
        llm = make()
        await llm.start()
        await llm.pause_generation(mode="keep")
        streams = [
            llm.stream([7], SamplingParams(max_tokens=4, ignore_eos=True, seed=1), data_parallel_rank=rank)
            for rank in range(2)
        ]
        os.kill(pids(llm)[0], signal.SIGKILL)
        with pytest.raises(EngineDead) as caught:
            await asyncio.wait_for(collect(streams[0]), PATIENCE)
        assert caught.value.code == "engine_dead"
        await llm.resume_generation()
        assert (await collect(streams[1]))[0].token_ids == tokens_of([7], 1, 4)
        assert llm.dead is None and llm.down is None
        assert await ask(llm, [8]) == tokens_of([8], 1, 4)
        with pytest.raises(EngineDead):
            llm.stream([1], SamplingParams(), data_parallel_rank=0)
        os.kill(pids(llm)[1], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            while llm.dead is None:
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDead):
            llm.stream([1], SamplingParams())
        await llm.shutdown()

    asyncio.run(scene())


@pytest.mark.slow
def test_weights_that_only_some_engines_have_cannot_be_confirmed() -> None:
    async def scene() -> None:
        async with make(runtime={"restart_engine": 5}) as llm:
            engines = replicas(llm).engines

            async def lose(engine: EngineClient) -> None:
                os.kill(engine.engine.pid, signal.SIGKILL)
                while engine.down is None:
                    await asyncio.sleep(0.01)
                await engine.restored()

            async with asyncio.timeout(PATIENCE):
                await llm.start_weight_update()
                await llm.update_weights({"update_info": {"weights": "w1"}})
                await llm.finish_weight_update("one")
                await lose(engines[0])
                with pytest.raises(Conflict, match="does not have the weights of the others"):
                    await llm.update_weight_version("two")
                assert [engine.status.state for engine in engines] == ["quarantined", "running"]
                await lose(engines[1])
                await llm.update_weight_version("two")  # both have those of the start
                assert [(engine.status.state, engine.status.weight_version) for engine in engines] == [
                    ("running", "two")
                ] * 2

    asyncio.run(scene())


@pytest.mark.slow
def test_a_replaced_engine_has_the_state_of_the_others() -> None:
    """Whatever has changed while it was lost, and while it joined."""

    async def scene() -> None:
        async with make(runtime={"restart_engine": 5}) as llm:
            first, second = replicas(llm).engines

            async def lose(engine: EngineClient) -> None:
                os.kill(engine.engine.pid, signal.SIGKILL)
                while engine.down is None:
                    await asyncio.sleep(0.01)

            async with asyncio.timeout(PATIENCE):
                await llm.pause_generation(mode="keep")
                await lose(second)
                await llm.update_weight_version("two")
                await llm.resume_generation()
                await second.restored()
                assert (second.status.weight_version, second.status.epoch, second.status.paused) == ("two", 1, False)
                await lose(first)
                await llm.pause_generation(mode="keep")
                await llm.sleep(1, mode="keep")
                commands = 0
                while first.down is not None:  # commands go on while it joins
                    await llm.update_weight_version(f"v{commands}")
                    commands += 1
                    await asyncio.sleep(0.02)
                states = [
                    (engine.status.weight_version, engine.status.epoch, engine.status.state, engine.status.paused)
                    for engine in (first, second)
                ]
                assert states == [(f"v{commands - 1}", 1 + commands, "sleeping", True)] * 2
                await llm.wake_up()
                await lose(second)
                await llm.resume_generation()
                await lose(first)  # what it was last holds for both
                for engine in (first, second):
                    await engine.restored()
                for rank in range(2):
                    assert await ask(llm, [1, 2], 5, data_parallel_rank=rank) == tokens_of([1, 2], 5, 4)

    asyncio.run(scene())


@pytest.mark.slow
def test_a_replaced_engine_has_nothing_cached() -> None:
    """A prompt whose prefix it had cached goes to the engine that still has it."""

    async def scene() -> None:
        async with make(runtime={"restart_engine": 5}) as llm, asyncio.timeout(PATIENCE):
            first, second = replicas(llm).engines
            shared = list(range(1, 17))
            await ask(llm, shared)
            cached = first if replicas(llm)._router._next == 1 else second
            os.kill(cached.engine.pid, signal.SIGKILL)
            while cached.down is None:
                await asyncio.sleep(0.01)
            await ask(llm, shared)  # of the other engine
            await cached.restored()
            chosen = []
            for _ in range(3):
                stream = llm.stream(shared, SamplingParams(max_tokens=1))
                chosen.append(rank_of(stream))
                await collect(stream)
            assert chosen == [1 - cached.rank] * 3

    asyncio.run(scene())


def test_an_engine_that_cannot_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        llm = make()
        engines = replicas(llm).engines
        start = engines[1]._process
        monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-m", "tests.engine.scripted_process"))

        def failing() -> Any:
            monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
            return start()

        monkeypatch.setattr(engines[1], "_process", failing)
        with pytest.raises(StartError, match="exit code 3"):
            await llm.start()
        assert all(map(has_ended, pids(llm)))

    asyncio.run(scene())


def test_counts_are_sums() -> None:
    one = StepStats(running=1, tokens_by_age=[1, 2], rooms={"drafts": {"a": [1, 1], "b": [2, 0]}, "clients": 3})
    two = StepStats(running=2, tokens_by_age=[1], rooms={"drafts": {"a": [3, 2]}, "store": {"saved": 4}})
    rooms = {"drafts": {"a": [4, 3], "b": [2, 0]}, "clients": 3, "store": {"saved": 4}}
    assert total([one, two]) == StepStats(running=3, tokens_by_age=[2, 2], rooms=rooms)
    assert total([StepStats(), StepStats()]) == StepStats()
