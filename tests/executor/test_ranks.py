"""The engine's side of its ranks: messages, keys, merged replies and lost ranks; without a model."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tests.waiting import PATIENCE
from tokserve.base.errors import Conflict, RequestFailed, StartError
from tokserve.config import Config
from tokserve.config.engine_config import rank_config
from tokserve.features.ranks import auth, merge
from tokserve.features.ranks.channel import (
    Begin,
    Broken,
    Channel,
    End,
    Forward,
    Interrupt,
    Invoke,
    Joined,
    Loaded,
    Returned,
    SampleStep,
    StartRefused,
    Stepped,
    StoreGet,
    StoreSet,
    StoreValue,
)
from tokserve.features.ranks.hub import Hub
from tokserve.features.ranks.listeners import PairListener, SocketListener
from tokserve.features.ranks.worker import RankOpening, RankWorker, connect
from tokserve.protocol.kv_spec import KVLayout, KVSpec, StateLayout, StateSpec
from tokserve.protocol.plan import DeviceFacts, StepPlan, StepResult, encode

WAIT = 10.0
NO_TEXT = encode(Broken("text")).replace(b"text", b"te\xfft")  # a message whose string is not UTF-8


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


@pytest.fixture
def ranks() -> Iterator[tuple[Hub, list[Channel]]]:
    pairs = [pair() for _ in range(2)]
    hub = Hub({rank: hub_end for rank, (hub_end, _) in enumerate(pairs)}, lambda rank: "was killed by SIGKILL")
    yield hub, [rank_end for _, rank_end in pairs]
    hub.close()
    for _, rank_end in pairs:
        rank_end.close()


def test_messages_arrive_as_they_were() -> None:
    hub_end, rank_end = pair()
    zero = np.zeros(1, np.int32)
    plan = StepPlan(3, zero, zero + 2, zero, zero, zero + 1, np.zeros(0, np.int32), freed=[4])
    hub_end.send(Forward(plan))
    received = rank_end.to_rank()
    assert isinstance(received, Forward) and received.plan.step == 3 and received.plan.freed == [4]
    received.plan.num_tokens[0] += 1  # it may be written to
    big = bytes(range(256)) * 4096
    sender = threading.Thread(target=hub_end.send, args=(Invoke(1, "feed_update", {"chunk": big}, True),))
    sender.start()
    call = rank_end.to_rank()
    sender.join()
    assert isinstance(call, Invoke) and call.args == {"chunk": big}
    layout = KVLayout((KVSpec(2, 16, "float32"), StateSpec(4, 8, "float32", (2, 3))), 7, 16, StateLayout(1, 2, 16, 1))
    facts = DeviceFacts(layout, 10, "0", {"ops": {"linear": "cpp"}}, {"embeddings": 8})
    rank_end.send(Loaded.of(facts))
    loaded = hub_end.from_rank()
    assert isinstance(loaded, Loaded) and loaded.device_facts() == facts
    rank_end.close()
    with pytest.raises(ConnectionError):
        hub_end.from_rank()
    hub_end.close()


def test_results_come_in_order_and_calls_return_the_merged_replies(ranks: tuple[Hub, list[Channel]]) -> None:
    hub, (first, second) = ranks
    futures = [hub.result(), hub.result()]
    for step in range(2):
        none = np.zeros(0, np.int32)
        first.send(Stepped(StepResult(step, none, none, np.zeros(0, np.uint8))))
    assert [future.result(WAIT).step for future in futures] == [0, 1]
    reply = hub.invoke("memory", [{}, {}], background=False)
    for rank, channel in enumerate((first, second)):
        call = channel.to_rank()
        assert isinstance(call, Invoke) and call.method == "memory"
        channel.send(Returned(call.call_id, {"kv_bytes": rank + 1}))
    assert reply.result(WAIT) == {"kv_bytes": 3}


def test_a_copy_of_blocks_names_the_steps_that_came_before(ranks: tuple[Hub, list[Channel]]) -> None:
    hub, (first, second) = ranks
    for ended in range(3):
        hub.invoke("save_blocks", [{}, {}], lane="pages")
        for channel in (first, second):
            call = channel.to_rank()
            assert isinstance(call, Invoke) and call.after_steps == ended
        future, none = hub.result(), np.zeros(0, np.int32)
        first.send(Stepped(StepResult(ended, none, none, np.zeros(0, np.uint8))))
        future.result(WAIT)


class SlowRunner:
    """A runner of a rank that does not sample; its steps last until they are let go, and `log` has what ended."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.go = threading.Semaphore(0)
        self.ranks = SimpleNamespace(samples=False)

    def forward(self, plan: StepPlan) -> str:
        return f"step {plan.step}"

    def sample(self, step: str, bitmask: object) -> None:
        assert self.go.acquire(timeout=PATIENCE)
        self.log.append(step)

    def copy(self, method: str, args: dict[str, Any]) -> float:
        self.log.append(method)
        return 0.0


def test_a_rank_copies_blocks_after_the_steps_that_have_ended_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampling rank may end a step without logits before another rank has written the KV of the last layer: a copy
    that began at once would read blocks that are not written yet, or write blocks that still are."""
    hub_end, rank_end = pair()
    runner, zero = SlowRunner(), np.zeros(1, np.int32)

    def load(self: RankWorker, begin: Begin) -> DeviceFacts:
        self._runner = cast(Any, runner)
        return DeviceFacts(KVLayout((), 1, 16), 1, "0", {}, {})

    monkeypatch.setattr(RankWorker, "_load", load)
    worker = RankWorker(RankOpening(1, "", 0, "engine", "info", "text", ""), rank_end, sys.exit)
    served = threading.Thread(target=worker.serve)
    served.start()
    hub_end.send(Begin(Config(), 2, 1, ""))
    assert isinstance(hub_end.from_rank(), Loaded)
    for number in range(2):
        hub_end.send(Forward(StepPlan(number, zero, zero, zero, zero, zero, np.zeros(0, np.int32))))
        hub_end.send(SampleStep(None))
    hub_end.send(Invoke(1, "save_blocks", {}, lane="pages", after_steps=1))
    hub_end.send(Invoke(2, "read_files", {}, lane="read"))
    assert hub_end.from_rank() == Returned(2, 0.0)
    runner.go.release()
    assert hub_end.from_rank() == Returned(1, 0.0)
    assert runner.log == ["read_files", "step 0", "save_blocks"]
    runner.go.release()
    hub_end.send(End())
    served.join(PATIENCE)
    assert not served.is_alive()
    hub_end.close()
    rank_end.close()


def test_an_error_of_one_rank_interrupts_the_others(ranks: tuple[Hub, list[Channel]]) -> None:
    hub, (first, second) = ranks
    reply = hub.invoke("receive_update", [{}, {}], background=True)
    call = first.to_rank()
    assert isinstance(call, Invoke) and isinstance(second.to_rank(), Invoke)
    first.send(Returned.failed(call.call_id, Conflict("not now", field="update_id", code="update_open")))
    assert isinstance(second.to_rank(), Interrupt)
    second.send(Returned.failed(call.call_id, RuntimeError("it was interrupted")))
    with pytest.raises(Conflict, match="not now") as error:
        reply.result(WAIT)
    assert (error.value.field, error.value.code) == ("update_id", "update_open")


def test_ranks_find_each_other(ranks: tuple[Hub, list[Channel]]) -> None:
    _, (first, second) = ranks
    first.send(StoreGet("address"))
    second.send(StoreSet("address", b"here"))
    assert first.to_rank() == StoreValue("address", b"here")
    second.send(StoreGet("address"))
    assert second.to_rank() == StoreValue("address", b"here")


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (None, "rank 1 was killed by SIGKILL"),
        (Broken("ZeroDivisionError: /"), "rank 1 died: ZeroDivisionError: /"),
        (NO_TEXT, "rank 1 sent nonsense: 'utf-8' codec"),
        (b"\xc1", "rank 1 sent nonsense"),
    ],
)
def test_a_lost_rank_ends_all_waiting(ranks: tuple[Hub, list[Channel]], last: Any, reason: str) -> None:
    hub, (_, second) = ranks
    woken = threading.Event()
    hub.watch(woken.set)
    waiting = [hub.result(), hub.invoke("memory", [{}, {}], background=False), hub.loaded[0]]
    if last is None:
        second.close()
    elif isinstance(last, bytes):
        second.send_encoded(last)
    else:
        second.send(last)
    for future in waiting:
        with pytest.raises(RuntimeError, match=reason):
            future.result(WAIT)
    assert woken.wait(WAIT)
    with pytest.raises(RuntimeError, match=reason):
        hub.check()
    with pytest.raises(RuntimeError, match=reason):
        hub.result().result(WAIT)


def test_a_rank_that_cannot_start_reports_the_reason(ranks: tuple[Hub, list[Channel]]) -> None:
    hub, (first, _) = ranks
    first.send(StartRefused("option tensor_parallel_size: heads 3 cannot be divided"))
    with pytest.raises(StartError, match="heads 3"):
        hub.loaded[1].result(WAIT)


@pytest.mark.parametrize("keys", [("ab" * 16, "ab" * 16), ("ab" * 16, "cd" * 16), ("ab" * 16, "")])
def test_only_ranks_that_know_the_key_join(keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    if keys[0] != keys[1]:
        monkeypatch.setattr(auth, "SECONDS", 0.5)
    listener = SocketListener(("127.0.0.1", 0), bytes.fromhex(keys[0]))

    channels: list[Channel] = []

    def join() -> str:
        try:
            channel = connect(listener.address, keys[1])
        except ConnectionError as error:
            return str(error)
        channel.send(Joined(1, "0"))
        channels.append(channel)
        return ""

    with ThreadPoolExecutor() as pool:
        joined = pool.submit(join)
        received = listener.accept(WAIT)
        assert (received is not None) == (keys[0] == keys[1])
        assert ("does not know the key" in joined.result(WAIT)) == (keys[0] != keys[1] != "")
    for channel in [*channels, *([received[0]] if received else [])]:
        channel.close()
    listener.close()


def test_a_slow_handshake_delays_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "SECONDS", 0.3)
    listener = SocketListener(("127.0.0.1", 0), b"key")
    host, port = listener.address.split(":")

    def dribble(connection: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection.send(b"x")  # each byte in time
                time.sleep(0.05)

    with socket.create_connection((host, int(port))) as connection, ThreadPoolExecutor() as pool:
        pool.submit(dribble, connection)
        began = time.monotonic()
        assert listener.accept(PATIENCE) is None
        assert time.monotonic() < began + PATIENCE
    listener.close()


def test_garbage_at_the_listener_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "SECONDS", 0.5)
    listener = SocketListener(("127.0.0.1", 0))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\x01" + bytes(7) + b"\xc1"):
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(garbage)
            if not garbage:
                connection.close()
            assert listener.accept(WAIT) is None
    listener.close()


def test_the_message_on_an_inherited_socket_is_checked() -> None:
    listener = PairListener()
    joining, other, lost = (connect(listener.invite(rank).address, "") for rank in range(3))
    assert listener.accept(0.0) is None
    joining.send(Joined(0, "0"))
    received = listener.accept(WAIT)
    assert received is not None and received[1] == Joined(0, "0")
    other.send(Joined(0, "0"))  # it is number 1
    lost.send_encoded(NO_TEXT)
    assert listener.accept(WAIT) is listener.accept(WAIT) is None
    with pytest.raises(ConnectionError):
        other.to_rank()
    listener.close()
    for channel in (joining, other, lost, received[0]):
        channel.close()


def test_replies_of_ranks_are_merged() -> None:
    assert merge.results("begin_update", [True, False]) is False
    assert merge.results("checksums", [{"a": "1"}, {"a": "2"}]) == {"rank0.a": "1", "rank1.a": "2"}
    assert merge.results("collective_rpc", [1, 2]) == [1, 2]
    assert merge.results("place_adapter", [None, None]) is None
    with pytest.raises(Conflict, match="disagree"):
        merge.results("receive_update", ["one", "two"])
    a, b, c = b"a", b"b", b"c"
    assert merge.results("use_identity", [[a, b, c], [c, a]]) == [a, c]
    written = [
        {"written": w, "deleted": d, "failed": f, "seconds": t}
        for w, d, f, t in (([a, b], [c], 0, 0.5), ([a], [], 1, 0.7))
    ]
    assert merge.results("write_files", written) == {"written": [a], "deleted": [c], "failed": 1, "seconds": 0.7}
    read = [{"count": 3, "damaged": 0, "seconds": 0.1}, {"count": 1, "damaged": 1, "seconds": 0.0}]
    assert merge.results("read_files", read) == {"count": 1, "damaged": 1, "seconds": 0.1}
    assert merge.results("read_blocks", [[b"ab", b"ef"], [b"cd", b"gh"]]) == [b"abcd", b"efgh"]
    parts = merge.copy_args("write_blocks", {"blocks": [1], "contents": [b"abcde"]}, [2, 3])
    assert [part["contents"] for part in parts] == [[b"ab"], [b"cde"]]
    same, different = ({"version": "1", "weights": weights} for weights in "xy")
    assert merge.results("kv_identity", [same, same]) == same
    assert merge.results("kv_identity", [same, different])["version"] == "1"
    assert merge.results("kv_identity", [same, different]) != merge.results("kv_identity", [different, same])
    options = {"rank_offset": 3, "world_size": 5}
    sent = merge.args_of("init_weight_transfer", {"options": options}, 2)
    assert [one["options"]["rank_offset"] for one in sent] == [3, 4]
    profiles = merge.args_of("write_profile", {"path": "/tmp/a.json", "compress": False}, 2)
    assert [one["path"] for one in profiles] == ["/tmp/a.json", "/tmp/rank1-a.json"]
    assert merge.args_of("receive_update", {"source": {}}, 2) == [{"source": {}}] * 2
    assert isinstance(Returned(1, None, "odd", 599).exception(), RequestFailed)


def test_a_rank_has_its_part_of_cpus_and_memory_and_no_keys() -> None:
    config = Config.make(
        tensor_parallel_size=2, cpu_threads=4, cpu_bind="4-7", device="cpu", api_key=["secret"], admin_api_key=["more"]
    )
    first, second = (rank_config(config, rank) for rank in range(2))
    assert (first.runtime.cpu_bind, second.runtime.cpu_bind) == ("4,5", "6,7")
    assert first.runtime.cpu_threads == 2
    assert first.cache.gpu_memory_utilization == config.cache.gpu_memory_utilization / 2
    assert b"secret" not in msgspec.json.encode(Begin(first, 2, 1, "127.0.0.1"))
