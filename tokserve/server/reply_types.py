"""The replies that handlers make as dictionaries, as types: what /openapi.json says of them.

Replies that have a struct of their own are declared beside their handlers.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class EmptyObject(TypedDict):
    """An empty object."""


class Version(TypedDict):
    """The version of this server."""

    version: str


class EngineState(TypedDict):
    """What an engine does.  Times are in seconds since 1970."""

    engine: NotRequired[int]
    state: str
    weight_version: str
    epoch: int
    running: int
    waiting: int
    since: float
    reason: str | None
    paused_since: float | None


class ServerState(EngineState):
    """`engines`: each, where there are several."""

    arithmetic: Any
    engines: NotRequired[list[EngineState]]


class IsPaused(TypedDict):
    """Whether generation is paused."""

    is_paused: bool


class IsSleeping(TypedDict):
    """Whether any memory is asleep."""

    is_sleeping: bool


class WorldSize(TypedDict):
    """The number of ranks."""

    world_size: int


class ServedAdapter(TypedDict):
    """An adapter; one that was pushed has a version and the checksum of its tensors in place of a directory."""

    lora_name: str
    lora_path: str | None
    generation: int
    lora_version: str | None
    checksum: str | None


class ServedWeights(TypedDict):
    """`last_failure`: of a weight update.  With `tensors`, those in which deltas count, and their format."""

    weight_version: str
    epoch: int
    checksum: str | None
    last_failure: str | None
    adapters: list[ServedAdapter]
    delta_format: NotRequired[str]


class CommandStatus(TypedDict):
    """The state after a command; of a sleep its level, of a wake-up what is still asleep."""

    status: str
    level: NotRequired[int]
    asleep: NotRequired[list[str]]


class Success(TypedDict):
    """It is done."""

    success: bool
    message: NotRequired[str]


class Done(TypedDict):
    """It is done.  Of a weight update: the version that serves and whether earlier weights had it too, its id and its
    checksum; of a transfer its backend."""

    message: str
    weight_version: NotRequired[str]
    epoch: NotRequired[int]
    checksum: NotRequired[str]
    version_reused: NotRequired[bool]
    lora_name: NotRequired[str]
    lora_version: NotRequired[str | None]
    generation: NotRequired[int]
    evicted: NotRequired[str]
    update_id: NotRequired[str]
    backend: NotRequired[str]


class Renamed(TypedDict):
    """The new version of the weights."""

    success: bool
    new_version: str
    epoch: int


class AdapterReply(TypedDict):
    """The adapter; `evicted`: the one that made room."""

    success: bool
    message: str
    lora_name: str
    lora_path: NotRequired[str]
    generation: NotRequired[int]
    evicted: NotRequired[str]


class WorkerResults(TypedDict):
    """What each rank's method returned."""

    results: list[Any]


class Removed(TypedDict):
    """The number of outputs that are no drafts any more."""

    removed: int


class DraftCorpusSize(TypedDict):
    """The number of outputs that are drafts now."""

    outputs: int


class Checksums(TypedDict):
    """SHA-256 by tensor, in memory and of the checkpoint; or how weights compare with a baseline."""

    checksums: NotRequired[dict[str, str]]
    checkpoint: NotRequired[dict[str, str] | None]
    tied: NotRequired[dict[str, str]]
    reason: NotRequired[str]
    match: NotRequired[bool]
    mismatches: NotRequired[list[str]]


JsonObject = dict[str, Any]
# by name of an admin command; a profile's trace and tables are an object
OF_COMMANDS: dict[str, Any] = {
    "pause": CommandStatus,
    "extend_pause": CommandStatus,
    "resume": CommandStatus,
    "sleep": CommandStatus,
    "wake_up": CommandStatus,
    "release_kv_cache_memory": Success,
    "reset_prefix_cache": Success,
    "add_draft_corpus": DraftCorpusSize,
    "remove_draft_corpus": Removed,
    "init_weight_transfer_engine": Done,
    "shutdown_weight_transfer_engine": Done,
    "start_weight_update": Done,
    "finish_weight_update": Done,
    "abort_weight_update": Done,
    "update_weight_version": Renamed,
    "load_lora_adapter": AdapterReply,
    "unload_lora_adapter": AdapterReply,
    "start_profile": JsonObject,
    "stop_profile": JsonObject,
    "collective_rpc": WorkerResults,
}
