"""`--kv-events-config` with two engines: where each publishes, and that a subscriber learns of both engines' blocks."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
import zmq

from tests.e2e.server import Server

CONFIG = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
PATIENCE_MS = 30_000


Batch = tuple[float, list[dict[str, Any]], int]


def first_batch(replay_endpoint: str) -> Batch:
    """The batch of sequence number 0; it may come a moment after the reply that it belongs to."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(replay_endpoint)
    try:
        for _ in range(1000):
            socket.send_multipart((b"", bytes(8)))
            assert socket.poll(PATIENCE_MS), "no reply"
            _, sequence, payload = socket.recv_multipart()
            if payload:
                assert sequence == bytes(8)
                batch: Batch = msgspec.msgpack.decode(payload, type=Batch)
                return batch
            time.sleep(0.01)
        raise AssertionError("nothing was published")
    finally:
        context.destroy(linger=0)


@pytest.mark.slow
def test_each_engine_publishes_under_its_rank() -> None:
    with Server(
        "demo", "-dp", "2", "--kv-cache-memory-bytes", "2M", "--kv-events-config", json.dumps(CONFIG)
    ) as server:
        sources = server.get("/kv_event_sources").json()
        assert [source["data_parallel_rank"] for source in sources] == [0, 1]
        assert all(source["endpoint"].startswith("tcp://127.0.0.1:") for source in sources)
        assert len({source["endpoint"] for source in sources}) == 2
        prompt = list(range(40, 80))
        for rank in range(2):
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}}
            answer = server.post("/inference/v1/generate", body, headers={"X-data-parallel-rank": str(rank)})
            assert answer.status_code == 200
            _, events, batch_rank = first_batch(sources[rank]["replay_endpoint"])
            assert batch_rank == rank and [event["type"] for event in events] == ["BlockStored"]
            assert events[0]["token_ids"] == prompt[:32] and events[0]["block_size"] == 16
            assert events[0]["group_idx"] == 0 and events[0]["kv_cache_spec_kind"] == "full_attention"
