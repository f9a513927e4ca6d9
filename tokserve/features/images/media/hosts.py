"""Which hosts and which addresses images may be fetched from.

A name is allowed by the operator, and every address it resolves to must be one of the public internet: else the owner
of a name could open the server's network to clients.  An address that the operator lists itself is allowed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from tokserve.base.errors import StartError

USUAL_PORTS = {"http": 80, "https": 443}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # addresses whose last 32 bits are an IPv4 address (RFC 6052)
TUNNELS = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("2001::/32"))  # 6to4 and Teredo
COMPATIBLE = ipaddress.ip_network("::/96")  # IPv4 addresses in IPv6, deprecated (RFC 4291)


def is_public(text: str) -> bool:
    """Whether an address, as `getaddrinfo` writes it, belongs to the public internet and to one host.

    Loopback, private, link-local, shared, multicast, reserved and documentation addresses do not, in IPv6 as well where
    they stand for an IPv4 address.  Text that is no address does not either.
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if address in TRANSLATED:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        if address in COMPATIBLE or any(address in network for network in TUNNELS) or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def canonical(host: str) -> str:
    """A host's name as it is compared: in lower case, ASCII, without a final dot; an address in its usual form.  Raises
    ValueError for what is no name."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        name = host.lower().rstrip(".")
        return name if name.isascii() else name.encode("idna").decode()


class AllowedHosts:
    """The hosts of `--allowed-media-domains`, each with a port or with the usual ones."""

    def __init__(self, entries: Sequence[str]) -> None:
        """Raises StartError for an entry that is neither HOST nor HOST:PORT."""
        self._entries = frozenset(map(_parsed, entries))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def allows(self, scheme: str, host: str, port: int) -> bool:
        """Whether a URL with these may be fetched; `host` is canonical."""
        return (host, port) in self._entries or (port == USUAL_PORTS[scheme] and (host, None) in self._entries)

    def lists_address(self, host: str) -> bool:
        """Whether `host` is an address, which the operator has listed as such."""
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(host == entry for entry, _ in self._entries)


def _parsed(entry: str) -> tuple[str, int | None]:
    host, colon, port = entry.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # without a port, or an IPv6 address
        host, port = entry.strip(), ""
    if not host or "/" in host or "*" in host or "@" in host or (port and not (port.isdecimal() and int(port) < 65536)):
        raise StartError(f"option allowed_media_domains: entries are HOST or HOST:PORT, got {entry!r}")
    try:
        return canonical(host), int(port) if port else None
    except ValueError:
        raise StartError(f"option allowed_media_domains: {entry!r} is not the name of a host") from None
