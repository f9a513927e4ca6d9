"""Publishes KV events on a ZeroMQ socket, as vLLM does: frames of topic, sequence number and msgpack.

The thread that uses the sockets encodes, sends, keeps the last batches and answers those who missed some.  The engine's
loop never waits for it: a batch that finds the queue full is dropped, and the gap in the sequence numbers tells so.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from tokserve.base.errors import StartError
from tokserve.config import KVEventsPlan
from tokserve.features.kv.events import Event, plain

logger = logging.getLogger(__name__)

Batch = tuple[int, float, list[Event]]  # sequence number, Unix time
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number after the last one of a replay
CLOSE_SECONDS = 2.0


class EventPublisher:
    """Binds or connects at once; raises StartError if it cannot.  `sources`: where to subscribe and to ask for a
    replay, for /kv_event_sources."""

    def __init__(self, plan: KVEventsPlan) -> None:
        self._plan = plan
        self._sequence = 0
        self._queue: deque[Batch] = deque()
        self._dropping = self._closing = False
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=plan.buffer_steps)  # sequence number, payload
        self._context = zmq.Context()
        try:
            self._publisher = self._socket(zmq.PUB, plan.endpoint, binds=_is_bound(plan.endpoint))
            self._replay = None
            if plan.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, plan.replay_endpoint, binds=True)
        except StartError:
            self._context.destroy(linger=0)
            raise
        self.sources: dict[str, Any] = {
            "data_parallel_rank": plan.data_parallel_rank,
            "endpoint": _address(self._publisher, plan.endpoint),
            "replay_endpoint": None if self._replay is None else _address(self._replay, plan.replay_endpoint or ""),
            "topic": plan.topic,
        }
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, endpoint: str, *, binds: bool) -> zmq.Socket[bytes]:
        address = shifted(endpoint, self._plan.data_parallel_rank).replace("*", self._plan.interface)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, int(CLOSE_SECONDS * 500))
        socket.setsockopt(zmq.SNDHWM, self._plan.hwm)
        try:
            socket.bind(address) if binds else socket.connect(address)
        except zmq.ZMQError as error:
            raise StartError(f"option kv_events_config: cannot use {address}: {error}") from None
        return socket

    # --- the loop's side ---

    def publish(self, events: list[Event]) -> None:
        """Hand a batch of events to the publishing thread."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if len(self._queue) >= self._plan.max_queue_size:
            if not self._dropping:
                logger.warning("KV events are dropped: %d batches wait to be sent", len(self._queue))
            self._dropping = True
            return
        self._dropping = False
        self._queue.append((sequence, time.time(), events))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what was handed over, then end the thread; gives up after some seconds."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_SECONDS)

    # --- the thread's side ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        closing = False
        while not closing:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            closing = self._closing  # read before the queue, so that all that was handed over earlier is sent
            while self._queue:
                self._send(*self._queue.popleft())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._context.destroy()
        os.close(self._wake)

    def _send(self, sequence: int, moment: float, events: Sequence[Event]) -> None:
        form: Sequence[Any] = [plain(event) for event in events] if self._plan.format == "array" else events
        payload = msgspec.msgpack.encode((moment, form, self._plan.data_parallel_rank))
        number = sequence.to_bytes(8, "big")
        self._sent.append((number, payload))
        self._publisher.send_multipart((self._plan.topic.encode(), number, payload))

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """Send the batches from a sequence number on, as far as they are kept, then `END`."""
        identity, *frames = socket.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            logger.warning("a request for KV events cannot be read: %d frames", len(frames))
            return
        with suppress(zmq.Again):  # it does not read: it has to ask for the rest again
            for number, payload in self._sent:
                if number >= frames[1]:
                    socket.send_multipart((identity, b"", number, payload), zmq.NOBLOCK)
            socket.send_multipart((identity, b"", END, b""), zmq.NOBLOCK)


def _is_bound(endpoint: str) -> bool:
    """Whether vLLM would listen there; else it connects."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def shifted(endpoint: str, rank: int) -> str:
    """The endpoint of an engine among several: the port, unless the system chooses it, plus the rank."""
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"{head}:{int(port) + rank}" if int(port) else endpoint


def _address(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Where the socket is, with the port that the system chose."""
    last = socket.getsockopt(zmq.LAST_ENDPOINT)
    return last.rstrip(b"\0").decode() if isinstance(last, bytes) and last else endpoint
