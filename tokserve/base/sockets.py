"""Sockets: the files of those whose process has ended, and reading so many bytes of a stream."""

from __future__ import annotations

import os
import socket
import stat
import time
from contextlib import suppress


def remove_stale(path: str) -> None:
    """Unlink the file of a socket without a listener; a socket in use and other files are left alone."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def receive_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """The next `size` bytes of a stream.  Raises ConnectionError if the other end closes it before, OSError if it is
    silent for the socket's timeout, or has not sent all by `deadline` (by `time.monotonic`), which sets the timeout."""
    content = bytearray(size)
    view = memoryview(content)
    while view:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-6))
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other end has closed the connection")
        view = view[count:]
    return content
