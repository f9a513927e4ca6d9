"""KV besides the KV cache, as the loop sees it: the store that keeps blocks, and their transfers between servers.

Options name both.  Without them nothing is kept, expected or waited for, and every method does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tokserve.config import KVConfig
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.request import Request
from tokserve.executor.base import Executor
from tokserve.features.kv.identity import IdentityWatch, WeightChanges
from tokserve.features.kv.store import KVStore
from tokserve.features.kv.transfers import Transfers


class ExternalKV:
    """The KV store, the watch that tells it which weights serve, and the transfers; each is None if no option names it.

    `tokens_per_second`: how fast prompts are computed.  `wake` is called from any thread when there is something for
    `poll`.
    """

    def __init__(
        self,
        config: KVConfig,
        cache: PrefixCache,
        executor: Executor,
        weights: WeightChanges,
        facts: dict[str, Any],
        *,
        tokens_per_second: Callable[[], float],
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """Waits until the device has computed the digest of the weights.  Raises StartError."""
        self.store: KVStore | None = None
        self.watch: IdentityWatch | None = None
        self._transfers: Transfers | None = None
        plan = config.store()
        if plan is None:
            return
        block_bytes = facts["kv_block_bytes"]
        self.store = KVStore(
            cache,
            executor.copy,
            num_slots=facts["kv_store_slots"],
            block_bytes=block_bytes,
            has_files=plan.directory is not None,
            tokens_per_second=tokens_per_second,
            clock=clock,
            wake=wake,
        )
        self.watch = IdentityWatch(self.store, weights, executor.background, executor.copy, wake)
        self.watch.start()
        if (transfer := config.transfer()) is not None:
            self._transfers = Transfers(
                transfer, cache, self.store, self.watch, executor.copy, block_bytes=block_bytes, clock=clock, wake=wake
            )

    @property
    def busy(self) -> bool:
        """Whether requests may wait for blocks although nothing runs."""
        return (self.store is not None and self.store.busy) or (self._transfers is not None and self._transfers.busy)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are in use although no request is: they are being loaded, or held for another server."""
        loading = self.store is not None and self.store.loading
        return loading or (self._transfers is not None and self._transfers.holds_blocks)

    def seconds_left(self) -> float | None:
        """The time until there is something for `poll`; None: until `wake` is called."""
        ends = [part.seconds_left() for part in (self.store, self._transfers) if part is not None]
        return min((seconds for seconds in ends if seconds is not None), default=None)

    def poll(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Take what has ended since the last call.  Returns requests whose output waited and can be sent now, and
        requests that cannot go on, with the reason."""
        if self.store is not None and self.watch is not None:
            self.store.poll()
            self.watch.poll()
        if self._transfers is None:
            return [], []
        ready = self._transfers.poll()
        failed, self._transfers.failed = self._transfers.failed, []
        return ready, failed

    def expect(self, request: Request) -> None:
        """A request was accepted; its KV may come from another server."""
        if self._transfers is not None:
            self._transfers.expect(request)

    def offer(self, requests: list[Request]) -> list[Request]:
        """Hold the KV of ended requests for another server; returns the requests whose output can be sent now."""
        return requests if self._transfers is None else self._transfers.offer(requests)

    def on_end(self, request: Request) -> None:
        """A request has ended: what was to come for it is given back."""
        if self._transfers is not None:
            self._transfers.on_end(request)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Clients have given up requests that have ended: their KV is not held any longer."""
        if self._transfers is not None:
            self._transfers.drop(request_ids)

    def clear(self) -> None:
        """Drop all blocks of the store, in memory and in files."""
        if self.store is not None:
            self.store.clear()

    def close(self) -> None:
        """End the transfers on their way."""
        if self._transfers is not None:
            self._transfers.close()
