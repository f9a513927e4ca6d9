"""Messages between the server and a worker that processes images: frames of msgpack over pipes.

A frame is its length, 8 bytes little-endian, and a struct.  Reading and writing may have a deadline, so that a worker
that hangs or writes nonsense holds nothing up.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any

import msgspec

LENGTH_BYTES = 8
MAX_FRAME = 4 << 30
PIECE = 1 << 20  # bytes that are read or written at once


class Array(msgspec.Struct, array_like=True, frozen=True):
    """A numpy array: `dtype` as numpy writes it, with the byte order ("<f4", "|u1"); C order."""

    dtype: str
    shape: tuple[int, ...]
    buffer: memoryview


class WorkerSettings(msgspec.Struct):
    """What the server tells its workers.  The last are used where the checkpoint has no processor's config.  `side`:
    pixels of each side of all images, 0 if their sizes differ."""

    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    side: int = 0
    kwargs: dict[str, Any] = {}


class WorkerReady(msgspec.Struct, tag="ready"):
    """The first message of a worker.  `settings`: of the checkpoint's image processor, as JSON."""

    settings: str


class Job(msgspec.Struct, tag="job"):
    """An image as it was sent, and the seconds of a processor that it may take: SIGPROF ends the worker then."""

    content: memoryview
    seconds: float


class Processed(msgspec.Struct, tag="processed"):
    """What the image processor makes of it, by name; `size`: width and height of the image."""

    arrays: dict[str, Array]
    size: tuple[int, int]


class Refused(msgspec.Struct, tag="refused"):
    """The image cannot be taken; `rule` is said of it ("must be ...")."""

    rule: str
    code: str | None = None


Reply = WorkerReady | Processed | Refused


class BrokenFrame(Exception):
    """What came is no frame, or the other process has ended."""


def pack(message: msgspec.Struct) -> bytearray:
    """A frame."""
    frame = bytearray(LENGTH_BYTES)
    msgspec.msgpack.Encoder().encode_into(message, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return frame


def send(descriptor: int, frame: bytearray, deadline: float | None = None) -> None:
    """Write a frame.  Raises TimeoutError at `deadline` (by `time.monotonic`), and BrokenFrame without a reader."""
    rest = memoryview(frame)
    while rest:
        _wait(descriptor, deadline, writing=True)
        try:
            rest = rest[os.write(descriptor, rest[:PIECE]) :]
        except BlockingIOError:
            continue
        except BrokenPipeError:
            raise BrokenFrame("the other process has ended") from None


def receive(descriptor: int, deadline: float | None = None) -> bytearray:
    """The next frame without its length.  Raises TimeoutError at `deadline`, and BrokenFrame at the end."""
    length = int.from_bytes(_read(descriptor, LENGTH_BYTES, deadline), "little")
    if length > MAX_FRAME:
        raise BrokenFrame(f"a frame of {length} bytes")
    return _read(descriptor, length, deadline)


def _read(descriptor: int, size: int, deadline: float | None) -> bytearray:
    frame = bytearray()
    while len(frame) < size:
        _wait(descriptor, deadline, writing=False)
        try:
            piece = os.read(descriptor, min(size - len(frame), PIECE))
        except BlockingIOError:
            continue
        if not piece:
            raise BrokenFrame("the other process has ended")
        frame += piece
    return frame


def _wait(descriptor: int, deadline: float | None, *, writing: bool) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not poll.poll(None if left is None else left * 1000):
        raise TimeoutError
