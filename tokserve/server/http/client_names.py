"""Names the client of a request, by its API key or its address.

The engine serves clients in turns.  The address is that of the connection, or comes from a header that the operator
has named (`--client-header`) and a reverse proxy sets: any client can send a header.  Keys are checked in `auth`.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from typing import Any

from tokserve.config import ServerConfig
from tokserve.server.http.auth import ACCEPTED

PEER = "tokserve.peer"  # key in the scope: the peer's address, None for a Unix socket
NETWORK = 64  # bits of the IPv6 network that is counted as one client
LONGEST = 64  # limit of characters of a name that is not an address


class ClientNames:
    """Names clients by the server's options."""

    def __init__(self, server: ServerConfig) -> None:
        self._by_key = bool(server.api_key)  # then `auth` has checked the key of every request
        self._header = None if server.client_header is None else server.client_header.lower().encode()

    def name(self, scope: Mapping[str, Any]) -> str:
        """The client's name, which does not contain its key; "" for an unknown client."""
        if self._by_key:
            accepted: bytes = scope.get(ACCEPTED, b"")
            if accepted:
                return "key " + hashlib.blake2b(accepted, digest_size=12).hexdigest()
        if self._header is not None:
            last = _header(scope, self._header).decode("latin-1").rpartition(",")[2].strip()
            if last:
                return _network(last)
        return _network(scope.get(PEER) or "")


def _header(scope: Mapping[str, Any], name: bytes) -> bytes:
    """The last header of this name, which the nearest proxy has set."""
    return next((bytes(value) for header, value in reversed(scope["headers"]) if header == name), b"")


def _network(text: str) -> str:
    """An IPv4 address, an IPv6 network, or another name, truncated."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text[:LONGEST]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, NETWORK), strict=False))
        return str(address.ipv4_mapped)
    return str(address)
