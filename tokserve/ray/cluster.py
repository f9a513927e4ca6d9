"""Joins this process to a Ray cluster.  The only files that import ray are this one, `tokserve.ray`,
`ray/ray_engines` and `ray/ray_ranks`."""

from __future__ import annotations

import logging
import socket
import threading

import ray

from tokserve.base.errors import StartError
from tokserve.config.engine_config import ray_address

REACHABLE = 10.0  # seconds to connect to the cluster
_connecting = threading.Lock()


def connect(show_logs: bool = True) -> None:
    """Join the cluster that RAY_ADDRESS names, or the one of this machine, unless this process has joined one.
    `show_logs`: what actors log is printed here as well, with a prefix.  Raises StartError."""
    with _connecting:
        if ray.is_initialized():
            return
        address = ray_address()
        hint = "start one with `ray start --head`, or set RAY_ADDRESS"
        _check_listening(address, hint)
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=show_logs)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartError(f"cannot join a Ray cluster: {first_line(error)}; {hint}") from None


def _check_listening(address: str, hint: str) -> None:
    """Raises StartError if no process listens at `host:port`; Ray would try for ever."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), REACHABLE).close()
    except OSError as error:
        raise StartError(f"no Ray cluster answers at {address} ({error.strerror or error}); {hint}") from None


def first_line(error: Exception) -> str:
    """The first line of an error's text; Ray adds pages."""
    return str(error).partition("\n")[0]
