"""What routing by prefix is worth: traffic with shared prefixes over several engines, simulated or sent to servers.

`python benchmarks/routing.py` simulates `tokserve.features.fleet.router` beside round robin and least load.
`--trace FILE` takes recorded traffic in Mooncake's form (JSON lines of `timestamp` in ms, `input_length`,
`output_length` and `hash_ids`, one for each 512 tokens of the prompt).  `--router URL --servers URL...` sends synthetic
traffic to a real router instead and reads the servers' hit rates from their metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from tokserve.features.fleet.router import PrefixRouter

BLOCK = 16  # tokens
TRACE_BLOCK = 512  # tokens that one of a trace's hash ids stands for
SLACK = 4096  # tokens, as `features/fleet/replicas` has it by default
POLICIES = ("round_robin", "least_load", "prefix")


@dataclass(frozen=True)
class Arrival:
    """A request of the traffic: when (seconds), its prompt's tokens, and how many it makes."""

    at: float
    prompt: list[int]
    output: int


def conversations(rng: random.Random, count: int, turns: int, rate: float, systems: int = 8) -> list[Arrival]:
    """`count` conversations of `turns` requests each, at `rate` requests a second: each prompt has all turns before it,
    and begins with one of a few system prompts."""
    prompts = [[rng.randrange(3, 250) for _ in range(rng.randrange(64, 257))] for _ in range(systems)]
    histories = [list(rng.choice(prompts)) for _ in range(count)]
    left = [number for number in range(count) for _ in range(turns)]
    rng.shuffle(left)
    arrivals, now = [], 0.0
    for number in left:
        now += rng.expovariate(rate)
        histories[number] += [rng.randrange(3, 250) for _ in range(rng.randrange(16, 65))]
        arrivals.append(Arrival(now, list(histories[number]), 16))
        histories[number] += [rng.randrange(3, 250) for _ in range(16)]
    return arrivals


def recorded(path: Path, scale: float) -> Iterator[Arrival]:
    """A trace's requests, with arrival times divided by `scale`; equal hash ids are equal tokens."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = [hash((key, index)) & 0x7FFFFFFF for key in row["hash_ids"] for index in range(TRACE_BLOCK)]
        yield Arrival(row["timestamp"] / 1e3 / scale, prompt[: row["input_length"]], row["output_length"])


@dataclass
class SimulatedEngine:
    """Computes prompts one after the other, with an LRU cache of whole blocks.  Rates in tokens a second."""

    capacity: int  # blocks
    prefill: float
    decode: float
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0
    load: int = 0  # tokens of the requests that it has
    served: int = 0

    def serve(self, arrival: Arrival, keys: Sequence[int]) -> tuple[int, float, float]:
        """Tokens found in the cache, and the times of the first token and of the end."""
        hits = next((index for index, key in enumerate(keys) if key not in self.cached), len(keys)) * BLOCK
        hits = min(hits, len(arrival.prompt) - 1)
        first = max(arrival.at, self.free_at) + (len(arrival.prompt) - hits) / self.prefill
        self.free_at = first + arrival.output / self.decode
        for key in keys:
            self.cached[key] = None
            self.cached.move_to_end(key)
        while len(self.cached) > self.capacity:
            self.cached.popitem(last=False)
        self.load += len(arrival.prompt) + arrival.output
        self.served += 1
        return hits, first, self.free_at


def block_keys(prompt: Sequence[int]) -> list[int]:
    """A hash for each whole block, with all before it."""
    key, keys = 0, []
    for start in range(0, len(prompt) // BLOCK * BLOCK, BLOCK):
        key = hash((key, tuple(prompt[start : start + BLOCK])))
        keys.append(key)
    return keys


def simulate(traffic: Sequence[Arrival], policy: str, make_engines: list[SimulatedEngine]) -> dict[str, float]:
    """Hit rate, times to the first token (mean and 99th percentile, seconds), and the busiest engine's share."""
    engines, router = make_engines, PrefixRouter(len(make_engines), BLOCK, SLACK)
    ends: list[tuple[float, int, int]] = []
    waits, hits, total = [], 0, 0
    for number, arrival in enumerate(traffic):
        while ends and ends[0][0] <= arrival.at:
            _, index, tokens = heapq.heappop(ends)
            engines[index].load -= tokens
        loads = {index: engine.load for index, engine in enumerate(engines)}
        if policy == "round_robin":
            chosen = number % len(engines)
        elif policy == "least_load":
            chosen = min(loads, key=lambda index: (loads[index], (index - number) % len(engines)))
        else:
            chosen = router.choose([_request(arrival.prompt)], loads)  # type: ignore[list-item]
        num_cached, first, end = engines[chosen].serve(arrival, block_keys(arrival.prompt))
        heapq.heappush(ends, (end, chosen, len(arrival.prompt) + arrival.output))
        waits.append(first - arrival.at)
        hits, total = hits + num_cached, total + len(arrival.prompt)
    waits.sort()
    return {
        "hit_rate": hits / total,
        "ttft_mean": sum(waits) / len(waits),
        "ttft_p99": waits[int(0.99 * (len(waits) - 1))],
        "busiest": max(engine.served for engine in engines) / len(traffic),
    }


def _request(prompt: Sequence[int]) -> Any:
    """What the router reads of a request."""
    options = SimpleNamespace(adapter="", cache_salt=None, group_id=None, draft_group=None)
    packed = struct.pack(f"<{len(prompt)}i", *prompt)
    return SimpleNamespace(prompt=SimpleNamespace(ids=packed), engine_requests=[SimpleNamespace(options=options)])


# --- real servers ---


async def send(traffic: Sequence[Arrival], router: str, model: str, sglang: bool) -> None:
    """Send the traffic at its times, as completions of token ids or to SGLang's /generate."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=router, timeout=120, limits=limits) as client:
        began = time.monotonic()

        async def one(arrival: Arrival) -> None:
            await asyncio.sleep(arrival.at - (time.monotonic() - began))
            path = "/generate" if sglang else "/v1/completions"
            body: dict[str, Any] = {
                "model": model,
                "prompt": arrival.prompt,
                "max_tokens": arrival.output,
                "temperature": 0,
            }
            if sglang:
                params = {"max_new_tokens": arrival.output, "temperature": 0}
                body = {"input_ids": arrival.prompt, "sampling_params": params}
            (await client.post(path, json=body)).raise_for_status()

        await asyncio.gather(*(one(arrival) for arrival in traffic))


def counted(servers: Sequence[str], name: str) -> list[float]:
    """A counter of each server."""
    texts = [httpx.get(f"{server}/metrics", timeout=30).text for server in servers]
    lines = [re.findall(rf"^tokserve:{name}_total{{[^}}]*}} (\S+)", text, re.MULTILINE) for text in texts]
    return [sum(map(float, values)) for values in lines]


def measure(
    traffic: Sequence[Arrival], router: str, servers: Sequence[str], model: str, sglang: bool
) -> dict[str, float]:
    """The hit rate of all servers over this traffic, and the share of prompt tokens of the busiest."""
    names = ("prefix_cache_hits", "prefix_cache_queries")
    before = [counted(servers, name) for name in names]
    asyncio.run(send(traffic, router, model, sglang))
    hits, queries = (
        [after - earlier for after, earlier in zip(counted(servers, name), counts, strict=True)]
        for name, counts in zip(names, before, strict=True)
    )
    return {"hit_rate": sum(hits) / max(1.0, sum(queries)), "busiest": max(queries) / max(1.0, sum(queries))}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4, help="Simulated engines. Default: 4.")
    parser.add_argument("--blocks", type=int, default=4096, help="KV blocks of each, of 16 tokens. Default: 4096.")
    parser.add_argument("--prefill", type=float, default=8000.0, help="Prompt tokens a second. Default: 8000.")
    parser.add_argument("--decode", type=float, default=2000.0, help="Output tokens a second. Default: 2000.")
    parser.add_argument("--conversations", type=int, default=200, help="Of the synthetic traffic. Default: 200.")
    parser.add_argument("--turns", type=int, default=6, help="Requests of each conversation. Default: 6.")
    parser.add_argument("--rate", type=float, default=40.0, help="Requests a second. Default: 40.")
    parser.add_argument("--seed", type=int, default=0, help="Of the synthetic traffic. Default: 0.")
    parser.add_argument("--trace", type=Path, help="recorded traffic, in Mooncake's form")
    parser.add_argument("--scale", type=float, default=1.0, help="How much faster the trace is replayed. Default: 1.")
    parser.add_argument("--router", help="URL of a router, for real servers")
    parser.add_argument("--servers", nargs="+", default=[], help="URLs of the servers behind it")
    parser.add_argument("--model", default="demo", help="The model's name there. Default: demo.")
    parser.add_argument("--sglang", action="store_true", help="the router is SGLang's gateway")
    args = parser.parse_args()
    synthetic = conversations(random.Random(args.seed), args.conversations, args.turns, args.rate)
    if args.router:
        result = measure(synthetic, args.router, args.servers, args.model, args.sglang)
        print(f"hit rate {result['hit_rate']:.1%}, busiest server {result['busiest']:.1%} of the prompt tokens")
        return
    traffic = list(recorded(args.trace, args.scale)) if args.trace else synthetic
    print(f"{len(traffic)} requests, {args.engines} engines")
    for policy in POLICIES:
        engines = [SimulatedEngine(args.blocks, args.prefill, args.decode) for _ in range(args.engines)]
        result = simulate(traffic, policy, engines)
        print(
            f"{policy:12} hit rate {result['hit_rate']:6.1%}  first token {result['ttft_mean'] * 1e3:8.1f} ms mean, "
            f"{result['ttft_p99'] * 1e3:8.1f} ms p99  busiest engine {result['busiest']:.1%}"
        )


if __name__ == "__main__":
    main()
