"""A stream to a process on another node, through ZeroMQ with CURVE: encrypted, and for the one peer that has the keys.

Each end is a local socket, which `channel` uses as if it were connected to the other end; a thread carries the bytes.
When an end is closed or its process is gone, the other is closed.  The end that listens cannot see every loss of a
connection: the caller, who watches the other process, must close the stream.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import zmq

from tokserve.base.curve import ClientKeys, EngineKeys, KeyCheck, secure_client

CHUNK = 1 << 18  # bytes of a message at most
PATIENCE = 10_000  # milliseconds to send what the other end does not take, and to end with what was sent
END = b""  # the last message
LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Tunnel:
    """`stream`: this process' end.  `address`: of the listening end."""

    def __init__(self, address: str, keys: EngineKeys | ClientKeys) -> None:
        """`address`: to connect to (HOST:PORT), or with the listener's keys to listen at (HOST).  Raises OSError."""
        self.stream, self._inner = socket.socketpair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pipe = self._context.socket(zmq.PAIR)
        self._pipe.linger = PATIENCE
        self._check: KeyCheck | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._arrived = memoryview(END)  # what the other end has sent, and `stream` has not taken yet
        try:
            self.address = self._listen(address, keys) if isinstance(keys, EngineKeys) else self._connect(address, keys)
        except zmq.ZMQError as error:
            self._end()
            self.stream.close()
            raise OSError(error.errno, f"{address}: {error}") from None
        self._thread = threading.Thread(target=self._carry, name="tunnel", daemon=True)
        self._thread.start()

    def _listen(self, host: str, keys: EngineKeys) -> str:
        self._check = KeyCheck(self._context, self._pipe, keys)
        self._pipe.bind(f"tcp://{host}:*")
        endpoint = self._pipe.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode().removeprefix("tcp://")

    def _connect(self, address: str, keys: ClientKeys) -> str:
        secure_client(self._pipe, keys)
        self._pipe.reconnect_ivl = -1  # what was on its way when a connection broke is lost
        self._monitor = self._pipe.get_monitor_socket(LOST)
        self._pipe.connect(f"tcp://{address}")
        return address

    def finish(self) -> None:
        """Send nothing more; wait until the other end has what was sent, up to ten seconds."""
        with suppress(OSError):
            self.stream.shutdown(socket.SHUT_WR)
        self._thread.join(PATIENCE / 1000)

    def _carry(self) -> None:
        poller = zmq.Poller()
        if self._check is not None:
            poller.register(self._check.requests, zmq.POLLIN)
        self._inner.setblocking(False)
        try:
            is_open = True
            while is_open:
                # nothing is taken from the other end until this one has taken what came before
                poller.register(self._inner, zmq.POLLIN | (zmq.POLLOUT if self._arrived else 0))
                for other in filter(None, (self._pipe, self._monitor)):
                    poller.register(other, 0 if self._arrived else zmq.POLLIN)
                is_open = self._take_turn(dict(poller.poll()))
        except (OSError, zmq.ZMQError):  # one of the ends is gone
            pass
        finally:
            self._end()

    def _take_turn(self, ready: dict[object, int]) -> bool:
        """Carry what there is; False: the stream has ended."""
        if self._check is not None and self._check.requests in ready:
            self._check.decide()
        if self._arrived:
            if ready.get(self._inner.fileno(), 0) & zmq.POLLOUT:
                self._arrived = self._arrived[self._inner.send(self._arrived) :]
        elif self._pipe in ready:
            self._arrived = memoryview(self._pipe.recv())
            if not self._arrived:
                return False
        elif self._monitor is not None and self._monitor in ready:
            self._pipe.linger = 0  # what was not sent cannot be sent any more
            return False
        if ready.get(self._inner.fileno(), 0) & (zmq.POLLIN | zmq.POLLERR):
            data = self._inner.recv(CHUNK)
            return self._send(data) and data != END
        return True

    def _send(self, chunk: bytes) -> bool:
        """Send to the other end, which may have to be waited for; False: it is gone."""
        with suppress(zmq.Again):
            self._pipe.send(chunk, zmq.NOBLOCK)
            return True
        poller = zmq.Poller()
        poller.register(self._pipe, zmq.POLLOUT)
        if self._monitor is not None:  # a connection that was lost leaves no peer to send to
            poller.register(self._monitor, zmq.POLLIN)
        if self._pipe not in dict(poller.poll(PATIENCE)):
            self._pipe.linger = 0
            return False
        self._pipe.send(chunk, zmq.NOBLOCK)
        return True

    def _end(self) -> None:
        """Both ends end, the stream at once; what was sent still goes out."""
        self._inner.close()
        if self._monitor is not None:
            self._pipe.disable_monitor()
            self._monitor.close(linger=0)
        if self._check is not None:
            self._check.requests.close(linger=0)
        self._pipe.close()
        self._context.term()
