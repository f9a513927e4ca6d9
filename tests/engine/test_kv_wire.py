"""The protocol between two servers: the handshake, codes of frames, lengths, and hostile peers."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.waiting import PATIENCE
from tokserve.base.errors import StartError
from tokserve.engine.kv_cache.block_table import BlockTable
from tokserve.features.kv import tcp, wire
from tokserve.features.kv.leases import LeaseTable
from tokserve.features.kv.tcp import BlockServer, Pull, differences, run_pull, send_note
from tokserve.features.kv.wire import BLOCK, MAGIC, REQUEST, PeerChannel, PeerError

KEY, BLOCK_BYTES = b"a secret of the test", 100
PARTS = {"weights": "w", "layout": "l"}


class Giver:
    """A server with one lease of four blocks; block i has the content i, i, ..."""

    def __init__(self) -> None:
        self.leases = LeaseTable(30.0, time.monotonic)
        table = BlockTable("")
        table.blocks = [0, 1, 2, 3]
        self.keys = [bytes([number]) * 32 for number in range(4)]
        self.lease = self.leases.add("r#0", table, self.keys)
        self.parts = dict(PARTS)
        self.server = BlockServer(
            "127.0.0.1",
            0,
            KEY,
            "engine",
            self.leases,
            block_bytes=BLOCK_BYTES,
            identity=lambda: self.parts,
            read=lambda blocks: [bytes([block]) * BLOCK_BYTES for block in blocks],
            on_change=lambda: None,
        )


@pytest.fixture
def giver() -> Iterator[Giver]:
    request = Giver()
    yield request
    request.server.close()


def pull(giver: Giver, key: bytes = KEY, first: int = 1, **changes: object) -> tuple[Pull, dict[int, bytes]]:
    """Blocks `first` to 3, into pages 11, ..."""
    pages: dict[int, bytes] = {}
    request = Pull(
        "127.0.0.1", giver.server.port, "engine", "r#0", PARTS, first, giver.keys[first:], list(range(11, 15 - first))
    )
    for name, value in changes.items():
        setattr(request, name, value)

    def write(blocks: list[int], contents: list[bytearray]) -> None:
        pages.update(zip(blocks, map(bytes, contents), strict=True))

    run_pull(request, key, BLOCK_BYTES, write)
    return request, pages


def test_blocks_arrive_and_the_lease_is_over(giver: Giver) -> None:
    done, pages = pull(giver)
    assert (done.count, done.error) == (3, "")
    assert pages == {10 + number: bytes([number]) * BLOCK_BYTES for number in (1, 2, 3)}
    end = time.monotonic() + PATIENCE
    while not (ended := giver.leases.take_ended()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert ended == [giver.lease] and giver.leases.num_blocks == 0
    assert "lease has ended" in pull(giver)[0].error


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine_id": "other"}, "restarted"),
        ({"request_id": "x"}, "lease has ended"),
        ({"identity": PARTS | {"weights": "v"}}, "differ in: weights"),
        ({"keys": [b"k" * 32] * 3}, "adapter, salt or images differ"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(giver: Giver, changes: dict[str, object], reason: str) -> None:
    done, pages = pull(giver, **changes)
    assert reason in done.error and done.count == 0 and not pages


def test_without_the_key_there_is_nothing(giver: Giver) -> None:
    done, pages = pull(giver, key=b"another secret")
    assert done.count == 0 and not pages and done.error
    assert giver.leases.num_blocks > 0  # it still is


def test_a_server_without_the_key_is_no_server() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        connection.sendall(MAGIC + bytes(32))
        connection.recv(200)
        connection.sendall(bytes(32))
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    request = Pull("127.0.0.1", listener.getsockname()[1], "e", "r", {}, 0, [b"k"], [1])
    run_pull(request, KEY, BLOCK_BYTES, lambda blocks, contents: None)
    assert "does not have the key" in request.error
    listener.close()


def test_heartbeats_extend_and_releases_end(giver: Giver) -> None:
    giver.lease.expiry = time.monotonic() + 1
    send_note("127.0.0.1", giver.server.port, KEY, "heartbeat", ["r#0", "unknown"])
    assert giver.lease.expiry > time.monotonic() + 20
    send_note("127.0.0.1", giver.server.port, KEY, "release", ["r#0"])
    assert giver.leases.take_ended() == [giver.lease]
    send_note("127.0.0.1", 1, KEY, "release", ["r#0"])  # no server: no error


def test_a_lease_expires_unless_it_is_being_read() -> None:
    now = [0.0]
    leases = LeaseTable(10.0, lambda: now[0])
    table = BlockTable("")
    lease = leases.add("r", table, [])
    assert leases.seconds_left() == 10.0 and leases.begin_read("r") is lease
    now[0] = 11.0
    assert leases.take_ended() == []
    leases.end_read(lease)
    assert leases.take_ended() == [lease] and leases.begin_read("r") is None and leases.seconds_left() is None


@pytest.mark.parametrize(
    "garbage",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), secrets.token_bytes(5000), MAGIC + bytes(64), b"\xff" * 100_000],
)
def test_garbage_ends_only_its_connection(giver: Giver, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", giver.server.port), 10) as connection:
        try:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except OSError:
            pass  # it was closed while more came
    assert pull(giver)[0].count == 3


def test_a_frame_that_is_changed_too_long_or_unreadable_ends_the_connection(giver: Giver) -> None:
    def frames(raw: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", giver.server.port), 10) as connection:
            PeerChannel.connect(connection, KEY, BLOCK_BYTES)
            connection.sendall(raw)
            try:
                return connection.recv(100)
            except OSError:
                return b""

    assert frames((1 << 31).to_bytes(4, "big") + bytes([REQUEST])) == b""
    assert frames((101).to_bytes(4, "big") + bytes([BLOCK])) == b""
    assert frames((3).to_bytes(4, "big") + bytes([REQUEST]) + b"abc" + bytes(32)) == b""
    for message in ({"op": "no"}, {"op": 1}, {"op": "pull", "keys": 5}, {"unknown": 1}, [], "x"):
        with socket.create_connection(("127.0.0.1", giver.server.port), 10) as connection:
            channel = PeerChannel.connect(connection, KEY, BLOCK_BYTES)
            channel.send_message(REQUEST, message)  # type: ignore[arg-type]
            with pytest.raises((PeerError, OSError)):
                channel.receive_message()
    assert pull(giver)[0].count == 3


def test_connections_are_bounded(giver: Giver) -> None:
    silent = [socket.create_connection(("127.0.0.1", giver.server.port), 10) for _ in range(tcp.MAX_CONNECTIONS)]
    for one in silent:
        one.recv(100)
    more = socket.create_connection(("127.0.0.1", giver.server.port), 10)
    assert more.recv(100) == b""
    for one in (*silent, more):
        one.close()
    end = time.monotonic() + PATIENCE
    while pull(giver)[0].count != 3:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_slow_handshake_is_disconnected(giver: Giver, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as short:
        short.setattr(wire, "HANDSHAKE_SECONDS", 0.3)
        with socket.create_connection(("127.0.0.1", giver.server.port), 10) as connection:
            end = time.monotonic() + PATIENCE
            with pytest.raises(OSError):
                while time.monotonic() < end:
                    connection.send(b"x")  # each byte in time
                    time.sleep(0.05)
    assert pull(giver)[0].count == 3


def test_a_server_that_dies_in_the_middle_leaves_what_came(giver: Giver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CHUNK_BYTES", BLOCK_BYTES)

    def ended(blocks: list[int]) -> list[bytes]:
        giver.lease.ended = 3 in blocks
        return [bytes([block]) * BLOCK_BYTES for block in blocks]

    giver.server._read = ended
    done, pages = pull(giver)
    assert done.count == 2 and "closed" in done.error and sorted(pages) == [11, 12]


def test_a_name_that_no_host_has_is_an_error_of_the_pull() -> None:
    request = Pull("a..b", 1, "engine", "r#0", PARTS, 0, [b"k"], [1])
    run_pull(request, KEY, BLOCK_BYTES, lambda blocks, contents: None)
    assert request.count == 0 and request.error.startswith("a..b:1: ")
    send_note("a..b", 1, KEY, "release", ["r#0"])


def test_an_address_in_use_is_a_start_error(giver: Giver) -> None:
    with pytest.raises(StartError, match="cannot listen"):
        BlockServer(
            "127.0.0.1",
            giver.server.port,
            KEY,
            "e",
            giver.leases,
            block_bytes=1,
            identity=lambda: {},
            read=lambda blocks: [],
            on_change=lambda: None,
        )


def test_the_parts_that_differ_are_named() -> None:
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == "b, c"
