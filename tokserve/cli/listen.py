"""Binds the server's address, shares it between processes, and removes it at the end.

The address is bound before anything loads, so that a port in use is reported at once; the server listens (`begin`) when
it can serve requests.
"""

from __future__ import annotations

import errno
import os
import socket

from tokserve.base.errors import StartError
from tokserve.base.sockets import remove_stale
from tokserve.config import Config

BACKLOG = 4096  # connections not yet accepted


def bind(config: Config) -> socket.socket:
    """A socket bound to the configured address.  Raises StartError, as for a port in use."""
    server = config.server
    if server.uds:
        family, where = socket.AF_UNIX, server.uds
        address: str | tuple[str, int] = where
    else:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        address, where = (server.host, server.port), f"{server.host}:{server.port}"
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if server.uds:
            remove_stale(server.uds)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited: small writes are sent at once
        sock.bind(address)
        if server.uds:
            os.chmod(server.uds, 0o600)
    except OSError as error:
        sock.close()
        raise StartError(f"cannot listen on {where}: {_reason(error, server.uds)}") from None
    return sock


def _reason(error: OSError, uds: str | None) -> str:
    """The reason of an error of the address, and what to do about it."""
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE and uds is None:
        return f"{why}: another program uses it; choose another --port (0: any free one), or end that program"
    return why


def begin(sock: socket.socket, config: Config) -> None:
    """Listen, so that clients can connect.  Raises StartError if another server, started at the same time, was first:
    the kernel lets both bind while neither listens."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen on {url(config, sock)}: {_reason(error, config.server.uds)}") from None


def spread(sock: socket.socket, count: int) -> list[socket.socket]:
    """A socket at the same address for each of `count` processes; the first is the one given.

    The kernel spreads TCP connections over them evenly; if all accepted from one socket, the first to wake would take
    most of a burst.  It cannot do so for a Unix socket: all processes share one.
    """
    if sock.family == socket.AF_UNIX:
        return [sock] * count
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # not in `bind`, which must notice other servers
    sockets = [sock]
    for _ in range(count - 1):
        other = socket.socket(sock.family, socket.SOCK_STREAM)
        sockets.append(other)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other.bind(sock.getsockname())
    return sockets


def url(config: Config, sock: socket.socket) -> str:
    if config.server.uds:
        return f"unix:{config.server.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if config.tls.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def remove(config: Config) -> None:
    """Remove the file of a Unix socket."""
    if config.server.uds and os.path.exists(config.server.uds):
        os.unlink(config.server.uds)
