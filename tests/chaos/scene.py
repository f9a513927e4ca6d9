"""A server under random load and with faults: how every request ended, and the resources used.

`python -m tests.chaos.scene --seconds 600 --csv FILE` prints a table and writes the curves.  Every request must end in
a way that the API defines, with the tokens and logprobs of its solo run as far as it came; anything else is a fault.
With `--api-servers 2` API processes are killed too, and then a connection may be lost, but only then.  With
`--data-parallel 2` there are two engines behind the server, and with `--tensor-parallel 2` two ranks in an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.pool import BAD, POOL, Answer, Fault, request, tokens
from tests.chaos.trouble import Trouble
from tests.e2e.server import Server
from tests.e2e.test_soak import more_files

WORKERS = 16
FLAGS = (
    "--max-num-seqs",
    "8",
    "--max-queued-requests",
    "4",
    "--kv-cache-memory-bytes",
    "2M",
    "--restart-engine",
    "10000",
    "--step-timeout",
    "12",
    "--max-body-mb",
    "1",
)
STATES = ("ready", "restarting", "hung", "pausing", "paused", "updating", "sleeping")  # of /ready
LOST_RANK = re.compile(r"rank \d+ |gloo|Connection (closed|reset) by peer|Broken pipe")  # the error of the other ranks
GENERATE = "/inference/v1/generate"


class Scene:
    """`run` it; then `ends` counts how requests ended, and `curves` has a row per second."""

    def __init__(self, server: Server, seconds: float, seed: int) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.curves: list[tuple[float, ...]] = []
        self.trouble: collections.Counter[str] = collections.Counter()
        self.solo: list[Answer] = []
        self._server = server
        self._seconds = seconds
        self._rng = random.Random(seed)
        self._number = 0
        self._num_engines = len(server.engines())

    async def run(self) -> None:
        """Run the load and the faults; raises Fault."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=120, limits=limits) as client:
            self._client = client
            self.solo = [await self._alone(i) for i in range(POOL)]
            self._end = time.monotonic() + self._seconds
            self._trouble = Trouble(self._server, client, self._rng, self._end)
            self.trouble = self._trouble.counts
            actors = [*(self._work() for _ in range(WORKERS)), *self._trouble.actors(), self._watch()]
            tasks = [asyncio.create_task(actor) for actor in actors]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            await self._recover()
            for i in range(0, POOL, 5):
                if await self._alone(i) != self.solo[i]:
                    raise Fault(f"request {i} has another answer than at the beginning")

    # --- actors that run until the time is up ---

    async def _work(self) -> None:
        ways = [
            *[self._not_streamed] * 2,
            *[self._streamed] * 2,
            self._left,
            self._aborted,
            self._late,
            self._bad,
        ]
        while time.monotonic() < self._end:
            i, began = self._rng.randrange(POOL), time.monotonic()
            try:
                end = await self._rng.choice(ways)(i)
            except httpx.HTTPError as error:
                if not self._trouble.may_lose(began):
                    raise Fault(f"request {i}: {type(error).__name__} {error}") from error
                end = "connection lost"
            self.ends[end] += 1
            if end in ("engine_restarting", "queue_full"):
                await asyncio.sleep(self._rng.random() * 0.5)

    async def _watch(self) -> None:
        began = time.monotonic()
        while await self._trouble.wait((1.0, 1.0)):
            held = [0, 0, 0, 0]  # without the engine while another starts
            with suppress(psutil.Error):
                for process in fronts(self._server):
                    held[0] += process.memory_info().rss
                    held[1] += process.num_fds()
                for process in self._trouble.engines():
                    held[2] += process.memory_info().rss
                    held[3] += process.num_fds()
            self.curves.append((time.monotonic() - began, *held, self.ends.total()))

    async def _is_ready(self) -> bool:
        answer = await self._client.get("/ready")
        health = await self._client.get("/health")
        state = answer.json()["status"]
        if answer.status_code != (200 if state == "ready" else 503) or state not in STATES:
            raise Fault(f"/ready: {answer.status_code} {answer.text}")
        if health.status_code not in (200, 503):
            raise Fault(f"/health: {health.status_code} {health.text}")
        return bool(state == "ready")

    async def _recover(self) -> None:
        ready = False
        while not ready:
            await asyncio.sleep(0.1)
            with suppress(httpx.HTTPError):  # an API process was killed last
                ready = await self._is_ready()

    # --- kinds of requests; each returns how it ended ---

    async def _alone(self, i: int) -> Answer:
        answer = await self._client.post(GENERATE, json=request(i))
        if answer.status_code != 200:
            raise Fault(f"request {i} alone: {answer.status_code} {answer.text}")
        return tokens(answer.json()["choices"])

    def _body(self, i: int, **fields: Any) -> dict[str, Any]:
        self._number += 1
        body = request(i) | {"request_id": f"chaos-{self._number}"} | fields
        if self._num_engines > 1 and self._rng.random() < 0.3:
            body["data_parallel_rank"] = self._rng.randrange(self._num_engines)
        return body

    async def _not_streamed(self, i: int, **fields: Any) -> str:
        answer = await self._client.post(GENERATE, json=self._body(i, **fields))
        if answer.status_code != 200:
            return self._refused(answer.status_code, answer.content, answer.headers)
        return self._check(i, answer.json()["choices"])

    async def _late(self, i: int) -> str:
        return await self._not_streamed(i, deadline_ms=self._rng.randrange(1, 400))

    async def _streamed(self, i: int, leave: int | None = None) -> str:
        choices: list[Any] = []
        body = self._body(i, stream=True)
        async with self._client.stream("POST", GENERATE, json=body) as answer:
            if answer.status_code != 200:
                return self._refused(answer.status_code, await answer.aread(), answer.headers)
            error, done = None, False
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    error = error or event.get("error")
                    choices += event.get("choices", [])
                if leave is not None and len(choices) > leave:
                    self._check(i, choices, ended=False)
                    return "left"
        if not done:
            raise Fault(f"request {i}: the stream has no end")
        if error is not None:
            if error["code"] != "engine_restarting":
                raise Fault(f"request {i}: {error}")
            self._check(i, choices, ended=False)
            return "engine_restarting"
        return self._check(i, choices)

    async def _left(self, i: int) -> str:
        return await self._streamed(i, leave=self._rng.randrange(20))

    async def _aborted(self, i: int) -> str:
        body = self._body(i)
        asking = asyncio.create_task(self._client.post(GENERATE, json=body))
        await asyncio.sleep(self._rng.random() * 0.3)
        try:
            reply = await self._client.post("/abort_requests", json={"request_ids": [body["request_id"]]})
            if reply.status_code != 200:
                self._refused(reply.status_code, reply.content, reply.headers)
        finally:
            answer = await asking
        if answer.status_code != 200:
            return self._refused(answer.status_code, answer.content, answer.headers)
        return self._check(i, answer.json()["choices"])

    async def _bad(self, i: int) -> str:
        headers = {"Content-Type": self._rng.choice(["application/json", "application/msgpack"])}
        route = self._rng.choice(["/inference/v1/generate", "/v1/chat/completions", "/v1/completions", "/tokenize"])
        answer = await self._client.post(route, content=self._rng.choice(BAD), headers=headers)
        if not 400 <= answer.status_code < 500 and answer.status_code != 503:
            raise Fault(f"a bad body: {answer.status_code} {answer.text}")
        if set(answer.json()["error"]) != {"message", "type", "param", "code"}:
            raise Fault(f"a bad body: {answer.text}")
        return "bad body"

    # --- what may be ---

    def _refused(self, status: int, content: bytes, headers: httpx.Headers) -> str:
        code: str = json.loads(content)["error"]["code"]
        if (status, code) not in ((503, "engine_restarting"), (429, "queue_full")) or int(headers["retry-after"]) < 1:
            raise Fault(f"{status} {content!r}")
        return code

    def _check(self, i: int, choices: list[Any], ended: bool = True) -> str:
        (ids, logprobs), (own_ids, own_logprobs) = tokens(choices), self.solo[i]
        reason = choices[-1]["finish_reason"] if choices and ended else None
        if ids != own_ids[: len(ids)] or logprobs != own_logprobs[: len(logprobs)] or len(ids) != len(logprobs):
            raise Fault(f"request {i} differs from its solo run: {ids} {own_ids}")
        if ended and reason not in ("stop", "length", "abort", "deadline"):
            raise Fault(f"request {i} ended by {reason}")
        if reason in ("stop", "length") and len(ids) != len(own_ids):
            raise Fault(f"request {i} is shorter than its solo run")
        return str(reason)


def fronts(server: Server) -> list[psutil.Process]:
    """The server's process and, if it is a supervisor, its API processes."""
    return [psutil.Process(server.process.pid), *server.api_processes()]


@dataclass(frozen=True)
class Processes:
    """How many API processes, engines, and ranks of each engine a server has."""

    api_servers: int = 1
    data_parallel: int = 1
    tensor_parallel: int = 1

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of the command."""
        return (
            "--api-server-count",
            str(self.api_servers),
            "-dp",
            str(self.data_parallel),
            "-tp",
            str(self.tensor_parallel),
        )


def play(seconds: float, seed: int, processes: Processes = Processes()) -> Scene:
    """A scene with a server of its own, and what must hold when it is over.  Raises AssertionError."""
    shared = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory(prefix="chaos") as directory:
        with Server("demo", *FLAGS, *processes.flags, env={"TMPDIR": directory}) as server:
            scene = Scene(server, seconds, seed)
            for _ in range(4 * processes.api_servers):
                server.get("/health")
            files = [process.num_fds() for process in fronts(server)]
            asyncio.run(scene.run())
            server.wait_idle(60)
            assert not any(more_files(fronts(server), files)), "files were left open"
            deep = server.get("/health?deep=1")  # checks the KV accounting
            assert deep.status_code == 200, deep.text
            check_processes(server, processes, directory)
            check_log(server.log, scene.trouble)
            assert server.stop() == 0
        assert not processes_of(directory), "processes were left behind"
        assert not list(Path(directory).iterdir()), "files were left behind"
    assert set(Path("/dev/shm").iterdir()) <= shared, "shared memory was left behind"
    return scene


def processes_of(directory: str) -> list[psutil.Process]:
    """The processes that were started with this directory for temporary files."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == directory:
                processes.append(process)
    return processes


def check_processes(server: Server, processes: Processes, directory: str) -> None:
    """The processes are those of the start.  Raises AssertionError."""
    several = processes.api_servers > 1
    assert len(server.api_processes()) == (processes.api_servers if several else 0)
    assert len(server.engines()) == processes.data_parallel
    ranks = server.ranks()
    expected = processes.data_parallel * processes.tensor_parallel if processes.tensor_parallel > 1 else 0
    assert len(ranks) == expected, ranks
    expected_here = [*fronts(server), *server.engines(), *ranks]
    assert set(processes_of(directory)) == set(expected_here), "processes were left behind"


def check_log(log: list[str], trouble: Mapping[str, int]) -> None:
    """The log names every lost engine and has no other error.  Raises AssertionError."""
    died = [line for line in log if "starting another" in line]
    kills, hangs = (trouble[kind] + trouble[f"rank {kind}"] for kind in ("kill", "hang"))
    assert sum("SIGKILL" in line for line in died) == kills, died
    assert sum("had not finished a step" in line for line in died) == hangs, died
    assert len(died) == kills + hangs, died
    for index, line in enumerate(log):
        if "Traceback" in line:
            error = next((line for line in log[index + 1 :] if re.match(r"\w", line)), "")
            assert trouble["rank kill"] and LOST_RANK.search(error), "\n".join(log[max(0, index - 20) : index + 60])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of trouble. Default: 60.")
    parser.add_argument("--seed", type=int, default=1, help="of requests and trouble. Default: 1.")
    parser.add_argument("--api-servers", type=int, default=1, help="API processes. Default: 1.")
    parser.add_argument("--data-parallel", type=int, default=1, help="engines. Default: 1.")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of an engine. Default: 1.")
    parser.add_argument("--csv", type=Path, help="seconds, RSS and files of server and engine, requests so far")
    options = parser.parse_args()
    processes = Processes(options.api_servers, options.data_parallel, options.tensor_parallel)
    scene = play(options.seconds, options.seed, processes)
    print(f"{scene.ends.total()} requests in {options.seconds:g} s")
    for what, count in [*scene.ends.most_common(), *sorted(scene.trouble.items())]:
        print(f"{what:24} {count}")
    first, last = thirds(scene)
    print(
        f"server: RSS at most {first[0] >> 20} MiB, {first[1]} files in the first third; "
        f"{last[0] >> 20} MiB, {last[1]} files in the last"
    )
    if options.csv:
        head = "seconds,server_rss,server_files,engine_rss,engine_files,requests\n"
        options.csv.write_text(head + "".join(",".join(map(str, row)) + "\n" for row in scene.curves))


def thirds(scene: Scene) -> list[tuple[int, int]]:
    """The server's largest RSS and number of files in the first and in the last third."""
    third = max(1, len(scene.curves) // 3)
    parts = scene.curves[:third], scene.curves[-third:]
    return [(max(row[1] for row in part), max(row[2] for row in part)) for part in parts]


if __name__ == "__main__":
    main()
