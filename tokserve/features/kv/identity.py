"""Keeps the KV store's identity that of the weights that serve: computed by the device, dropped with every change.

A digest of all weights takes longer than a step, so it is computed beside the steps; until it is here, nothing is kept
or loaded.  After a worker call, which may change weights behind the engine's back, cached KV may be of other weights
than the digest: the store waits for the next reset of the prefix cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from tokserve.features.kv.content_keys import identity_of
from tokserve.features.kv.store import Copy, KVStore

logger = logging.getLogger(__name__)


class WeightChanges(Protocol):
    """What the identity is of."""

    on_change: Callable[[], None]  # called when weights change, or may have changed

    @property
    def are_clean(self) -> bool:
        """Whether there are weights, and all KV that can be found is theirs."""


class IdentityWatch:
    """`parts`: of the identity, for errors; empty while it is not known."""

    def __init__(
        self,
        store: KVStore,
        weights: WeightChanges,
        background: Callable[[str, dict[str, Any]], Future[Any]],
        copy: Copy,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._weights = weights
        self._background = background
        self._copy = copy
        self._wake = wake
        self._pending: Future[Any] | None = None
        self.parts: dict[str, str] = {}
        self._new_parts: dict[str, str] | None = None
        weights.on_change = self._forget

    def start(self) -> None:
        """Compute the identity at once."""
        began = time.monotonic()
        self.poll()
        while self._pending is not None:
            self._pending.exception()  # is there
            self.poll()
        logger.info(
            "KV store: %d blocks in files; digest of weights in %.2f s",
            self._store.stats()["file_blocks"],
            time.monotonic() - began,
        )

    @property
    def busy(self) -> bool:
        """Whether the identity is being computed."""
        return self._pending is not None

    def _await(self, future: Future[Any]) -> None:
        self._pending = future
        future.add_done_callback(lambda _: self._wake())

    def _forget(self) -> None:
        """The weights are others from here on: the next step must not keep or load KV of the old ones."""
        self._store.use(None)
        self.parts, self._new_parts, self._pending = {}, None, None

    def poll(self) -> None:
        """Take what has been computed, or have it computed."""
        if self._pending is None:
            if self._store.identity is None and self._weights.are_clean:
                self._await(self._background("kv_identity", {}))
            return
        if not self._pending.done():
            return
        result, self._pending = self._pending.result(), None
        if self._new_parts is None:
            self._new_parts = result
            args = {"identity": identity_of(result), "parts": result}
            self._await(self._copy("read", "use_identity", args))
        else:
            self.parts, self._new_parts = self._new_parts, None
            self._store.use(identity_of(self.parts), result)
