"""API keys: which paths need one and whether a request carries it.  Knows nothing of what the routes do."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import Scope

from tokserve.errors import Unauthorized

PUBLIC = frozenset({"/health", "/ping", "/version"})


class Keys:
    """The accepted keys as digests, so that comparing takes the same time for any guess."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, scope: Scope) -> None:
        """Raise `Unauthorized` unless the path is public or a valid bearer token came with the request."""
        if not self._digests or _path(scope) in PUBLIC:
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = header.partition(b" ")
        guess = _digest(token.strip())
        found = [hmac.compare_digest(guess, digest) for digest in self._digests]  # a list: all are compared
        if scheme.lower() != b"bearer" or not any(found):
            message = "the API key is wrong" if header else "an API key is required: Authorization: Bearer <key>"
            raise Unauthorized(message, code="invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _path(scope: Scope) -> str:
    """The path that routes are matched against, without a trailing slash (which only redirects)."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    return path.rstrip("/")
