"""The socket to one engine: a ZeroMQ DEALER, read by the event loop itself.

ZeroMQ's file descriptor is edge-triggered: it signals that messages may have come, not each message.  So everything
is read at once, and the socket is checked again after every send.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import zmq

from tokserve.base.curve import ClientKeys, secure_client
from tokserve.base.errors import StartError
from tokserve.protocol.messages import FromEngine, ToEngine, decode_from_engine, encode

RECONNECT_MS = 20  # between attempts to connect, while the engine's socket does not exist yet
BURST = 64  # messages read before the loop's other work gets its turn


class ClientSocket:
    """Connects at once.  `deliver` is called in the loop's thread with every message, and `drained` when none is left
    for now, or after a burst.  Raises StartError.

    `name`: a unique name under which the engine knows this client; without one, ZeroMQ makes one up.  `keys`: for an
    engine on another node.
    """

    def __init__(
        self,
        address: str,
        deliver: Callable[[FromEngine], None],
        drained: Callable[[], None],
        name: str | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._deliver = deliver
        self._drained = drained
        self._loop = asyncio.get_running_loop()
        try:
            self._context = zmq.Context()
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:  # no descriptor left, say
            raise StartError(f"cannot make a socket to the engine: {error}") from None
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.RECONNECT_IVL, RECONNECT_MS)):
            self._socket.setsockopt(option, value)
        if name is not None:
            self._socket.setsockopt(zmq.IDENTITY, name.encode())
        if keys is not None:
            secure_client(self._socket, keys)
        self._socket.connect(address)
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self.read)
        self._closed = False
        # one that was never closed must not block
        self._drop = weakref.finalize(self, _drop, self._socket, self._context)
        self._drop.atexit = False  # at exit, others still shut down in order

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks."""
        self._socket.send(encode(message), zmq.NOBLOCK)
        self._read_later()

    def read(self) -> None:
        """Deliver the messages that have come, `BURST` at most."""
        if self._closed:
            return
        for _ in range(BURST):
            try:
                packed = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._deliver(decode_from_engine(packed))
            if self._closed:
                break
        else:
            self._read_later()
        self._drained()

    def _read_later(self) -> None:
        """Read soon if there is something: using the socket may have consumed the descriptor's signal."""
        if not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.read)

    def close(self) -> None:
        """Drop the connection; a second time does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._drop()


def _drop(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Close the socket first: `term` waits forever for open sockets."""
    socket.close()
    context.term()
