"""vLLM's `--kv-transfer-config`: the connectors by name, what their options amount to, and what is refused by name."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokserve.base.errors import StartError
from tokserve.config.common import GIB, NotNegative, Positive

OPTION = "option kv_transfer_config"
OFFLOADING = "OffloadingConnector"
SHARED_STORAGE = ("shared-storage", "SharedStorageConnector", "ExampleConnector")
KV_PORT = 14579
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONNECTOR_MEMORY = GIB // 4  # of the store that a connector has, unless another size is given
MIN_KEY = 16  # bytes of a shared key


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
    """vLLM's `kv_connector_extra_config` of the OffloadingConnector, with the values that the KV store can have."""

    cpu_bytes_to_use: Positive
    eviction_policy: Literal["lru"] = "lru"
    store_threshold: Annotated[int, Meta(ge=0, le=1)] = 0
    offload_prompt_only: bool = False
    secondary_tiers: Annotated[list[OffloadingTier], Meta(max_length=1)] = []


class SharedStorageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of shared-storage; the first field is vLLM's."""

    shared_storage_path: str
    max_bytes: Positive = 10 * GIB


class TcpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of tcp.

    `key_file`: a secret of all servers that transfer to one another.  `peers`: hosts, or HOST:PORT, that blocks may be
    fetched from.  `advertised_host`: where others reach this server; default: the host that it listens at.
    """

    key_file: str
    peers: tuple[str, ...] = LOOPBACK
    advertised_host: str | None = None
    lease_seconds: Annotated[float, Meta(gt=0, le=86400)] = 30.0


class _TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's object; the fields after `kv_load_failure_policy` have no effect here, but for the last one, an addition:
    the engine's number among several."""

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    engine_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    kv_ip: str = LOOPBACK[0]
    kv_port: Annotated[int, Meta(ge=0, le=65535)] = KV_PORT
    kv_connector_extra_config: dict[str, Any] = {}
    kv_connector_module_path: None = None
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_buffer_device: str | None = None
    kv_buffer_size: float | None = None
    kv_rank: int | None = None
    kv_parallel_size: int | None = None
    enable_permute_local_kv: bool = False
    data_parallel_rank: NotNegative = 0


class KVTransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How KV comes from and goes to other servers.  `host`, `port`: where tcp listens."""

    connector: Literal["shared-storage", "tcp"]
    role: str
    engine_id: str
    failure: str
    host: str
    port: int
    advertised: str
    key_file: str = ""
    peers: tuple[str, ...] = ()
    lease_seconds: float = 30.0

    @property
    def produces(self) -> bool:
        """Whether this engine computes prompts for others."""
        return self.role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """Whether this engine goes on with prompts that others have computed."""
        return self.role != "kv_producer"

    @property
    def listens(self) -> bool:
        """Whether others fetch blocks from here."""
        return self.connector == "tcp" and self.produces

    def key(self) -> bytes:
        """The shared secret.  Raises StartError."""
        if self.connector != "tcp":
            return b""
        try:
            key = Path(self.key_file).read_bytes().strip()
        except OSError as error:
            raise StartError(f"{OPTION}: key_file {self.key_file!r}: {error.strerror}") from None
        if len(key) < MIN_KEY:
            raise StartError(
                f"{OPTION}: key_file {self.key_file!r} has {len(key)} bytes, at least {MIN_KEY} are needed"
            )
        return key


def _config(fields: dict[str, Any] | None) -> _TransferConfig | None:
    if fields is None:
        return None
    try:
        config = msgspec.convert({name: value for name, value in fields.items() if value is not None}, _TransferConfig)
    except msgspec.ValidationError as error:
        raise StartError(f"{OPTION}: {error}") from None
    name = config.kv_connector
    known = ("tcp", *SHARED_STORAGE, OFFLOADING)
    if name not in known:
        raise StartError(f"{OPTION}: kv_connector {name!r} is not supported; known: {', '.join(known)}")
    if config.enable_permute_local_kv:
        raise StartError(f"{OPTION}: enable_permute_local_kv is not supported: layouts must be equal")
    return config


def _extra(config: _TransferConfig, kind: Any) -> Any:
    try:
        return msgspec.convert(config.kv_connector_extra_config, kind)
    except msgspec.ValidationError as error:
        raise StartError(f"{OPTION}: kv_connector_extra_config: {error}") from None


def transfer_store(fields: dict[str, Any] | None) -> KVStorePlan | None:
    """The KV store that a connector is, or has.  Raises StartError."""
    config = _config(fields)
    if config is None:
        return None
    if config.kv_connector in SHARED_STORAGE:
        shared = _extra(config, SharedStorageOptions)
        return KVStorePlan(
            memory_bytes=CONNECTOR_MEMORY, directory=shared.shared_storage_path, disk_bytes=shared.max_bytes
        )
    if config.kv_connector != OFFLOADING:
        return KVStorePlan(memory_bytes=CONNECTOR_MEMORY)
    options = _extra(config, OffloadingOptions)
    if options.offload_prompt_only:
        raise StartError(f"{OPTION}: offload_prompt_only true is not supported: blocks of outputs are always kept, too")
    tier = options.secondary_tiers[0] if options.secondary_tiers else None
    return KVStorePlan(
        memory_bytes=options.cpu_bytes_to_use,
        directory=None if tier is None else tier.path,
        disk_bytes=0 if tier is None else tier.max_bytes,
    )


def transfer_plan(fields: dict[str, Any] | None) -> KVTransferPlan | None:
    """What a connector between servers amounts to.  Raises StartError."""
    config = _config(fields)
    if config is None or config.kv_connector == OFFLOADING:
        return None
    engine_id, rank = config.engine_id or secrets.token_hex(16), config.data_parallel_rank
    if rank:
        engine_id = f"{engine_id}_dp{rank}"
    port = config.kv_port + rank if config.kv_port else 0
    common: dict[str, Any] = {
        "role": config.kv_role,
        "engine_id": engine_id,
        "failure": config.kv_load_failure_policy,
        "host": config.kv_ip,
        "port": port,
    }
    if config.kv_connector in SHARED_STORAGE:
        return KVTransferPlan(connector="shared-storage", advertised="", **common)
    tcp = _extra(config, TcpOptions)
    return KVTransferPlan(
        connector="tcp",
        advertised=tcp.advertised_host or config.kv_ip,
        key_file=tcp.key_file,
        peers=tcp.peers,
        lease_seconds=tcp.lease_seconds,
        **common,
    )
