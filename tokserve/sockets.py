"""Removes the files of Unix sockets whose process has ended."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress


def remove_stale(path: str) -> None:
    """Unlink the file of a socket without a listener; a socket in use and other files are left alone."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
