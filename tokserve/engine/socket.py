"""The engine's socket: one ROUTER socket, and the one thread that uses it.

The thread decodes messages of front ends into an inbox, and encodes and sends what the loop puts into an outbox.  No
message to a slow front end is dropped (no high-water mark); ROUTER drops those to one that has gone.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from tokserve.base.curve import EngineKeys, KeyCheck
from tokserve.base.errors import StartError
from tokserve.base.processes import wake_promptly
from tokserve.base.structs import UNREADABLE
from tokserve.protocol.messages import FromEngine, ToEngine, decode_to_engine, encode

logger = logging.getLogger(__name__)

Received = tuple[bytes, ToEngine, float]  # identity, message, when
LINGER_MS = 1000
PEERS_KEPT = 1024
WAKE, FAILED = "wake", "failed"


class EngineSocket:
    """Binds `address` at once; raises StartError if it cannot.  `keys`: for messages from another node.  `address` is
    then the bound one, with the port that the system chose for `*`."""

    def __init__(
        self, address: str, clock: Callable[[], float] = time.monotonic, keys: EngineKeys | None = None
    ) -> None:
        self.peers: dict[bytes, None] = {}  # identities that have written, oldest first
        self._clock = clock
        self._inbox: queue.SimpleQueue[Received | str] = queue.SimpleQueue()  # a str: WAKE or FAILED
        self._outbox: deque[tuple[bytes, FromEngine]] = deque()
        self._closing = False
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._key_check = None if keys is None else KeyCheck(self._context, self._socket, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartError(f"the engine cannot listen at {address}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="socket", daemon=True)
        self._thread.start()

    # --- the loop's side ---

    def take(self, timeout: float | None) -> list[Received]:
        """All messages there are; waits up to `timeout` seconds (None: for ever) for the first."""
        messages: list[Received] = []
        try:
            item = self._inbox.get(block=timeout != 0, timeout=timeout)
            while True:
                if item == FAILED:
                    raise RuntimeError("the engine's I/O thread failed")
                if not isinstance(item, str):
                    messages.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def wake(self) -> None:
        """End a `take` that waits; from any thread."""
        self._inbox.put(WAKE)

    def send(self, identity: bytes, message: FromEngine) -> None:
        """Hand over a message; it leaves in order."""
        self._outbox.append((identity, message))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what was handed over, then end the thread; gives up after a few seconds."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(3 * LINGER_MS / 1e3)
        if not self._thread.is_alive():
            os.close(self._wake)

    # --- the thread's side ---

    def _run(self) -> None:
        failed = True
        wake_promptly()
        try:
            self._serve()
            failed = False
        finally:
            if failed:  # the loop must hear of it; the traceback is printed by the threading module
                self._inbox.put(FAILED)
            self._socket.close()
            if self._key_check is not None:
                self._key_check.requests.close()
            self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        key_check = self._key_check
        if key_check is not None:
            poller.register(key_check.requests, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            closing = self._closing  # read before the outbox, so that all that was handed over earlier is sent
            while self._outbox:
                identity, message = self._outbox.popleft()
                self._socket.send_multipart((identity, encode(message)))
            if closing:
                return
            if key_check is not None and key_check.requests in ready:
                key_check.decide()
            if self._socket in ready:
                self._receive()

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._accept(*self._socket.recv_multipart(zmq.NOBLOCK))

    def _accept(self, identity: bytes, *frames: bytes) -> None:
        try:
            message = decode_to_engine(b"".join(frames))
        except UNREADABLE as error:
            logger.error("a message from a front end cannot be read: %s", error)
            return
        if identity not in self.peers:
            self.peers[identity] = None
            if len(self.peers) > PEERS_KEPT:
                del self.peers[next(iter(self.peers))]
        self._inbox.put((identity, message, self._clock()))
