"""The bytes between two servers that transfer KV: a handshake with a shared key, then frames with a code each.

    server -> client   MAGIC, nonce
    client -> server   MAGIC, nonce, HMAC(key, "client" + both nonces)
    server -> client   HMAC(key, "server" + both nonces)
    frames             length (4 bytes), kind (1 byte), body, HMAC(session key, direction, number, kind, body)

A peer without the key learns and sends nothing more than the handshake.  The code of a frame covers its number and
direction, so frames can be neither changed nor replayed; they are not encrypted.  Bodies are msgpack, or the bytes of a
block as they are.  Lengths are checked before memory is taken.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tokserve.base.sockets import receive_exactly

MAGIC = b"TOKKVTR1"
NONCE = CODE = 32
REQUEST, REPLY, REFUSAL, BLOCK = range(1, 5)  # kinds
Buffer = bytes | bytearray | memoryview
MAX_MESSAGE = 64 << 20  # bytes of a frame that is no block
HANDSHAKE_SECONDS = 10.0


class PeerError(Exception):
    """The other side cannot be reached, has no right to be there, or does not keep to the protocol."""


def _code(key: bytes, *parts: Buffer) -> bytes:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()


@contextmanager
def _handshake(connection: socket.socket) -> Iterator[float]:
    """Until when the handshake in the block must be over, however the peer spreads its bytes.  The connection's own
    timeout holds again afterwards."""
    timeout = connection.gettimeout()
    yield time.monotonic() + HANDSHAKE_SECONDS
    connection.settimeout(timeout)


class PeerChannel:
    """A connection whose other side has shown the key.  `max_block`: bytes that a block's frame may have."""

    def __init__(self, connection: socket.socket, session_key: bytes, *, is_server: bool, max_block: int) -> None:
        self._connection = connection
        self._key = session_key
        self._out, self._in = (b"s", b"c") if is_server else (b"c", b"s")
        self._max_block = max_block
        self._num_sent = self._num_received = 0

    @classmethod
    def accept(cls, connection: socket.socket, key: bytes, max_block: int) -> PeerChannel:
        """The server's side of the handshake.  Raises PeerError or OSError."""
        nonce = secrets.token_bytes(NONCE)
        with _handshake(connection) as deadline:
            connection.sendall(MAGIC + nonce)
            hello = bytes(receive_exactly(connection, len(MAGIC) + NONCE + CODE, deadline))
        other, code = hello[len(MAGIC) : -CODE], hello[-CODE:]
        if hello[: len(MAGIC)] != MAGIC or not hmac.compare_digest(code, _code(key, b"client", nonce, other)):
            raise PeerError("the peer does not have the key")
        connection.sendall(_code(key, b"server", nonce, other))
        return cls(connection, _code(key, b"session", nonce, other), is_server=True, max_block=max_block)

    @classmethod
    def connect(cls, connection: socket.socket, key: bytes, max_block: int) -> PeerChannel:
        """The client's side of the handshake.  Raises PeerError or OSError."""
        with _handshake(connection) as deadline:
            hello = bytes(receive_exactly(connection, len(MAGIC) + NONCE, deadline))
            if hello[: len(MAGIC)] != MAGIC:
                raise PeerError("the peer is no server of this kind")
            other, nonce = hello[len(MAGIC) :], secrets.token_bytes(NONCE)
            connection.sendall(MAGIC + nonce + _code(key, b"client", other, nonce))
            code = bytes(receive_exactly(connection, CODE, deadline))
        if not hmac.compare_digest(code, _code(key, b"server", other, nonce)):
            raise PeerError("the peer does not have the key")
        return cls(connection, _code(key, b"session", other, nonce), is_server=False, max_block=max_block)

    def send(self, kind: int, body: bytes | memoryview) -> None:
        """Send one frame."""
        head = bytes([kind])
        code = _code(self._key, self._out, self._num_sent.to_bytes(8, "big"), head, body)
        self._num_sent += 1
        self._connection.sendall(len(body).to_bytes(4, "big") + head)
        self._connection.sendall(body)
        self._connection.sendall(code)

    def send_message(self, kind: int, message: dict[str, Any]) -> None:
        self.send(kind, msgspec.msgpack.encode(message))

    def receive(self) -> tuple[int, bytearray]:
        """The next frame: kind and body.  Raises PeerError or OSError."""
        head = receive_exactly(self._connection, 5)
        length, kind = int.from_bytes(head[:4], "big"), head[4]
        if length > (self._max_block if kind == BLOCK else MAX_MESSAGE):
            raise PeerError(f"a frame of {length} bytes is too long")
        body = receive_exactly(self._connection, length)
        code = bytes(receive_exactly(self._connection, CODE))
        number = self._num_received.to_bytes(8, "big")
        if not hmac.compare_digest(code, _code(self._key, self._in, number, bytes(head[4:]), body)):
            raise PeerError("a frame was changed on the way")
        self._num_received += 1
        return kind, body

    def receive_message(self) -> tuple[int, Any]:
        """The next frame's kind, and its msgpack."""
        kind, body = self.receive()
        try:
            return kind, msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise PeerError("a frame cannot be read") from None
