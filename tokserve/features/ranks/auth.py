"""Two ends of a connection prove to each other that they know the same key, and never send it.

Each sends 32 random bytes and answers the other's with HMAC-SHA256 over both and its own role, so an answer is of no
use to anyone else.  What follows is not encrypted: it belongs on a network that only the cluster's machines can reach.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from tokserve.base.sockets import receive_exactly

NONCE = 32  # bytes
SECONDS = 10.0  # for the other end to prove it


def prove(connection: socket.socket, key: bytes, *, listens: bool) -> None:
    """Exchange proofs; with an empty key nothing is sent.  Raises ConnectionError if the other end does not know it."""
    if not key:
        return
    connection.settimeout(SECONDS)
    deadline = time.monotonic() + SECONDS if listens else None  # others wait meanwhile, however it spreads its bytes
    try:
        nonce = secrets.token_bytes(NONCE)
        connection.sendall(nonce)
        peer_nonce = _read(connection, deadline)
        nonces = (nonce, peer_nonce) if listens else (peer_nonce, nonce)
        connection.sendall(_proof(key, nonces, b"engine" if listens else b"rank"))
        if not hmac.compare_digest(_read(connection, deadline), _proof(key, nonces, b"rank" if listens else b"engine")):
            raise ConnectionError("the other end does not know the key (master_key_file)")
    except TimeoutError:
        raise ConnectionError("the other end has not proved that it knows the key (master_key_file)") from None
    connection.settimeout(None)


def _proof(key: bytes, nonces: tuple[bytes, bytes], role: bytes) -> bytes:
    return hmac.digest(key, role + nonces[0] + nonces[1], "sha256")


def _read(connection: socket.socket, deadline: float | None) -> bytes:
    try:
        return bytes(receive_exactly(connection, NONCE, deadline))
    except ConnectionError:
        raise ConnectionError("the other end does not know the key (master_key_file)") from None
