"""The simulation of routing: affinity finds more in the caches than a blind spread, and leaves no engine idle."""

from __future__ import annotations

import json
import random
from pathlib import Path

from benchmarks.routing import POLICIES, TRACE_BLOCK, SimulatedEngine, conversations, recorded, simulate

ENGINES = 4


def engines() -> list[SimulatedEngine]:
    return [SimulatedEngine(capacity=2048, prefill=8000.0, decode=2000.0) for _ in range(ENGINES)]


def test_affinity_finds_more_than_a_blind_spread() -> None:
    traffic = conversations(random.Random(0), count=60, turns=5, rate=40.0)
    results = {policy: simulate(traffic, policy, engines()) for policy in POLICIES}
    assert results["prefix"]["hit_rate"] > 1.1 * results["round_robin"]["hit_rate"]
    assert results["prefix"]["ttft_mean"] < results["round_robin"]["ttft_mean"]
    assert results["prefix"]["busiest"] < 0.5


def test_a_recorded_trace_has_equal_tokens_where_it_has_equal_hashes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * number, "input_length": TRACE_BLOCK + 100, "output_length": 5, "hash_ids": [7, number]}
        for number in range(3)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    traffic = list(recorded(path, scale=2.0))
    assert [arrival.at for arrival in traffic] == [0.0, 0.5, 1.0]
    assert all(len(arrival.prompt) == TRACE_BLOCK + 100 for arrival in traffic)
    assert traffic[0].prompt[:TRACE_BLOCK] == traffic[1].prompt[:TRACE_BLOCK]
    assert traffic[0].prompt[TRACE_BLOCK:] != traffic[1].prompt[TRACE_BLOCK:]
    assert simulate(traffic, "prefix", engines())["hit_rate"] > 0.5
