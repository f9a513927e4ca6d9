"""KV blocks over TCP: the server that gives blocks of leases away, and the pull that another server makes.

Threads with blocking sockets, a bounded number of them, each with a timeout: a peer that is silent or dies costs one
thread for some seconds.  Blocks are identified by their content keys on both sides, so the bytes that arrive are those
that the prompt demands, or none.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokserve.base.errors import StartError
from tokserve.features.kv.leases import BlockLease, LeaseTable
from tokserve.features.kv.wire import BLOCK, REFUSAL, REPLY, REQUEST, PeerChannel, PeerError

logger = logging.getLogger(__name__)

TIMEOUT = 10.0  # seconds without a byte after which the other side is given up
CHUNK_BYTES = 16 << 20  # blocks that are read or written at a time
PAUSE = 0.1  # seconds until a connection is accepted again after one could not be
MAX_CONNECTIONS = 32
MAX_KEYS = 1 << 20
Parts = Mapping[str, str]


def differences(local: Parts, remote: Parts) -> str:
    """The parts of two identities that differ, for people; "" if none does."""
    return ", ".join(name for name in sorted({*local, *remote}) if local.get(name) != remote.get(name))


class PullRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Blocks `first`, `first` + 1, ... of a lease, which must have these keys."""

    op: str
    engine_id: str = ""
    request_id: str = ""
    identity: dict[str, str] = {}
    first: int = 0
    keys: list[bytes] = []
    request_ids: list[str] = []


class BlockServer:
    """Listens at once.  `identity`: its parts, empty while they are not known; `read`: the bytes of blocks, as a call
    that waits.  Raises StartError if it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        engine_id: str,
        leases: LeaseTable,
        *,
        block_bytes: int,
        identity: Callable[[], Parts],
        read: Callable[[list[int]], list[bytes]],
        on_change: Callable[[], None],
    ) -> None:
        self._key = key
        self._engine_id = engine_id
        self._leases = leases
        self._block_bytes = block_bytes
        self._identity = identity
        self._read = read
        self._on_change = on_change
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        self._closing = False
        self.num_sent = 0  # blocks
        try:
            self._listener = socket.create_server((host, port), backlog=MAX_CONNECTIONS)
        except (OSError, OverflowError) as error:
            raise StartError(f"option kv_transfer_config: cannot listen at {host}:{port}: {error}") from None
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-listen", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener is closed, or there is no descriptor left
                time.sleep(PAUSE)
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kv-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(TIMEOUT)
            channel = PeerChannel.accept(connection, self._key, self._block_bytes)
            while True:
                self._answer(channel)
        except (PeerError, OSError) as error:
            if not self._closing:
                logger.debug("a connection for KV blocks ended: %s", error)
        finally:
            connection.close()
            self._room.release()

    def _answer(self, channel: PeerChannel) -> None:
        kind, message = channel.receive_message()
        try:
            request = msgspec.convert(message, PullRequest)
        except msgspec.ValidationError as error:
            raise PeerError(f"a request cannot be read: {error}") from None
        if kind != REQUEST or len(request.keys) > MAX_KEYS:
            raise PeerError("the message is not a request")
        if request.op == "pull":
            self._send_blocks(channel, request)
        elif request.op == "heartbeat":
            channel.send_message(REPLY, {"known": self._leases.extend(request.request_ids)})
        elif request.op == "release":
            self._leases.end(request.request_ids)
            self._on_change()
            channel.send_message(REPLY, {})
        else:
            raise PeerError("the kind of the request is unknown")

    def _send_blocks(self, channel: PeerChannel, request: PullRequest) -> None:
        """All blocks of a pull, after which the lease is over; it is over too if the peer leaves in between."""
        lease, refusal = self._lease_of(request)
        if lease is None:
            channel.send_message(REFUSAL, {"message": refusal})
            return
        try:
            last = request.first + len(request.keys)
            if lease.keys[request.first : last] != request.keys:
                channel.send_message(REFUSAL, {"message": "the prompt, adapter, salt or images differ"})
                return
            channel.send_message(REPLY, {"count": len(request.keys)})
            self._send_pages(channel, lease, lease.table.blocks[request.first : last])
        finally:
            self._leases.end_read(lease)
            self._leases.end([lease.request_id])
            self._on_change()

    def _lease_of(self, request: PullRequest) -> tuple[BlockLease | None, str]:
        """The lease, or why there is none."""
        if request.engine_id != self._engine_id:
            return None, f"the server is engine {self._engine_id}, not {request.engine_id}: it was restarted"
        local = self._identity()
        if not local:
            return None, "the weights are changing"
        if differing := differences(local, request.identity):
            return None, f"the two servers differ in: {differing}"
        lease = self._leases.begin_read(request.request_id)
        return lease, "the blocks are not held any more: the lease has ended"

    def _send_pages(self, channel: PeerChannel, lease: BlockLease, blocks: Sequence[int]) -> None:
        step = max(1, CHUNK_BYTES // self._block_bytes)
        for start in range(0, len(blocks), step):
            contents = self._read(list(blocks[start : start + step]))
            if lease.ended:  # a reset: what was read may be anything
                raise PeerError("the blocks were given up")
            for content in contents:
                channel.send(BLOCK, content)
                self.num_sent += 1


@dataclass(slots=True, eq=False)
class Pull:
    """Blocks that are fetched: from where, which, and to which pages.  `count`: of those that are in their pages."""

    host: str
    port: int
    engine_id: str
    request_id: str
    identity: Parts
    first: int
    keys: list[bytes]
    blocks: list[int]
    count: int = 0
    error: str = ""
    cancelled: bool = False
    connection: socket.socket | None = field(default=None, repr=False)

    def cancel(self) -> None:
        """End it soon."""
        self.cancelled = True
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


def run_pull(pull: Pull, key: bytes, block_bytes: int, write: Callable[[list[int], list[bytearray]], Any]) -> None:
    """Fetch the blocks; `write` puts them into pages, and returns when that is done.  Errors are kept in the pull."""
    try:
        with socket.create_connection((pull.host, pull.port), TIMEOUT) as connection:
            pull.connection = connection
            channel = PeerChannel.connect(connection, key, block_bytes)
            _pull_blocks(pull, channel, block_bytes, write)
    except (PeerError, OSError, UnicodeError) as error:  # the last by a name that no host has
        pull.error = pull.error or f"{pull.host}:{pull.port}: {error}"
    finally:
        pull.connection = None


def _pull_blocks(
    pull: Pull, channel: PeerChannel, block_bytes: int, write: Callable[[list[int], list[bytearray]], Any]
) -> None:
    request = {
        "op": "pull",
        "engine_id": pull.engine_id,
        "request_id": pull.request_id,
        "identity": dict(pull.identity),
        "first": pull.first,
        "keys": pull.keys,
    }
    channel.send_message(REQUEST, request)
    kind, message = channel.receive_message()
    if kind != REPLY:
        raise PeerError(str(message.get("message", "refused")) if isinstance(message, dict) else "refused")
    step = max(1, CHUNK_BYTES // block_bytes)
    while pull.count < len(pull.keys) and not pull.cancelled:
        blocks = pull.blocks[pull.count : pull.count + step]
        contents = []
        for _ in blocks:
            kind, content = channel.receive()
            if kind != BLOCK or len(content) != block_bytes:
                raise PeerError("a block has another size")
            contents.append(content)
        write(blocks, contents)
        pull.count += len(blocks)


def send_note(host: str, port: int, key: bytes, op: str, request_ids: list[str]) -> None:
    """A heartbeat or a release; that it does not arrive has no other effect than that the lease ends by itself."""
    with suppress(PeerError, OSError, UnicodeError), socket.create_connection((host, port), TIMEOUT) as connection:
        channel = PeerChannel.connect(connection, key, 0)
        channel.send_message(REQUEST, {"op": op, "request_ids": request_ids})
        channel.receive_message()
