"""Options of KV blocks that are published, stored or sent to another engine, and their plans (docs/scale.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokserve.config.common import GIB, NotNegative, Positive, about
from tokserve.errors import StartError

BUFFERED, QUEUED = 10_000, 100_000  # batches of KV events


class KVEventsPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's object for KV events; `format`, `interface` and `data_parallel_rank` are additions.

    `endpoint`: bound if it has a wildcard or is ipc, else connected to.  `format`: map, or array for routers that read
    events of vLLM before 0.24.  `interface`: the address that wildcards stand for.  `data_parallel_rank`: of the
    engine, which is added to ports.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[NotNegative, Meta(le=1_000_000)] = BUFFERED
    hwm: NotNegative = QUEUED
    max_queue_size: Positive = QUEUED
    topic: str = ""
    format: Literal["map", "array"] = "map"
    interface: str = "*"
    data_parallel_rank: NotNegative = 0


class KVStorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where KV blocks are kept besides the KV cache.  `memory_bytes`: of the tier in memory, which the files of
    `directory` pass through; None: no files.  `disk_bytes`: of all files in it."""

    memory_bytes: int
    directory: str | None = None
    disk_bytes: int = 0


class OffloadingTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of vLLM's `secondary_tiers`; only files are served."""

    type: Literal["fs"]
    path: str
    max_bytes: Positive = 10 * GIB


class OffloadingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `kv_connector_extra_config` of the OffloadingConnector, with the values that this store can have."""

    cpu_bytes_to_use: Positive
    eviction_policy: Literal["lru"] = "lru"
    store_threshold: Annotated[int, Meta(ge=0, le=1)] = 0
    offload_prompt_only: bool = False
    secondary_tiers: Annotated[list[OffloadingTier], Meta(max_length=1)] = []


class KVConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV blocks that are published, stored or sent to another engine."""

    kv_events_config: Annotated[
        dict[str, Any] | None,
        about('vLLM\'s JSON object {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}, '
              "with replay_endpoint, buffer_steps, hwm, max_queue_size and topic: publish which KV blocks are cached. "
              "Wildcards stand for the loopback address where the server listens on that."),
    ] = None  # fmt: skip

    kv_offloading_size: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about("GiB of memory for KV blocks that are kept besides the KV cache, so that prefixes are found again after "
              "they have left it. Default: none are kept."),
    ] = None  # fmt: skip
    kv_offloading_backend: Annotated[
        Literal["native", "lmcache"], about("What keeps the blocks of kv_offloading_size; lmcache is not supported.")
    ] = "native"
    kv_offloading_dir: Annotated[
        str | None,
        about("Directory for KV blocks as files, beside those of kv_offloading_size in memory: prefixes survive a "
              "restart. Several servers may share it. The files hold what prompts can be recovered from."),
    ] = None  # fmt: skip
    kv_offloading_disk_size: Annotated[
        float, about("Most GiB of files in kv_offloading_dir; those used least recently are deleted.", gt=0)
    ] = 10.0
    kv_transfer_config: Annotated[
        dict[str, Any] | None,
        about('vLLM\'s JSON object {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
              '"kv_connector_extra_config": {"cpu_bytes_to_use": N}}: the same as kv_offloading_size.'),
    ] = None  # fmt: skip

    def store(self) -> KVStorePlan | None:
        """Where KV blocks are kept besides the KV cache; None: nowhere.  Raises StartError."""
        plan = self._offloading_connector()
        if self.kv_offloading_size is None:
            if self.kv_offloading_dir is not None:
                raise StartError("option kv_offloading_dir: needs kv_offloading_size, as files pass through memory")
            return plan
        if plan is not None:
            raise StartError("options kv_offloading_size and kv_transfer_config both ask for KV offloading: give one")
        if self.kv_offloading_backend != "native":
            raise StartError(f"option kv_offloading_backend: {self.kv_offloading_backend} is not supported; use native")
        return KVStorePlan(
            memory_bytes=int(self.kv_offloading_size * GIB),
            directory=self.kv_offloading_dir,
            disk_bytes=int(self.kv_offloading_disk_size * GIB),
        )

    def _offloading_connector(self) -> KVStorePlan | None:
        """The plan that `kv_transfer_config` amounts to, where it names vLLM's OffloadingConnector."""
        given = self.kv_transfer_config
        if given is None:
            return None
        name = given.get("kv_connector")
        if name != "OffloadingConnector":
            raise StartError(f"option kv_transfer_config: kv_connector {name!r} is not supported")
        try:
            options = msgspec.convert(given.get("kv_connector_extra_config"), OffloadingOptions)
        except msgspec.ValidationError as error:
            raise StartError(f"option kv_transfer_config: kv_connector_extra_config: {error}") from None
        if options.offload_prompt_only:
            raise StartError(
                "option kv_transfer_config: offload_prompt_only true is not supported: blocks of outputs are kept too"
            )
        tier = options.secondary_tiers[0] if options.secondary_tiers else None
        return KVStorePlan(
            memory_bytes=options.cpu_bytes_to_use,
            directory=None if tier is None else tier.path,
            disk_bytes=0 if tier is None else tier.max_bytes,
        )

    def events(self) -> KVEventsPlan | None:
        """How KV events are published; None: they are not.  Raises StartError."""
        given = {name: value for name, value in (self.kv_events_config or {}).items() if value is not None}
        try:
            plan = msgspec.convert(given, KVEventsPlan)
        except msgspec.ValidationError as error:
            raise StartError(f"option kv_events_config: {error}") from None
        for name, endpoint in (("endpoint", plan.endpoint), ("replay_endpoint", plan.replay_endpoint)):
            if endpoint is not None and not _is_endpoint(endpoint):
                raise StartError(
                    f"option kv_events_config: {name} must be tcp://HOST:PORT or ipc://PATH, got {endpoint!r}"
                )
        return plan if plan.enable_kv_cache_events and plan.publisher == "zmq" else None


def _is_endpoint(endpoint: str) -> bool:
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        return bool(rest)
    host, _, port = rest.rpartition(":")
    return scheme == "tcp" and bool(host) and port.isdecimal() and int(port) < 1 << 16
