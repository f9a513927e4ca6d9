"""`--data-parallel-backend ray`: engines on the nodes of a real cluster, which are killed one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from tests import needs
from tests.e2e.server import Server
from tests.e2e.test_replicas import body
from tests.ray.cluster import RayCluster
from tests.waiting import PATIENCE, until

pytestmark = [needs.RAY.skips(), pytest.mark.slow, pytest.mark.timeout(600)]
GENERATE = "/inference/v1/generate"
COMPLETE = '"finish_reason":"length"'
FLAGS = ("-dp", "2", "--data-parallel-backend", "ray", "--cpu-threads", "1", "--max-num-seqs", "4", "--tokens-only")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(1, 1, 1) as running:
        yield running


def engines() -> dict[str, psutil.Process]:
    """The engine processes of the clusters on this machine, by the address at which they listen."""
    listening = {}
    for process in psutil.process_iter():
        try:
            if "tokserve.engine.process" in " ".join(process.cmdline()):
                addresses = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
                listening.update(dict.fromkeys(addresses, process))
        except psutil.Error:
            continue
    return listening


def test_engines_run_on_nodes_and_give_the_replies_of_one(cluster: RayCluster) -> None:
    with Server("demo", "--tokens-only") as single:
        expected = [single.post(GENERATE, body(seed)).json()["choices"] for seed in range(3)]
    with Server("demo", *FLAGS, env=cluster.env) as server:
        assert len([address for address in engines() if address in ("127.0.0.3", "127.0.0.4", "127.0.0.5")]) == 2
        for rank in range(2):
            replies = [server.post(GENERATE, body(seed, data_parallel_rank=rank)).json() for seed in range(3)]
            assert [reply["choices"] for reply in replies] == expected
        assert server.post("/pause", {"mode": "keep"}).status_code == 200
        state = server.get("/inference/v1/state").json()
        assert [one["state"] for one in state["engines"]] == ["paused", "paused"]
        assert server.stop() == 0
    until(lambda: not any(address.startswith("127.0.0.") and address != "127.0.0.1" for address in engines()), "left")


async def _through(url: str, strike: Callable[[], None]) -> list[str]:
    """What streams at both engines come to when one of them is struck: the last events.

    Each has streams until one is not complete: processes live on for a while after their node.
    """
    ends = []
    began, broken = [asyncio.Event(), asyncio.Event()], asyncio.Event()

    async def stream(client: httpx.AsyncClient, rank: int) -> str:
        fields = body(rank, stream=True, data_parallel_rank=rank)
        fields["sampling_params"] |= {"max_tokens": 1500}
        last = COMPLETE
        while COMPLETE in last and not broken.is_set():
            async with client.stream("POST", GENERATE, json=fields) as answer:
                async for line in answer.aiter_lines():
                    began[rank].set()
                    last = line if line.startswith(("data: {", "{")) else last
        if COMPLETE not in last:
            broken.set()
        return last

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        streams = [asyncio.create_task(stream(client, rank)) for rank in range(2)]
        for event in began:
            await event.wait()
        await asyncio.to_thread(strike)
        ends = await asyncio.gather(*streams)
    return list(ends)


def test_a_killed_node_loses_only_its_requests(cluster: RayCluster) -> None:
    with Server("demo", *FLAGS, "--restart-engine", "3", env=cluster.env) as server:
        expected = server.post(GENERATE, body(7)).json()["choices"]
        places = {line.rpartition("tcp://")[2].partition(":")[0]: line for line in server.log if "runs at tcp" in line}
        victim, line = next((address, line) for address, line in places.items())
        rank = int(line.partition("engine-")[2][0])
        index = int(victim.rpartition(".")[2]) - 3
        ends = asyncio.run(_through(server.url, lambda: cluster.kill(index)))
        assert "engine_restarting" in ends[rank], ends
        assert COMPLETE in ends[1 - rank], ends
        until(lambda: any("another engine serves" in line for line in server.log), "\n".join(server.log))
        for either in range(2):
            reply = server.post(GENERATE, body(7, data_parallel_rank=either))
            assert reply.status_code == 200 and reply.json()["choices"] == expected, reply.text
        assert victim not in engines()


def test_without_a_cluster_the_start_fails_with_instructions() -> None:
    for address, message in (("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"), ("here", "cannot join")):
        server = Server("demo", *FLAGS, env={"RAY_ADDRESS": address})
        assert server.process.wait(60) == 1
        server.stop()
        assert message in server.log[-1] and "ray start --head" in server.log[-1]
