"""A server at a steady load for a long time: does memory grow, do latencies?

`python -m tests.chaos.soak --seconds 1800 --rate 12 --csv FILE` prints a table and writes the curves.
Requests arrive at random (Poisson) whatever has become of those before, so a server that falls behind shows it.  Every
answer must be that of the solo run.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import httpx
import psutil

from tests.chaos.pool import POOL, Answer, request, tokens
from tests.e2e.server import Server

GENERATE = "/inference/v1/generate"
BLOCK = 30.0  # seconds that are summed up in a row
ROWS = 10  # of the table
WORKERS = 20
WARM = 0.2  # the share of the time before the slope is taken: allocators and caches fill
TINY = 10_100  # requests before the load: the engine remembers the ids of the last 10,000 that ended


@dataclass(frozen=True)
class Ended:
    """A streamed request: when it was sent, and seconds to its first token and to its end."""

    at: float
    first: float
    last: float


@dataclass(frozen=True)
class Sample:
    """What both processes held at a time: bytes, and open files."""

    at: float
    server: int
    engine: int
    server_files: int
    engine_files: int


class Soak:
    """`run` it; then `ended` and `samples` are there.  Times are seconds since the load began."""

    def __init__(self, server: Server, seconds: float, rate: float, seed: int) -> None:
        self.ended: list[Ended] = []
        self.samples: list[Sample] = []
        self._server = server
        self._seconds = seconds
        self._rate = rate
        self._rng = random.Random(seed)

    async def run(self) -> None:
        """Raises AssertionError for an answer that is not the solo run's."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=120, limits=limits) as client:
            solo = [(await self._ask(client, i))[0] for i in range(POOL)]
            await asyncio.gather(*[self._fill(client, TINY // WORKERS) for _ in range(WORKERS)])
            self._began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                while (wait := self._rng.expovariate(self._rate)) + self._now() < self._seconds:
                    await asyncio.sleep(wait)
                    tasks.create_task(self._one(client, self._rng.randrange(POOL), solo))

    async def _fill(self, client: httpx.AsyncClient, count: int) -> None:
        """Requests that cost nothing but their ids."""
        for _ in range(count):
            answer = await client.post(GENERATE, json={"token_ids": [5], "sampling_params": {"max_tokens": 1}})
            assert answer.status_code == 200, answer.text

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _one(self, client: httpx.AsyncClient, i: int, solo: Sequence[Answer]) -> None:
        at = self._now()
        answer, first, last = await self._ask(client, i)
        assert answer == solo[i], f"request {i} differs from its solo run"
        self.ended.append(Ended(at, first, last))

    async def _ask(self, client: httpx.AsyncClient, i: int) -> tuple[Answer, float, float]:
        """The answer of a stream, and the seconds to its first event and to its end."""
        began, first, choices = time.monotonic(), 0.0, list[Any]()
        async with client.stream("POST", GENERATE, json=request(i) | {"stream": True}) as stream:
            assert stream.status_code == 200, await stream.aread()
            async for line in stream.aiter_lines():
                first = first or time.monotonic() - began
                if line.startswith("data: {"):
                    choices += json.loads(line[6:])["choices"]
        return tokens(choices), first, time.monotonic() - began

    async def _watch(self) -> None:
        processes = psutil.Process(self._server.process.pid), self._server.engine()
        while self._now() < self._seconds:
            memory = [process.memory_info().rss for process in processes]
            files = [process.num_fds() for process in processes]
            self.samples.append(Sample(self._now(), memory[0], memory[1], files[0], files[1]))
            await asyncio.sleep(1.0)


@dataclass(frozen=True)
class Block:
    """A part of the time: milliseconds to the first token and to the end, bytes on average, files at most."""

    begin: float
    requests: int
    first_p50: float
    first_p99: float
    last_p50: float
    last_p99: float
    server: float
    engine: float
    server_files: int
    engine_files: int


def block(soak: Soak, begin: float, end: float) -> Block:
    """What happened between two times."""
    requested = [request for request in soak.ended if begin <= request.at < end]
    held = [sample for sample in soak.samples if begin <= sample.at < end]
    first, last = [1e3 * request.first for request in requested], [1e3 * request.last for request in requested]
    return Block(
        begin,
        len(requested),
        percentile(first, 0.5),
        percentile(first, 0.99),
        percentile(last, 0.5),
        percentile(last, 0.99),
        fmean(sample.server for sample in held),
        fmean(sample.engine for sample in held),
        max(sample.server_files for sample in held),
        max(sample.engine_files for sample in held),
    )


def blocks(soak: Soak, seconds: float, count: int) -> list[Block]:
    """The time in so many parts."""
    return [block(soak, seconds * i / count, seconds * (i + 1) / count) for i in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share is not above; nan of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Per minute, by least squares, and its standard error if the values err independently; nan of too few."""
    if len(times) < 3:
        return float("nan"), float("nan")
    fit = linear_regression(times, values)
    rest = sum((value - fit.intercept - fit.slope * at) ** 2 for at, value in zip(times, values, strict=True))
    spread = sum((at - fmean(times)) ** 2 for at in times)
    return 60 * fit.slope, 60 * (rest / (len(times) - 2) / spread) ** 0.5


def report(soak: Soak, seconds: float) -> list[str]:
    """A table in Markdown, and how memory grows."""
    rows = [
        "| minutes | requests | first token p50, p99, ms | whole p50, p99, ms | RSS server, engine, MiB | files |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| from {row.begin / 60:g} | {row.requests} | {row.first_p50:.1f}, {row.first_p99:.1f} | "
        f"{row.last_p50:.0f}, {row.last_p99:.0f} | {row.server / (1 << 20):.1f}, {row.engine / (1 << 20):.1f} | "
        f"{row.server_files}, {row.engine_files} |"
        for row in blocks(soak, seconds, ROWS)
    ]
    warm = [row for row in blocks(soak, seconds, int(seconds // BLOCK)) if row.begin >= WARM * seconds]
    for name in ("server", "engine"):
        grows, error = slope([row.begin for row in warm], [vars(row)[name] for row in warm])
        rows.append(f"{name}: RSS grows by {grows / 1024:.1f} +- {error / 1024:.1f} KiB a minute")
    return rows


def play(seconds: float, rate: float, seed: int) -> Soak:
    """A soak with a server of its own, and what must hold when it is over.  Raises AssertionError."""
    with Server("demo") as server:
        soak = Soak(server, seconds, rate, seed)
        asyncio.run(soak.run())
        server.wait_idle(60)
        deep = server.get("/health?deep=1")  # checks the KV accounting
        assert deep.status_code == 200, deep.text
        assert not any("Traceback" in line or "ERROR" in line for line in server.log), "\n".join(server.log[-200:])
        assert server.stop() == 0
    return soak


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of load. Default: 1800.")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second. Default: 10.")
    parser.add_argument("--seed", type=int, default=1, help="of requests and arrivals. Default: 1.")
    parser.add_argument("--csv", type=Path, help="a row per half a minute")
    args = parser.parse_args()
    soak = play(args.seconds, args.rate, args.seed)
    print(f"{len(soak.ended)} requests in {args.seconds:g} s")
    print("\n".join(report(soak, args.seconds)))
    if args.csv:
        rows = [vars(block) for block in blocks(soak, args.seconds, int(args.seconds // BLOCK))]
        with args.csv.open("w", newline="") as target:
            writer = csv.DictWriter(target, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
