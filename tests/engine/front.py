"""A front end for tests of the wire: a DEALER socket that speaks messages."""

from __future__ import annotations

from types import TracebackType

import zmq

from tokserve.base.curve import ClientKeys, secure_client
from tokserve.protocol.messages import Call, FromEngine, ToEngine, decode_from_engine, encode

PATIENCE_MS = 60_000


class Front:
    """Use as a context manager."""

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            secure_client(self.socket, keys)
        self.socket.connect(address)

    def __enter__(self) -> Front:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._context.destroy(linger=0)

    def send(self, message: ToEngine) -> None:
        self.socket.send(encode(message))

    def receive(self) -> FromEngine:
        assert self.socket.poll(PATIENCE_MS), "the engine says nothing"
        return decode_from_engine(self.socket.recv())

    def hello(self) -> FromEngine:
        self.send(Call(0, "hello"))
        return self.receive()
