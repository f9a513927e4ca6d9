"""The wire to one engine: a ZeroMQ DEALER read by the event loop itself.

ZeroMQ's file descriptor tells the loop that something may have come, once per change, not per message: so all
there is is read at once, and after every send the socket is asked again.  Knows messages as bytes in
and structs out, nothing of requests.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import zmq

from tokserve.errors import StartError
from tokserve.messages import FromEngine, ToEngine, decode_from_engine, encode

RECONNECT_MS = 20  # how often a socket that is not there yet is tried
BURST = 64  # messages read before the loop's other work gets its turn


class Link:
    """Connects at once; `deliver` is called in the loop's thread with every message, and `settle` when there is
    none left for now, or a burst is over.  Raises StartError.

    `name` is who this is to the engine, and nobody else's; without one, the engine makes one up.
    """

    def __init__(
        self, address: str, deliver: Callable[[FromEngine], None], settle: Callable[[], None], name: str | None = None
    ) -> None:
        self._deliver = deliver
        self._settle = settle
        self._loop = asyncio.get_running_loop()
        try:
            self._context = zmq.Context()
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:  # no descriptor left, say
            raise StartError(f"there can be no socket to the engine: {error}") from None
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.RECONNECT_IVL, RECONNECT_MS)):
            self._socket.setsockopt(option, value)
        if name is not None:
            self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(address)
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self.read)
        self._closed = False
        self._drop = weakref.finalize(self, _drop, self._socket, self._context)  # one forgotten must not block
        self._drop.atexit = False  # then others still end in order

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks."""
        self._socket.send(encode(message), zmq.NOBLOCK)
        self._ask_again()

    def read(self) -> None:
        """Deliver what has come."""
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
            self._ask_again()
        self._settle()

    def _ask_again(self) -> None:
        """Using the socket may have eaten the descriptor's signal."""
        if not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.read)

    def close(self) -> None:
        """Drop the connection; a second time does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._drop()


def _drop(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """In this order: a context waits for ever for its open sockets."""
    socket.close()
    context.term()
