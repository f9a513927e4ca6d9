"""The process of a `ServerProcess`: `python -m tokserve.testing.serve FD`.

The descriptor is a socket to the process that runs the tests: the configuration comes over it as a line of JSON, and
its end means that the tests have ended, however they did.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from tokserve.base.errors import StartError
from tokserve.base.processes import wait_for_hangup
from tokserve.cli.serve import serve_config
from tokserve.config import Config

END_SECONDS = 10.0  # after SIGTERM, before the process exits without waiting


def opening() -> tuple[Config, socket.socket]:
    """The configuration, and the socket that it came over."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    line = b""
    while not line.endswith(b"\n"):
        if not (received := channel.recv(1 << 16)):
            sys.exit("the tests ended")
        line += received
    return msgspec.json.decode(line, type=Config), channel


def end_with(wait: Callable[[], object]) -> None:
    """End this process when `wait`, which runs in a thread, returns."""

    def run() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(END_SECONDS)
        os._exit(1)

    threading.Thread(target=run, daemon=True).start()


def main() -> int:
    """Serve until a signal or the end of the tests; returns the exit code."""
    config, channel = opening()
    end_with(lambda: wait_for_hangup(channel.fileno()))
    try:
        return serve_config(config)
    except StartError as error:
        print(f"tokserve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
