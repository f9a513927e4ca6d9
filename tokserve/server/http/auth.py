"""Checks API keys and host names: which paths need which key, and which Host headers are allowed.

A key comes as `Authorization: Bearer KEY` or, as Anthropic's clients send it, `x-api-key: KEY`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Container, Iterable

from starlette.routing import compile_path
from starlette.types import Scope

from tokserve.base.errors import Forbidden, Unauthorized

ACCEPTED = "tokserve.api_key"  # key in the scope: the digest of the API key that was accepted
# "": the status page, which holds no secrets
PUBLIC = frozenset({"", "/health", "/health_generate", "/ping", "/ready", "/version"})


class Keys:
    """The accepted keys, as digests, so that a comparison takes the same time for any guess.

    Control routes need an admin key if there is one, else any key; without any keys they accept only local clients,
    unless `remote_control`.  An admin key opens all routes.  `hosts`: the Host headers, with any
    port, that control routes and `guarded` routes accept; None: any.
    """

    def __init__(
        self,
        keys: Iterable[str],
        admin: Iterable[str] = (),
        *,
        control: Container[str] = (),
        remote_control: bool = False,
        hosts: Iterable[str] | None = None,
        guarded: Container[str] = (),
    ) -> None:
        self._admin = [_digest(key.encode()) for key in admin]
        self._digests = [_digest(key.encode()) for key in keys]
        self._control = control
        self._remote_control = remote_control
        self._hosts = None if hosts is None else frozenset(map(_bare_host, hosts))
        self._guarded = guarded

    def check(self, scope: Scope) -> None:
        """Raise `Unauthorized` or `Forbidden` unless the caller may use the path."""
        path = route_path(scope)
        if self._hosts is not None and (path in self._control or path in self._guarded):
            _check_host(scope, self._hosts)
        if path in self._control:
            self._check_control(scope)
        elif self._digests and path not in PUBLIC:
            _check_key(scope, [*self._digests, *self._admin])

    def _check_control(self, scope: Scope) -> None:
        if self._admin:
            _check_key(scope, self._admin, "a control route, which needs the admin key")
        elif self._digests:
            _check_key(scope, self._digests)
        elif not self._remote_control:
            if not _is_local(scope):
                raise Forbidden(
                    "without an API key, control routes accept requests from this machine only; set --admin-api-key or "
                    "--allow-remote-control",
                    code="remote_control",
                )
            if any(name == b"origin" for name, _ in scope["headers"]):  # a web page in a browser of this machine
                raise Forbidden("without an API key, control routes refuse web pages", code="remote_control")


class RoutePaths:
    """The paths that routes match: those of routes without parameters, and all that others take."""

    def __init__(self, routes: Iterable[str]) -> None:
        routes = tuple(routes)
        self._plain = frozenset(path for path in routes if "{" not in path)
        self._patterns = [compile_path(path)[0] for path in routes if "{" in path]

    def __contains__(self, path: object) -> bool:
        return path in self._plain or any(pattern.match(str(path)) for pattern in self._patterns)


def _check_host(scope: Scope, allowed: Container[str]) -> None:
    """Refuse other Host headers: a web page may have pointed its own name at this server (DNS rebinding)."""
    host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
    if host and _bare_host(host) not in allowed:
        raise Forbidden(
            f"the host {host[:200]!r} is not allowed for control and introspection routes; add it to --allowed-hosts",
            code="host_not_allowed",
        )


def _bare_host(host: str) -> str:
    """A host in lower case, without a port; IPv6 addresses without brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdigit() or not port) and ":" not in name else host).removesuffix(".")


def _check_key(scope: Scope, digests: list[bytes], route: str = "") -> None:
    """Accept the first key of the request that is one of `digests`; a client may send different ones in two headers."""
    headers = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    for name, value in headers:
        key = _key(name, value)
        guess = _digest(key)
        matches = [hmac.compare_digest(guess, digest) for digest in digests]  # a list: all are compared
        if key and any(matches):
            scope[ACCEPTED] = guess
            return
    message = "an API key is required: Authorization: Bearer <key>, or x-api-key: <key>"
    if any(value for _, value in headers):
        message = "the API key is wrong"
    raise Unauthorized(f"{message}; this is {route}" if route else message, code="invalid_api_key")


def _key(name: bytes, value: bytes) -> bytes:
    """The key in a header; b"", which is none, for a scheme other than Bearer."""
    if name == b"x-api-key":
        return value.strip()
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _is_local(scope: Scope) -> bool:
    """Whether the peer is on this machine.  The peer of a Unix socket has no address; the file's mode protects it."""
    client = scope.get("client")
    if not client or not client[0]:
        return True
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def route_path(scope: Scope) -> str:
    """The path that Starlette matches routes against, without a trailing slash.  A difference from Starlette's path
    would leave a control route open."""
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return (rest if rest.startswith("/") or not rest else path).rstrip("/")
