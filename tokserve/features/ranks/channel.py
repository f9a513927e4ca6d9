"""Messages between an engine and its ranks, over a stream socket: a length (8 bytes, little-endian), then msgpack.

Both ends use this file.  Nothing is pickled.  Sending may be done by any thread, receiving by one.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import msgspec

from tokserve.base.errors import BY_STATUS, RequestError, RequestFailed
from tokserve.base.sockets import receive_exactly
from tokserve.config import Config
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.kv_spec import KVLayout, KVSpec, StateLayout, StateSpec
from tokserve.protocol.plan import DeviceFacts, GrammarBitmask, StepPlan, StepResult, decode_hook, encode

LENGTH = struct.Struct("<Q")
LONGEST = 1 << 34  # bytes of a message
SMALL = 1 << 16  # bytes of a message that is copied behind its length


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message, encoded with the name of its class in front."""


# --- to a rank ---


class Begin(_Message, frozen=True):
    """Load the model.  `tensor`, `stages`: how many ranks divide a layer, and how many stages there are; `address`: of
    this rank's machine, for the other ranks."""

    config: Config
    tensor: int
    stages: int
    address: str


class Forward(_Message, frozen=True):
    """Begin a step."""

    plan: StepPlan


class SampleStep(_Message, frozen=True):
    """Sample from the step that was begun last."""

    bitmask: GrammarBitmask | None


class Invoke(_Message, frozen=True):
    """A method of the runner: an admin method, between steps or in the background, or a copy of KV blocks, in the
    thread of its `lane` once `after_steps` steps have ended on the rank."""

    call_id: int
    method: str
    args: dict[str, Any]
    background: bool = False
    lane: str = ""
    after_steps: int = 0


class Interrupt(_Message, frozen=True):
    """Make what waits for a trainer fail."""


class End(_Message, frozen=True):
    """End the process of the rank."""


class StoreValue(_Message, frozen=True):
    """The value of a key that was requested."""

    key: str
    value: bytes


ToRank = Begin | Forward | SampleStep | Invoke | Interrupt | End | StoreValue


# --- to the engine ---


class Joined(_Message, frozen=True):
    """The first message of a rank; `version`: of the program."""

    rank: int
    version: str


class Loaded(_Message, frozen=True):
    """The model is loaded: the fields of `DeviceFacts`, the layout taken apart."""

    specs: list[dict[str, Any]]
    num_blocks: int
    block_size: int
    states: StateLayout | None
    vocab_size: int
    weight_version: str
    facts: dict[str, Any]
    feature_bytes: dict[str, int]
    images: ImageFormat | None

    @staticmethod
    def of(facts: DeviceFacts) -> Loaded:
        """The message for these facts."""
        layout = facts.layout
        specs = [msgspec.to_builtins(spec) for spec in layout.specs]
        return Loaded(
            specs,
            layout.num_blocks,
            layout.block_size,
            layout.states,
            facts.vocab_size,
            facts.weight_version,
            facts.facts,
            facts.feature_bytes,
            facts.images,
        )

    def device_facts(self) -> DeviceFacts:
        """The facts that `of` was given."""
        specs = tuple(
            msgspec.convert(spec, StateSpec) if spec["kind"] == "state" else msgspec.convert(spec, KVSpec)
            for spec in self.specs
        )
        layout = KVLayout(specs, self.num_blocks, self.block_size, self.states)
        return DeviceFacts(layout, self.vocab_size, self.weight_version, self.facts, self.feature_bytes, self.images)


class StartRefused(_Message, frozen=True):
    """The model cannot be loaded: the message of a StartError."""

    reason: str


class Broken(_Message, frozen=True):
    """The rank ends by an exception."""

    reason: str


class Stepped(_Message, frozen=True):
    """The result of a step, of the rank that samples."""

    result: StepResult


class Returned(_Message, frozen=True):
    """The outcome of an `Invoke`; `error`: the message, `status` its kind (`errors.BY_STATUS`; 0: none of a
    request)."""

    call_id: int
    result: Any = None
    error: str | None = None
    status: int = 0
    field: str | None = None
    code: str | None = None

    @staticmethod
    def failed(call_id: int, error: Exception) -> Returned:
        if isinstance(error, RequestError):
            return Returned(call_id, None, error.message, error.status, error.field, error.code)
        return Returned(call_id, None, f"{type(error).__name__}: {error}")

    def exception(self) -> Exception | None:
        """The error, if it is one."""
        if self.error is None:
            return None
        if not self.status:
            return RuntimeError(self.error)
        return BY_STATUS.get(self.status, RequestFailed)(self.error, field=self.field, code=self.code)


class StoreSet(_Message, frozen=True):
    """A value that ranks find each other by."""

    key: str
    value: bytes


class StoreGet(_Message, frozen=True):
    """Requests a value, which may not be there yet."""

    key: str


FromRank = Joined | Loaded | StartRefused | Broken | Stepped | Returned | StoreSet | StoreGet

_decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_hook).decode
_decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=decode_hook).decode


class Channel:
    """A connected socket.  Raises ConnectionError when the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def remote_address(self) -> str:
        """The other end's address; of a Unix socket the loopback address."""
        return "127.0.0.1" if self._socket.family == socket.AF_UNIX else str(self._socket.getpeername()[0])

    def send(self, message: ToRank | FromRank) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, packed: bytes) -> None:
        """Send a message that `encode` has made."""
        with self._lock:
            if len(packed) < SMALL:
                self._socket.sendall(LENGTH.pack(len(packed)) + packed)
            else:
                self._socket.sendall(LENGTH.pack(len(packed)))
                self._socket.sendall(packed)

    def receive_bytes(self) -> bytearray:
        """The next message, undecoded."""
        (length,) = LENGTH.unpack(receive_exactly(self._socket, LENGTH.size))
        if length > LONGEST:
            raise ConnectionError("a message is too long")
        return receive_exactly(self._socket, length)

    def to_rank(self) -> ToRank:
        """The next message to a rank."""
        return _decode_to_rank(self.receive_bytes())

    def from_rank(self) -> FromRank:
        """The next message from a rank."""
        return _decode_from_rank(self.receive_bytes())

    def close(self) -> None:
        """Close it; a thread that receives gets ConnectionError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
