"""The socket thread: messages arrive in order and are not lost, and senders are not blocked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.engine.front import Front
from tokserve.base.curve import make_keys
from tokserve.base.errors import StartError
from tokserve.engine.socket import EngineSocket, Received
from tokserve.protocol.messages import Abort, Call, Dead, Reply, encode


@pytest.fixture
def wire(address: str) -> Iterator[EngineSocket]:
    running = EngineSocket(address, clock=lambda: 5.0)
    yield running
    running.close()


def take(wire: EngineSocket, count: int) -> list[Received]:
    received: list[Received] = []
    while len(received) < count:
        more = wire.take(60)
        assert more, "nothing came"
        received += more
    return received


def test_messages_go_both_ways_in_order(wire: EngineSocket, address: str) -> None:
    with Front(address) as front:
        for number in range(50):
            front.send(Call(number, "ping"))
        actual = take(wire, 50)
        assert [message for _, message, _ in actual] == [Call(number, "ping") for number in range(50)]
        assert {received for _, _, received in actual} == {5.0}
        (identity,) = {identity for identity, _, _ in actual}
        for number in range(50):
            wire.send(identity, Reply(number, {"n": number}))
        assert [front.receive() for _ in range(50)] == [Reply(number, {"n": number}) for number in range(50)]
        assert list(wire.peers) == [identity]


def test_each_front_end_gets_its_own(wire: EngineSocket, address: str) -> None:
    with Front(address) as one, Front(address) as two:
        one.send(Call(1, "ping"))
        two.send(Call(2, "ping"))
        for identity, message, _ in take(wire, 2):
            assert isinstance(message, Call)
            wire.send(identity, Reply(message.call_id))
        assert one.receive() == Reply(1)
        assert two.receive() == Reply(2)


def test_take_without_waiting_returns_at_once(wire: EngineSocket) -> None:
    assert wire.take(0) == []
    assert wire.take(0.01) == []


def test_unreadable_messages_are_logged_and_passed_over(
    wire: EngineSocket, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Front(address) as front:
        front.socket.send(b"\xc1 not msgpack")
        front.socket.send(b"\x92\x63\x00")  # an array with an unknown tag
        front.socket.send(b"\x93\x01\x91\xa1\xff\xa0")  # an Abort of an id that is not UTF-8
        front.socket.send(b"\x94\x02\x00\xa1x\x81\xa1a" + b"\x91" * 100_000)  # a Call, nested too deeply
        front.send(Abort(["a"]))
        assert [message for _, message, _ in take(wire, 1)] == [Abort(["a"])]
    assert caplog.text.count("cannot be read") == 4


def test_a_disconnected_front_end_affects_no_other(wire: EngineSocket, address: str) -> None:
    with Front(address) as front:
        front.send(Call(1, "ping"))
        ((identity_left, _, _),) = take(wire, 1)
    with Front(address) as front:
        front.send(Call(2, "ping"))
        ((identity, _, _),) = take(wire, 1)
        for number in range(2000):
            wire.send(identity_left, Reply(number, "x" * 1000))
        wire.send(identity, Reply(2))
        assert front.receive() == Reply(2)


def test_a_front_end_that_does_not_read_loses_nothing(wire: EngineSocket, address: str) -> None:
    with Front(address) as front:
        front.send(Call(1, "ping"))
        ((identity, _, _),) = take(wire, 1)
        for number in range(5000):  # more than default high-water marks
            wire.send(identity, Reply(number))
        assert [front.receive() for _ in range(5000)] == [Reply(number) for number in range(5000)]


def test_close_sends_what_was_handed_over(address: str) -> None:
    wire = EngineSocket(address)
    with Front(address) as front:
        front.send(Call(1, "ping"))
        ((identity, _, _),) = take(wire, 1)
        for number in range(200):
            wire.send(identity, Reply(number))
        wire.send(identity, Dead("over"))
        wire.close()
        assert not wire._thread.is_alive()
        assert [front.receive() for _ in range(201)][-1] == Dead("over")


def test_the_number_of_known_peers_is_limited(
    wire: EngineSocket, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokserve.engine.socket.PEERS_KEPT", 2)
    seen = []
    for _ in range(3):
        with Front(address) as front:
            front.send(Call(1, "ping"))
            seen.append(take(wire, 1)[0][0])
    assert list(wire.peers) == seen[1:]


def test_an_address_that_cannot_be_bound_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot listen"):
        EngineSocket(f"ipc://{tmp_path}/no/such/place")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_thread_is_noticed_by_the_loop(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EngineSocket, identity: bytes, *frames: bytes) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(EngineSocket, "_accept", fail)
    wire = EngineSocket(address)
    with Front(address) as front:
        front.send(Call(1, "ping"))
        with pytest.raises(RuntimeError, match="I/O thread failed"):
            wire.take(60)
    wire.send(b"x", Reply(1))
    wire.close()


def test_only_clients_with_the_keys_are_accepted() -> None:
    engine_keys, keys = make_keys()
    _, strange = make_keys()
    stranger = msgspec.structs.replace(strange, engine=keys.engine)  # it knows the engine's public key
    wire = EngineSocket("tcp://127.0.0.1:*", keys=engine_keys)
    try:
        with Front(wire.address) as plain, Front(wire.address, stranger) as other, Front(wire.address, keys) as client:
            for number, front in enumerate((plain, other)):
                with suppress(zmq.Again):  # refused already: there is no connection to send by
                    front.socket.send(encode(Call(number, "ping")), zmq.NOBLOCK)
            client.send(Call(2, "ping"))
            ((identity, message, _),) = take(wire, 1)
            assert message == Call(2, "ping")
            wire.send(identity, Reply(2))
            assert client.receive() == Reply(2)
            assert not wire.take(0.2) and not other.socket.poll(0) and not plain.socket.poll(0)
    finally:
        wire.close()
