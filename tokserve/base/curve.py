"""Keys for messages between nodes: ZeroMQ's CURVE encrypts them, and the engine admits only the client that it knows.

Keys are made for one engine and one client, when the engine is started, and are never written to a file.  On one
machine engines listen at a socket in a private directory and need none.
"""

from __future__ import annotations

import msgspec
import zmq
from zmq.utils import z85

from tokserve.base.errors import StartError

KEY_CHECKS = "inproc://zeromq.zap.01"  # where ZeroMQ asks, within its context, whether a key is admitted (RFC 27)
DOMAIN = b"tokserve"


class EngineKeys(msgspec.Struct, frozen=True):
    """`public` and `secret` of the engine, and the public key of its client; all in Z85, 40 characters."""

    public: str
    secret: str
    client: str


class ClientKeys(msgspec.Struct, frozen=True):
    """`public` and `secret` of a client, and the public key of its engine."""

    public: str
    secret: str
    engine: str


def make_keys() -> tuple[EngineKeys, ClientKeys]:
    """New keys for an engine and its client.  Raises StartError if ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise StartError("engines on other nodes need a ZeroMQ with CURVE; this one was built without it")
    engine, engine_secret = (key.decode() for key in zmq.curve_keypair())
    client, client_secret = (key.decode() for key in zmq.curve_keypair())
    return EngineKeys(engine, engine_secret, client), ClientKeys(client, client_secret, engine)


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Call before the socket connects."""
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = keys.engine.encode()


class KeyCheck:
    """Makes `socket` speak CURVE, and decides which clients it admits.  Call `decide` when `requests` is readable, in
    the thread that uses the socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: EngineKeys) -> None:
        self.requests: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.requests.linger = 0
        self.requests.bind(KEY_CHECKS)
        self._admitted = z85.decode(keys.client)
        socket.curve_server = True
        socket.curve_secretkey = keys.secret.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def decide(self) -> None:
        """Answer one request of ZeroMQ."""
        version, number, domain, _, _, mechanism, *credentials = self.requests.recv_multipart()
        admitted = domain == DOMAIN and mechanism == b"CURVE" and credentials == [self._admitted]
        status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        self.requests.send_multipart((version, number, status, text, b"client", b""))
