"""Prefill on one server, decoding on another: what happens to the KV of requests with `kv_transfer_params`.

A prefill server keeps the full blocks of an ended prompt for the other one: under a lease (connector tcp), or as files
(shared-storage; the output waits until they are written).  A decode server loads them like blocks of the KV store, into
the prefix cache, before the request gets a slot; from there on the request is like any other.  If they do not come, it
computes them itself or ends with an error, as `kv_load_failure_policy` says.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tokserve.config import KVTransferPlan
from tokserve.engine.kv_cache.block_table import BlockTable
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.request import Request
from tokserve.features.kv.content_keys import content_keys
from tokserve.features.kv.identity import IdentityWatch
from tokserve.features.kv.leases import LeaseTable
from tokserve.features.kv.store import Copy, KVStore
from tokserve.features.kv.tcp import BlockServer, Parts, Pull, differences, run_pull, send_note
from tokserve.protocol.kv_transfer import KVTransferParams

logger = logging.getLogger(__name__)

MAX_PULLS = 4
MAX_NOTES = 4
WRITE_SECONDS = 10.0  # that an output waits for its files
SHORT_DIGEST = 16  # characters of a part's digest on the wire
KEPT_SHARE = 2  # leases hold at most one block in so many


def shortened(parts: Parts) -> dict[str, str]:
    """An identity's parts as the wire has them."""
    return {name: value[:SHORT_DIGEST] for name, value in parts.items()}


@dataclass(slots=True, eq=False)
class FileOffer:
    """An ended request whose output waits until its blocks are files."""

    request: Request
    keys: list[bytes]
    deadline: float


@dataclass(slots=True, eq=False)
class RemoteLoad:
    """What is to come for a request.  `pull` and `future`: while it comes; `is_over`: it has come, or will not."""

    request: Request
    params: KVTransferParams
    pull: Pull | None = None
    loading: BlockTable | None = None
    tokens: array[int] | None = None
    future: Future[None] | None = None
    next_note: float = 0.0
    is_over: bool = False


class Transfers:
    """`failed`: requests that cannot go on, with the reason; the core ends them."""

    def __init__(
        self,
        plan: KVTransferPlan,
        cache: PrefixCache,
        store: KVStore,
        watch: IdentityWatch,
        copy: Copy,
        *,
        block_bytes: int,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """Raises StartError."""
        self._plan = plan
        self._cache = cache
        self._store = store
        self._watch = watch
        self._copy = copy
        self._block_bytes = block_bytes
        self._clock = clock
        self._wake = wake
        self._offers: list[FileOffer] = []
        self._loads: dict[BlockTable, RemoteLoad] = {}
        self._pulls: list[RemoteLoad] = []  # whose pull has begun, for requests that may have ended
        self.failed: list[tuple[Request, str]] = []
        self._leases = LeaseTable(plan.lease_seconds, clock)
        self._threads = ThreadPoolExecutor(MAX_PULLS, "kv-pull")
        self._notes = ThreadPoolExecutor(MAX_NOTES, "kv-note")  # not held up by pulls: leases would end meanwhile
        self._key = plan.key()
        self._server = None
        if plan.listens:
            self._server = BlockServer(
                plan.host,
                plan.port,
                self._key,
                plan.engine_id,
                self._leases,
                block_bytes=block_bytes,
                identity=lambda: shortened(watch.parts),
                on_change=wake,
                read=lambda blocks: copy("pages", "read_blocks", {"blocks": blocks}).result(),
            )
            logger.info("KV blocks for others at %s:%d, engine %s", plan.host, self._server.port, plan.engine_id)
        cache.transfers = self

    # --- for the core ---

    @property
    def busy(self) -> bool:
        return bool(self._loads or self._pulls or self.failed)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are in use although no request is."""
        return bool(self._pulls or self._leases.num_blocks)

    def seconds_left(self) -> float | None:
        """Until there is something to do."""
        ends = [self._leases.seconds_left(), *(offer.deadline - self._clock() for offer in self._offers)]
        ends += [load.next_note - self._clock() for load in self._loads.values() if load.pull is None]
        return min((max(0.0, end) for end in ends if end is not None), default=None)

    def close(self) -> None:
        """End what is on its way."""
        if self._server is not None:
            self._server.close()
        for load in self._pulls:
            if load.pull is not None:
                load.pull.cancel()
        for threads in (self._threads, self._notes):
            threads.shutdown(wait=False, cancel_futures=True)

    def on_reset(self) -> None:
        """The prefix cache is empty; pages may get other content."""
        self._leases.end_all()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Clients have given up requests that have ended: so their leases end."""
        self._leases.end(request_ids)

    def poll(self) -> list[Request]:
        """Take what has ended since the last call; returns requests whose output need not wait any more."""
        for lease in self._leases.take_ended():
            self._cache.free(lease.table)
        counters = self._store.counters
        counters.leased = self._leases.num_blocks
        counters.sent = 0 if self._server is None else self._server.num_sent
        self._pulls = [load for load in self._pulls if not self._end_pull(load)]
        now = self._clock()
        for load in self._loads.values():
            if load.pull is None and self._has_peer(load.params) and now >= load.next_note:
                load.next_note = now + self._plan.lease_seconds / 3
                self._note(load.params, "heartbeat")
        ready = [offer for offer in self._offers if self._is_written(offer, now)]
        if ready:
            self._offers = [offer for offer in self._offers if offer not in ready]
        return [offer.request for offer in ready]

    # --- a prefill that others go on with ---

    def offer(self, requests: Collection[Request]) -> list[Request]:
        """Requests with output to send: keep blocks for those that ended and are to be gone on with elsewhere; returns
        those whose output can be sent now."""
        return [request for request in requests if request.finish is None or not self._offer(request)]

    def _offer(self, request: Request) -> bool:
        """Whether the output has to wait."""
        params, finish = request.options.kv_transfer_params, request.finish
        if params is None or finish is None or not params.do_remote_decode:
            return False
        if finish.reason not in ("stop", "length") or not request.is_first_choice:
            return False
        keys = self._keys(request)
        if self._server is None:
            self._offers.append(FileOffer(request, keys, self._clock() + WRITE_SECONDS))
            self._wake()
            return True
        if len(keys) + self._leases.num_blocks > self._cache.pool.total // KEPT_SHARE:
            keys = []
        table = self._cache.hold(request.table, len(keys))
        request_id = request.request_id
        if table.blocks:
            self._leases.add(request_id, table, keys[: len(table.blocks)])
        expiry = time.time() + self._plan.lease_seconds
        self._reply(request, table.blocks, expiry, remote_host=self._plan.advertised, remote_port=self._server.port)
        return False

    def _keys(self, request: Request) -> list[bytes]:
        """Content keys of the prompt's full blocks; none if they are not known, or of other weights."""
        identity = self._store.identity
        if identity is None or not self._cache.is_current(request.table):
            return []
        size = self._cache.block_size
        count = min(request.table.num_full, request.prompt_len // size)
        return content_keys(identity, request.table, request.tokens, count, size)

    def _is_written(self, offer: FileOffer, now: float) -> bool:
        count = self._store.num_in_files(offer.keys)
        if count < len(offer.keys) and now < offer.deadline and self._store.is_writing(offer.keys[count]):
            return False
        self._reply(offer.request, list(range(count)), None)
        return True

    def _reply(self, request: Request, blocks: list[int], expiry: float | None, **place: Any) -> None:
        """What the reply carries, for the other server's request."""
        request.output.values["kv_transfer"] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self._plan.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": None,
            "remote_port": None,
            "remote_num_tokens": len(blocks) * self._cache.block_size,
            "remote_blocks_expiry_time": expiry,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
            "remote_identity": shortened(self._watch.parts),
        } | place

    # --- a prompt that was computed elsewhere ---

    def expect(self, request: Request) -> None:
        """A request was accepted."""
        params = request.options.kv_transfer_params
        if params is not None and params.do_remote_prefill and request.is_first_choice:
            self._loads[request.table] = RemoteLoad(request, params)

    def on_end(self, request: Request) -> None:
        load = self._loads.pop(request.table, None)
        if load is None or load.is_over:
            return
        if load.pull is not None:
            load.pull.cancel()
        elif self._has_peer(load.params):
            self._note(load.params, "release")

    def load(self, table: BlockTable, tokens: array[int], hits: int, usable: int) -> bool:
        """Begin to load the blocks after the first `hits`; whether the table's request waits."""
        load = self._loads.get(table)
        if load is None:
            return False
        if load.is_over:
            return self._check_loaded(load, hits, usable)
        if load.pull is not None:
            return True
        refusal = self._refusal(load.params)
        if refusal:
            return self._fail(load, refusal)
        assert self._store.identity is not None
        keys = content_keys(self._store.identity, table, tokens, usable, self._cache.block_size)
        count = min(len(keys), load.params.num_blocks)
        if count <= hits:
            self._over(load)
            return False
        if not self._has_peer(load.params):
            load.is_over = True
            self._store.expect_files(keys[:count])
            return self._store.load(table, tokens, hits, usable, must=True) or self._check_loaded(load, hits, usable)
        return self._begin_pull(load, table, tokens, hits, keys[:count])

    def _refusal(self, params: KVTransferParams) -> str:
        """Why nothing can be loaded."""
        if self._store.identity is None:
            return "the weights are changing"
        remote = params.remote_identity
        if remote is not None and (differing := differences(shortened(self._watch.parts), remote)):
            return f"the two servers differ in: {differing}"
        if self._has_peer(params) != (self._plan.connector == "tcp"):
            return "the two servers have different connectors"
        return ""

    def _begin_pull(
        self, load: RemoteLoad, table: BlockTable, tokens: array[int], hits: int, keys: Sequence[bytes]
    ) -> bool:
        count = self._cache.num_unclaimed(table, hits, len(keys) - hits)
        if not count:
            self._over(load)
            return False
        loading = self._cache.begin_load(table, hits, count)
        blocks = self._cache.place_load(loading)
        if blocks is None:  # no room: unless the cache is empty, the request could not be admitted either
            self._cache.end_load(loading, tokens, 0)
            if self._cache.num_tables:
                return True
            self._over(load)
            return False
        params = load.params
        assert params.remote_host is not None and params.remote_port is not None
        load.pull = pull = Pull(
            params.remote_host,
            params.remote_port,
            params.remote_engine_id or "",
            params.remote_request_id or "",
            shortened(self._watch.parts),
            hits,
            list(keys[hits : hits + count]),
            blocks,
        )
        load.loading, load.tokens = loading, tokens[: (hits + count) * self._cache.block_size]
        load.future = self._threads.submit(run_pull, pull, self._key, self._block_bytes, self._write)
        load.future.add_done_callback(lambda _: self._wake())
        self._pulls.append(load)
        return True

    def _write(self, blocks: list[int], contents: list[bytearray]) -> None:
        self._copy("pages", "write_blocks", {"blocks": blocks, "contents": contents}).result()

    def _end_pull(self, load: RemoteLoad) -> bool:
        assert load.future is not None and load.pull is not None
        assert load.loading is not None and load.tokens is not None
        if not load.future.done():
            return False
        load.future.result()
        pull = load.pull
        self._cache.end_load(load.loading, load.tokens, pull.count)
        self._store.counters.received += pull.count
        load.is_over = True
        if pull.error and not pull.cancelled:
            self._fail(load, pull.error)
        return True

    def _check_loaded(self, load: RemoteLoad, hits: int, usable: int) -> bool:
        """After a load: go on, unless less came than was promised and that is an error."""
        self._loads.pop(load.request.table, None)
        if self._has_peer(load.params) or hits >= min(usable, load.params.num_blocks):
            return False
        return self._fail(load, "files of its blocks are missing, damaged or late")

    def _over(self, load: RemoteLoad) -> None:
        """End a load whose blocks are all here already."""
        self._loads.pop(load.request.table, None)
        if self._has_peer(load.params):
            self._note(load.params, "release")

    def _fail(self, load: RemoteLoad, reason: str) -> bool:
        """End a load of which nothing came, or only a part; returns whether the request waits for its own end."""
        self._loads.pop(load.request.table, None)
        self._store.counters.failed_transfers += 1
        logger.warning("KV of request %s was not transferred: %s", load.request.request_id, reason)
        if self._plan.failure == "recompute":
            return False
        if load.request.finish is None:
            self.failed.append((load.request, f"the prompt's KV could not be loaded: {reason}"))
            self._wake()
        return True

    def _has_peer(self, params: KVTransferParams) -> bool:
        return params.remote_host is not None

    def _note(self, params: KVTransferParams, op: str) -> None:
        if params.remote_host is not None and params.remote_port is not None:
            ids = [params.remote_request_id or ""]
            self._notes.submit(send_note, params.remote_host, params.remote_port, self._key, op, ids)
