"""Which client a request is from: the API key that it carries, or the address that it comes from.

Clients are served in turns.  An address is that of the connection, unless the operator names a header that the reverse
proxy in front sets: anybody can send a header.  Must not know routes, nor whether a key is right.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from typing import Any

from tokserve.config import ServerConfig

PEER = "tokserve.peer"  # in the scope: the address at the other end of the connection, None for a Unix socket
NETWORK = 64  # bits of an IPv6 address that one client is assigned
LONGEST = 64  # characters of a name that is not an address


class ClientNames:
    """See the module."""

    def __init__(self, server: ServerConfig) -> None:
        self._by_key = bool(server.api_key)  # then every request carries a key that is right
        self._header = (
            None if server.client_header is None else server.client_header.lower().encode("latin-1", "replace")
        )

    def name(self, scope: Mapping[str, Any]) -> str:
        """The client's name; "" if nothing tells it from others.  It holds no key."""
        if self._by_key:
            key = _header(scope, b"authorization").partition(b" ")[2].strip()
            if key:
                return "key " + hashlib.blake2b(key, digest_size=12).hexdigest()
        if self._header is not None:
            last = _header(scope, self._header).decode("latin-1").rpartition(",")[2].strip()
            if last:
                return _network(last)
        return _network(scope.get(PEER) or "")


def _header(scope: Mapping[str, Any], name: bytes) -> bytes:
    """The last header of this name: the one that is nearest to the proxy."""
    return next((bytes(value) for header, value in reversed(scope["headers"]) if header == name), b"")


def _network(text: str) -> str:
    """The address, of IPv6 the network; other names are cut."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text[:LONGEST]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, NETWORK), strict=False))
        return str(address.ipv4_mapped)
    return str(address)
