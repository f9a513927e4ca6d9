"""Options of KV blocks that are published, stored or sent to another engine, and their plans (docs/scale.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokserve.base.errors import StartError
from tokserve.config.common import GIB, NotNegative, Positive, about
from tokserve.config.kv_connector import KVStorePlan, KVTransferPlan, transfer_plan, transfer_store

BUFFERED, QUEUED = 10_000, 100_000  # batches of KV events
MOST_GIB = 1e9  # of memory or files: its bytes are within 64 bits


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
    hwm: Annotated[NotNegative, Meta(le=(1 << 31) - 1)] = QUEUED  # a C int of zmq
    max_queue_size: Positive = QUEUED
    topic: str = ""
    format: Literal["map", "array"] = "map"
    interface: str = "*"
    data_parallel_rank: NotNegative = 0


class KVConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV blocks that are published, stored or sent to another engine."""

    kv_events_config: Annotated[
        dict[str, Any] | None,
        about(
            'vLLM\'s JSON object {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}, '
            "with replay_endpoint, buffer_steps, hwm, max_queue_size and topic: publish which KV blocks are cached. "
            "Wildcards stand for the loopback address where the server listens on that."
        ),
    ] = None

    kv_offloading_size: Annotated[
        Annotated[float, Meta(gt=0, le=MOST_GIB)] | None,
        about(
            "GiB of memory for KV blocks that are kept besides the KV cache, so that prefixes are found again after "
            "they have left it. Default: none are kept."
        ),
    ] = None
    kv_offloading_backend: Annotated[
        Literal["native", "lmcache"], about("What keeps the blocks of kv_offloading_size; lmcache is not supported.")
    ] = "native"
    kv_offloading_dir: Annotated[
        str | None,
        about(
            "Directory for KV blocks as files, beside those of kv_offloading_size in memory: prefixes survive a "
            "restart. Several servers may share it. Prompts can be recovered from the files."
        ),
    ] = None
    kv_offloading_disk_size: Annotated[
        float,
        about("Most GiB of files in kv_offloading_dir; those used least recently are deleted.", gt=0, le=MOST_GIB),
    ] = 10.0
    kv_transfer_config: Annotated[
        dict[str, Any] | None,
        about(
            'vLLM\'s JSON object {"kv_connector": NAME, "kv_role": "kv_producer", "kv_consumer" or "kv_both"}, with '
            "engine_id, kv_ip, kv_port, kv_load_failure_policy and kv_connector_extra_config: how one server goes on "
            "with prompts that another has computed (shared-storage, tcp), or where blocks are kept "
            "(OffloadingConnector)."
        ),
    ] = None

    def store(self) -> KVStorePlan | None:
        """Where KV blocks are kept besides the KV cache; None: nowhere.  Raises StartError."""
        plan = transfer_store(self.kv_transfer_config)
        if self.kv_offloading_size is None:
            if self.kv_offloading_dir is not None:
                raise StartError("option kv_offloading_dir: needs kv_offloading_size, as files pass through memory")
            return plan
        if self.kv_offloading_backend != "native":
            raise StartError(f"option kv_offloading_backend: {self.kv_offloading_backend} is not supported; use native")
        directory = self.kv_offloading_dir
        if plan is not None and plan.directory is not None:
            if directory is not None:
                raise StartError("options kv_offloading_dir and kv_transfer_config both name a directory: give one")
            directory = plan.directory
        return KVStorePlan(
            memory_bytes=int(self.kv_offloading_size * GIB),
            directory=directory,
            disk_bytes=int(self.kv_offloading_disk_size * GIB),
        )

    def transfer(self) -> KVTransferPlan | None:
        """How KV comes from and goes to other servers; None: it does not.  Raises StartError."""
        return transfer_plan(self.kv_transfer_config)

    def events(self) -> KVEventsPlan | None:
        """How KV events are published; None: they are not.  Raises StartError."""
        fields = {name: value for name, value in (self.kv_events_config or {}).items() if value is not None}
        try:
            plan = msgspec.convert(fields, KVEventsPlan)
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
