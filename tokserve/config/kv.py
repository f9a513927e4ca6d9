"""Options of KV blocks that are told of or leave the engine, and what they amount to (docs/scale.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokserve.config.common import NotNegative, Positive, about
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


class KVConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV blocks that others hear of."""

    kv_events_config: Annotated[
        dict[str, Any] | None,
        about('vLLM\'s JSON object {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}, '
              "with replay_endpoint, buffer_steps, hwm, max_queue_size and topic: publish which KV blocks are cached. "
              "Wildcards stand for the loopback address where the server listens on that."),
    ] = None  # fmt: skip

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
