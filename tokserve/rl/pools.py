"""Pools of connections to one server: who may proxy them, how many there are, and how a dead peer is noticed.

No read has a time limit, because a rollout of a paused server takes as long as the pause.  TCP's keep-alive probes end
a connection to a machine that has gone, after about two minutes.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

CONNECT_SECONDS = 30.0
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)  # no connection was made, so the request had no effect
PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}  # seconds until the first, between two; how many


def async_pool(url: str, headers: dict[str, str], *, connections: int | None, trust_env: bool) -> httpx.AsyncClient:
    """A pool for one event loop.  `connections`: its limit, None for as many as there are requests."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    options = _options(url, trust_env)
    transport = httpx.AsyncHTTPTransport(limits=limits, **options)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=_timeout(), transport=transport)


def sync_pool(url: str, headers: dict[str, str], *, trust_env: bool = True) -> httpx.Client:
    """A pool for code without an event loop."""
    transport = httpx.HTTPTransport(limits=httpx.Limits(max_connections=None), **_options(url, trust_env))
    return httpx.Client(base_url=url, headers=headers, timeout=_timeout(), transport=transport)


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers of requests with this key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def is_this_machine(host: str) -> bool:
    """Whether a host's name or address is this machine's by what it says: localhost, loopback, or unspecified."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        address = mapped or address
        return address.is_loopback or address.is_unspecified
    return False


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for a server (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY); none for this
    machine."""
    target = httpx.URL(url)
    if is_this_machine(target.host) or proxy_bypass(target.host):
        return None
    proxies = getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


@cache
def certificates(url: str, *, trust_env: bool) -> ssl.SSLContext:
    """The authorities to trust.  For a server without TLS none, as reading their certificates takes longer than a
    request."""
    if httpx.URL(url).scheme == "https":
        return httpx.create_ssl_context(trust_env=trust_env)
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _options(url: str, trust_env: bool) -> dict[str, Any]:
    """What the transports of both kinds take.  SSL_CERT_FILE and SSL_CERT_DIR hold with `trust_env`."""
    names = [name for name in PROBES if hasattr(socket, name)]  # not every system has all of them
    probes = [(socket.IPPROTO_TCP, getattr(socket, name), PROBES[name]) for name in names]
    return {
        "proxy": proxy_of(url) if trust_env else None,
        "socket_options": [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *probes],
        "verify": certificates(url, trust_env=trust_env),
    }


def _timeout() -> httpx.Timeout:
    return httpx.Timeout(None, connect=CONNECT_SECONDS)
