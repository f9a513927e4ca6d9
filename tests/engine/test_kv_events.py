"""KV events: a subscriber that applies them has the set of cached blocks, at any time."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
import zmq

from tests.engine.harness import Engine
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.features.kv.event_publisher import END, shifted
from tokserve.features.kv.events import EventLog, external, plain, spec_kind
from tokserve.features.kv.external_kv import KVEvents
from tokserve.features.lora.adapter import Adapter
from tokserve.protocol.kv_spec import KVLayout, KVSpec, StateSpec
from tokserve.protocol.prompt import Feature

PATIENCE_MS = 30_000


class Mirror:
    """The cached blocks, as a router learns them: chains of tokens by hash, from either form of events."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int, ...]] = {}  # of the whole prefix that ends with the block
        self.next = 0

    def apply(self, sequence: int, payload: bytes) -> None:
        assert sequence == self.next, "a gap"
        self.next += 1
        moment, events, rank = msgspec.msgpack.decode(payload)
        assert moment > 1e9 and rank == 0
        for event in events:
            self._apply(event if isinstance(event, dict) else named(event))

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.tokens.clear()
        elif event["type"] == "BlockRemoved":
            assert event["medium"] == "GPU"
            for block in event["block_hashes"]:
                del self.tokens[block]
        else:
            size, ids = event["block_size"], event["token_ids"]
            assert len(ids) == size * len(event["block_hashes"])
            parent = event["parent_block_hash"]
            for index, block in enumerate(event["block_hashes"]):
                assert block not in self.tokens, "stored twice"
                before = () if parent is None else self.tokens.get(parent)
                assert before is not None, "a block without the one before"
                self.tokens[block] = (*before, *ids[index * size : (index + 1) * size])
                parent = block


def named(event: list[Any]) -> dict[str, Any]:
    kind, *fields = event
    names = {
        "BlockStored": [
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
        ],
        "BlockRemoved": ["block_hashes", "medium"],
        "AllBlocksCleared": [],
    }[kind]
    return {"type": kind} | dict(zip(names, fields, strict=False))


class Subscriber:
    def __init__(self, source: dict[str, Any], topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(source["endpoint"])
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)

    def receive(self) -> tuple[str, int, bytes]:
        assert self.socket.poll(PATIENCE_MS), "no events"
        topic, sequence, payload = self.socket.recv_multipart()
        return topic.decode(), int.from_bytes(sequence, "big"), payload

    def close(self) -> None:
        self.context.destroy(linger=0)


def config(**fields: Any) -> dict[str, Any]:
    defaults = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    return {"kv_events_config": defaults | {"interface": "127.0.0.1"} | fields}


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    running: list[Engine] = []
    yield running
    for engine in running:
        engine.core.close()


def source_of(engine: Engine) -> dict[str, Any]:
    engine.call("kv_event_sources")
    source: dict[str, Any] = engine.replies[-1].result[0]
    return source


def replay(source: dict[str, Any], start: int) -> list[tuple[int, bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(source["replay_endpoint"])
    socket.send_multipart((b"", start.to_bytes(8, "big")))
    batches = []
    while socket.poll(PATIENCE_MS):
        empty, sequence, payload = socket.recv_multipart()
        assert empty == b""
        if sequence == END:
            break
        batches.append((int.from_bytes(sequence, "big"), payload))
    context.destroy(linger=0)
    return batches


def cached(engine: Engine) -> set[int]:
    return {external(block_hash) for block_hash in engine.core.cache.pool._index}


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("seed", range(3))
def test_a_subscriber_has_the_set_of_cached_blocks(engines: list[Engine], form: str, seed: int) -> None:
    engine = Engine(num_blocks=14, max_num_seqs=3, **config(format=form))
    engines.append(engine)
    source = source_of(engine)
    rng = random.Random(seed)
    mirror, applied = Mirror(), 0
    for number in range(12):
        prompt = [9, 8, 7, 6, 5, 4, 3, 2, 9, 9, 8, 8][: rng.choice([4, 8, 12])] + [rng.randrange(4) for _ in range(5)]
        engine.add(f"r{number}", prompt, max_tokens=rng.randint(1, 20), ignore_eos=True, seed=number)
        engine.steps(rng.randint(0, 9))
        if rng.random() < 0.15:
            engine.call("reset_prefix_cache")
        if rng.random() < 0.3:
            engine.abort(f"r{number}")
        engine.run()
        for sequence, payload in replay(source, applied):
            mirror.apply(sequence, payload)
        applied = mirror.next
        assert set(mirror.tokens) == cached(engine)
    assert applied, "nothing was published"


def test_batches_come_in_order_under_their_topic(engines: list[Engine]) -> None:
    engine = Engine(**config(topic="kv@pod@model"))
    engines.append(engine)
    source = source_of(engine)
    subscriber = Subscriber(source, "kv@")
    try:
        number = 0
        while not subscriber.socket.poll(50):  # until it has joined
            engine.add(f"r{number}", [number % 20, 2, 3, 4, 5], max_tokens=1)
            engine.run()
            number += 1
        topic, sequence, payload = subscriber.receive()
        assert topic == source["topic"] == "kv@pod@model"
        mirror = Mirror()
        for before in replay(source, 0)[:sequence]:
            mirror.apply(*before)
        mirror.apply(sequence, payload)
        engine.call("reset_prefix_cache")
        engine.run()
        while mirror.tokens:
            mirror.apply(*subscriber.receive()[1:])
    finally:
        subscriber.close()


def test_a_replay_has_the_last_batches_only(engines: list[Engine]) -> None:
    engine = Engine(**config(buffer_steps=2))
    engines.append(engine)
    for number in range(5):
        engine.add(f"r{number}", [number, 2, 3, 4, 5], max_tokens=1)
        engine.run()
    batches = replay(source_of(engine), 0)
    assert [sequence for sequence, _ in batches] == [3, 4]
    assert replay(source_of(engine), 5) == []


def test_a_full_queue_drops_batches_and_the_numbers_tell(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(**config(max_queue_size=2))
    engines.append(engine)
    publisher = engine.feature(KVEvents).publisher
    assert publisher is not None
    real = publisher._send
    held: list[Any] = []
    monkeypatch.setattr(publisher, "_send", lambda *batch: held.append(batch))
    publisher._queue.extend([(0, 0.0, []), (1, 0.0, [])])
    publisher._sequence = 2
    for _ in range(3):
        publisher.publish([])
    assert len(publisher._queue) <= 2 and caplog.text.count("KV events are dropped") == 1
    monkeypatch.setattr(publisher, "_send", real)
    publisher._queue.clear()
    publisher.publish([])
    assert [sequence for sequence, _ in replay(source_of(engine), 0)][-1:] == [5]


def test_a_request_for_a_replay_that_cannot_be_read_is_ignored(engines: list[Engine]) -> None:
    engine = Engine(**config())
    engines.append(engine)
    source = source_of(engine)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(source["replay_endpoint"])
    socket.send_multipart((b"", b"12"))
    socket.send_multipart((b"x",))
    engine.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    engine.run()
    while not (batches := replay(source, 0)):
        continue
    assert len(batches) == 1
    context.destroy(linger=0)


def test_events_have_the_extra_keys_of_a_hash() -> None:
    log = EventLog(2, "full_attention")
    hashes = [bytes([i]) * 32 for i in range(3)]
    feature = Feature("image", b"\xab", 3, 2, b"")
    adapter = Adapter("a", "", 0, 7)
    log.stored(None, hashes, array("i", range(1, 8)), 0, variant=adapter, cache_salt="s", features=[feature])
    event = msgspec.to_builtins(log.take()[0])
    assert event == {
        "type": "BlockStored",
        "block_hashes": [external(h) for h in hashes],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6],
        "block_size": 2,
        "lora_id": 7,
        "medium": "GPU",
        "lora_name": "a",
        "extra_keys": [("a", "s"), ("a", ("ab", 1)), ("a", ("ab", -1))],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    log.removed(hashes[0])
    removed = {"type": "BlockRemoved", "block_hashes": [external(hashes[0])], "medium": "GPU", "group_idx": 0}
    assert msgspec.to_builtins(log.take()) == [removed] and not log.take()


def test_arrays_have_the_fields_that_older_readers_know() -> None:
    log = EventLog(2, "full_attention")
    block = bytes(32)
    log.stored(None, [block], array("i", [1, 2]), 0)
    log.stored(None, [block], array("i", [1, 2]), 0, cache_salt="s")
    log.removed(block)
    log.cleared()
    stored = ["BlockStored", [0], None, [1, 2], 2, None, "GPU", None]
    expected = [stored, [*stored, [("s",)]], ["BlockRemoved", [0], "GPU"], ["AllBlocksCleared"]]
    assert [plain(event) for event in log.take()] == expected


def test_blocks_of_latent_attention_are_named_as_such() -> None:
    def layout(kind: Literal["kv", "latent"]) -> KVLayout:
        return KVLayout((StateSpec(4, 8, "float32"), KVSpec(1, 8, "float32", 4, kind)), 4, 16)

    assert [spec_kind(layout("kv")), spec_kind(layout("latent"))] == ["full_attention", "mla_attention"]


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("tcp://[::1]:5", 1, "tcp://[::1]:6"),
        ("ipc:///tmp/x", 0, "ipc:///tmp/x"),
        ("ipc:///tmp/x", 1, "ipc:///tmp/x_dp1"),
    ],
)
def test_engines_have_an_endpoint_each(endpoint: str, rank: int, expected: str) -> None:
    assert shifted(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"endpoint": "5557"}, "endpoint"),
        ({"replay_endpoint": "tcp://a:b"}, "replay_endpoint"),
        ({"hwn": 1}, "hwn"),
        ({"publisher": "kafka"}, "publisher"),
        ({"buffer_steps": -1}, "buffer_steps"),
        ({"format": "x"}, "format"),
        ({"hwm": 1 << 31}, "hwm"),
    ],
)
def test_an_object_that_cannot_be_used_names_its_key(config: dict[str, Any], word: str) -> None:
    with pytest.raises(StartError, match=f"kv_events_config.*{word}"):
        Config.make(kv_events_config=config).kv.events()


def test_an_address_in_use_is_an_error_at_the_start(engines: list[Engine]) -> None:
    engines.append(Engine(**config()))
    port = source_of(engines[0])["endpoint"].rpartition(":")[2]
    with pytest.raises(StartError, match=f"kv_events_config: cannot use tcp://127.0.0.1:{port}"):
        Engine(**config(endpoint=f"tcp://*:{port}"))


@pytest.mark.parametrize("kv_events_config", [None, {}, {"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_without_the_option_nothing_is_published(kv_events_config: dict[str, Any] | None) -> None:
    engine = Engine(kv_events_config=kv_events_config)
    engine.call("kv_event_sources")
    assert engine.replies[-1].result == [] and engine.core.cache.events is None
