"""Where an engine's ranks connect: over TCP, or by one end of a stream that the engine has made for each."""

from __future__ import annotations

import logging
import select
import socket
from contextlib import suppress
from typing import NamedTuple, Protocol

from tokserve.base.curve import ClientKeys
from tokserve.base.errors import StartError
from tokserve.base.structs import UNREADABLE
from tokserve.features.ranks import auth
from tokserve.features.ranks.channel import Channel, Joined

logger = logging.getLogger(__name__)

INHERITED = "fd:"  # before the number of a socket that the rank's process inherits


class Invitation(NamedTuple):
    """Where a rank connects (fd:NUMBER or HOST:PORT), and what it must know: a key as hex, or keys of its own."""

    address: str
    key: str = ""
    keys: ClientKeys | None = None


class Listener(Protocol):
    """Where ranks connect."""

    def invite(self, rank: int) -> Invitation:
        """What a rank needs to connect.  Raises StartError."""

    def accept(self, timeout: float) -> tuple[Channel, Joined] | None:
        """The next rank; None: there was none within `timeout` seconds, or what came was no rank."""

    def close(self) -> None:
        """Listen no more; who has joined stays."""


class SocketListener:
    """Listener protocol: TCP at `address` (host, port).  `key`: what ranks must prove that they know."""

    def __init__(self, address: tuple[str, int], key: bytes = b"") -> None:
        self.key = key
        try:
            self.socket = socket.create_server(address, reuse_port=False)
        except OSError as error:
            raise StartError(f"the engine cannot listen for its ranks at {address}: {error}") from None
        host, port = self.socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.socket.listen(128)

    def invite(self, rank: int) -> Invitation:
        """Listener protocol: the same for all."""
        return Invitation(self.address, self.key.hex())

    def accept(self, timeout: float) -> tuple[Channel, Joined] | None:
        self.socket.settimeout(timeout)
        try:
            connection, _ = self.socket.accept()
        except TimeoutError:
            return None
        connection.settimeout(auth.SECONDS)
        try:
            auth.prove(connection, self.key, listens=True)
            channel = Channel(connection)
            connection.settimeout(auth.SECONDS)
            message = channel.from_rank()
            connection.settimeout(None)
            if isinstance(message, Joined):
                return channel, message
        except (OSError, *UNREADABLE) as error:
            logger.warning("a connection that is no rank's was closed: %s", error)
        connection.close()
        return None

    def close(self) -> None:
        self.socket.close()


class StreamListener:
    """Listener protocol but for `invite`, which calls `expect`: there is a stream for each rank."""

    def __init__(self) -> None:
        self._streams: dict[int, socket.socket] = {}

    def expect(self, rank: int, stream: socket.socket) -> None:
        """The rank will speak at the other end of this stream."""
        self._streams[rank] = stream

    def accept(self, timeout: float) -> tuple[Channel, Joined] | None:
        ready, _, _ = select.select(list(self._streams.values()), [], [], timeout)
        for rank, stream in list(self._streams.items()):
            if stream in ready:
                del self._streams[rank]
                channel = Channel(stream)
                with suppress(OSError, *UNREADABLE):
                    message = channel.from_rank()
                    if isinstance(message, Joined) and message.rank == rank:
                        return channel, message
                channel.close()
                return None
        return None

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams = {}


class PairListener(StreamListener):
    """Listener protocol: for each rank a pair of connected sockets, of which its process inherits one.  The caller that
    starts the process closes the number that is in the invitation."""

    def invite(self, rank: int) -> Invitation:
        try:
            local, remote = socket.socketpair()
        except OSError as error:
            raise StartError(f"there are no sockets for rank {rank}: {error.strerror}") from None
        self.expect(rank, local)
        return Invitation(f"{INHERITED}{remote.detach()}")
