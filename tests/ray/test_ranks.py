"""`--distributed-executor-backend ray`: the ranks of one engine on the nodes of a real cluster, and nodes that die."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tokserve
from tests import needs
from tests.e2e.server import Server
from tests.ray.cluster import RayCluster
from tests.waiting import PATIENCE, until

pytestmark = [needs.RAY.skips(), pytest.mark.slow, pytest.mark.timeout(600)]
GENERATE = "/inference/v1/generate"
RAY = ("--distributed-executor-backend", "ray", "--cpu-threads", "2", "--tokens-only")
WEIGHTS = str(Path(tokserve.__file__).parent / "demo_model")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(1, 1, 1, 1) as running:
        yield running


def replies(server: Server) -> list[Any]:
    params = {"max_tokens": 20, "temperature": 1.0, "logprobs": 2, "ignore_eos": True, "prompt_logprobs": 1}
    body = {"token_ids": [5, 6, 7, *range(40, 90)], "logprobs_format": "arrays"}
    answers = [server.post(GENERATE, body | {"sampling_params": params | {"seed": seed}}) for seed in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    pairs = [(reply["choices"][0], reply["prompt_logprobs"]) for reply in (answer.json() for answer in answers)]
    return [(choice["token_ids"], choice["logprobs"], prompt) for choice, prompt in pairs]


def nodes(server: Server) -> list[str]:
    """The nodes on which the ranks were last started."""
    lines = [line for line in server.log if " runs on node " in line]
    return [line.rpartition(" ")[2] for line in lines[-2:]]


def left(cluster: RayCluster) -> list[psutil.Process]:
    """Engines and ranks that run for this cluster."""
    processes = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if "-m tokserve.features.ranks.worker" in line or "-m tokserve.engine.process" in line:
                processes += [process] if cluster.has_started(process) else []
        except psutil.Error:
            continue
    return processes


@pytest.mark.parametrize("size", [("-tp", "2"), ("-pp", "2")], ids=["tp", "pp"])
def test_replies_and_control_are_those_of_ranks_on_one_machine(cluster: RayCluster, size: tuple[str, str]) -> None:
    with Server("demo", *size, "--tokens-only") as local:
        expected = replies(local)
    with Server("demo", *size, *RAY, env=cluster.env) as server:
        assert len(set(nodes(server))) == 2
        assert replies(server) == expected
        assert server.post("/update_weights", {"weight_dir": WEIGHTS}).status_code == 200
        assert server.post("/sleep?level=1", {}).status_code == 200
        assert server.post("/wake_up", {}).status_code == 200
        assert server.post("/update_weights", {"weight_dir": "/nowhere"}).status_code == 400
        assert replies(server) == expected
        assert server.stop() == 0
    until(lambda: not left(cluster), "processes are left")


def test_two_engines_have_ranks_of_their_own(cluster: RayCluster) -> None:
    with Server("demo", "-tp", "2", "-dp", "2", *RAY, env=cluster.env) as server:
        answers = []
        for rank in range(2):
            body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9, "temperature": 0.0}}
            answers.append(server.post(GENERATE, body | {"data_parallel_rank": rank}).json()["choices"])
        assert answers[0] == answers[1]
        assert server.stop() == 0
    until(lambda: not left(cluster), "processes are left")


@pytest.mark.parametrize("victim", ["engine", "rank", "server"])
def test_a_killed_rank_ends_the_others(cluster: RayCluster, victim: str) -> None:
    with Server("demo", "-tp", "2", *RAY, env=cluster.env) as server:
        processes = left(cluster)
        assert len(processes) == 3
        if victim == "server":
            server.process.kill()
        else:
            name = "tokserve.engine.process" if victim == "engine" else "tokserve.features.ranks.worker"
            next(process for process in processes if name in process.cmdline()).send_signal(signal.SIGKILL)
            assert server.process.wait(PATIENCE) == 1
        until(lambda: not left(cluster), "processes are left")
        if victim == "rank":
            server.stop()
            assert re.search(r"was killed by SIGKILL.* on node 127\.0\.0\.", "\n".join(server.log))


def test_a_node_that_is_killed_ends_the_engine_and_another_takes_its_place(cluster: RayCluster) -> None:
    with Server("demo", "-tp", "2", *RAY, "--restart-engine", "2", env=cluster.env) as server:
        expected, before = replies(server), nodes(server)
        cluster.kill(int(before[1].rpartition(".")[2]) - 3)
        until(lambda: any("another engine serves" in line for line in server.log), "\n".join(server.log))
        assert f"rank 1 is gone with its Ray actor on node {before[1]}" in "\n".join(server.log)
        assert before[1] not in nodes(server)
        assert replies(server) == expected
        assert not any("Traceback" in line for line in server.log), "\n".join(server.log)


def test_without_resources_the_start_fails_and_names_them(cluster: RayCluster) -> None:
    server = Server("demo", "-tp", "2", *RAY[:2], "--cpu-threads", "64", "--start-timeout", "15", env=cluster.env)
    assert server.process.wait(PATIENCE) == 1
    server.stop()
    assert "no place for 2 ranks with {'CPU': 32} each" in server.log[-1], server.log
