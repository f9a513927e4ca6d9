"""The admin commands, each declared once: its name, its parameters, its routes, and when it takes effect.

The engine's dispatch (`engine/admin/command`), the HTTP routes and their OpenAPI schemas (`server/admin`) and the table
in docs/rl.md are made from `COMMANDS`; `client/admin` has a method for each.  Names and meanings are vLLM's where vLLM
has the command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

MODES = ("abort", "wait", "keep", "retract")
TAGS = ("weights", "kv_cache", "scheduling")
MEMORY = TAGS[:2]
LEVELS = (("scheduling",), TAGS, TAGS)  # what each level of sleep puts to sleep
Mode = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(MODES)})]
When = Literal["at once", "step boundary", "in the background", "commit at a step boundary"]
LONGEST_RPC = 1e6  # seconds: limit of a timeout
RANDOM_SEED = "random_seed"  # of a source of weights without tensors: they are drawn from this seed
MOST_STEPS, LONGEST_PROFILE = 100_000, 3600.0  # of a profile; seconds
TorchOption = Literal["record_shapes", "with_stack", "profile_memory", "with_flops"]


class NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    """The parameters of a command that has none."""


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """`mode`: abort ends the requests in flight, wait lets them end, keep freezes them with their KV, retract takes it.

    `lease`: seconds without an extension after which generation goes on; null or 0: never.  Of two pauses the longer
    lease holds, but with `take_over` this one.
    """

    mode: Mode = "abort"
    clear_cache: bool = True
    lease: float | None = None
    take_over: bool = False


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    """`level`: 0 stops scheduling, 1 releases the KV cache's memory, 2 the weights' as well.  `mode`: as for pause."""

    level: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1
    mode: Mode = "abort"


class ReleaseMemory(msgspec.Struct, forbid_unknown_fields=True):
    """`tags`: weights, kv_cache.  `mode`: as for pause."""

    tags: list[str]
    mode: Mode = "abort"


class WakeUp(msgspec.Struct, forbid_unknown_fields=True):
    """What is undone of a sleep: weights, kv_cache, scheduling; default: all."""

    tags: list[str] | None = None


class ResetPrefixCache(msgspec.Struct, forbid_unknown_fields=True):
    """`reset_external`: drop the earlier outputs that are kept as drafts, and what the KV store keeps, as well."""

    reset_external: bool = False


class AddDraftCorpus(msgspec.Struct, forbid_unknown_fields=True):
    """Outputs, as packed int32 ids, that are drafts for requests of a group with this adapter and cache salt."""

    draft_group: str
    token_ids: list[bytes]
    lora_name: str = ""
    cache_salt: str = ""


class RemoveDraftCorpus(msgspec.Struct, forbid_unknown_fields=True):
    """Names the group to remove."""

    draft_group: str


class InitTransfer(msgspec.Struct, forbid_unknown_fields=True):
    """Options of the backend; `take_over`: roll back an open update."""

    options: dict[str, Any] = msgspec.field(name="init_info")
    take_over: bool = False


class StartUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """The base of a delta is given by its version and checksum.

    `lora_config`: the tensors are those of an adapter with this adapter_config.json; `lora_name`: its name, default:
    the model's own.  `lease`: seconds without a call after which the update is rolled back; default:
    `--control-lease`.  `take_over`: roll back an update that is open.
    """

    is_checkpoint_format: bool = True
    base_version: str | None = None
    base_checksum: str | None = None
    lora_name: str | None = None
    lora_config: dict[str, Any] | None = None
    lease: float | None = None
    take_over: bool = False


class StageTensors(msgspec.Struct, forbid_unknown_fields=True):
    """The tensors that come (names, dtypes, shapes, and where they are)."""

    update: dict[str, Any]
    update_id: str | None = None


class UpdateFromDirectory(msgspec.Struct, forbid_unknown_fields=True):
    """A complete update from a checkpoint directory, or from the deltas in it."""

    weight_dir: str
    weight_version: str | None = None
    recompute_kv: bool = False
    take_over: bool = False


class BeginStream(msgspec.Struct, forbid_unknown_fields=True):
    """A safetensors file is about to come, in pieces, for the update that is open."""

    stream: str
    update_id: str | None = None


class FeedStream(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a safetensors file; `broken`: no more come."""

    stream: str
    chunk: bytes
    last: bool = False
    broken: bool = False


class FinishUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """`weight_version`: by default what a delta's file says, or the new epoch (of an adapter: none).
    `checksum`: what the result of a delta, or an adapter, must have.  `recompute_kv`: requests in flight go on with KV
    of the new weights.  `update_id`: 409 if another update is open."""

    weight_version: str | None = None
    checksum: str | None = None
    recompute_kv: bool = False
    update_id: str | None = None


class AbortUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """Which update; default: the one that is open."""

    update_id: str | None = None


class RenameVersion(msgspec.Struct, forbid_unknown_fields=True):
    """A new version for the weights that serve."""

    new_version: str


class LoadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """A PEFT directory and the adapter's name; `load_inplace` false: refuse a name that is in use."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """Names the adapter to unload."""

    lora_name: str


class WorkerCall(msgspec.Struct, forbid_unknown_fields=True):
    """A method of the worker extension, and its arguments."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class ModelCall(msgspec.Struct, forbid_unknown_fields=True):
    """An importable function, `module:name`, that gets the model."""

    function: str


class StartProfile(msgspec.Struct, forbid_unknown_fields=True):
    """`profile_prefix`: of the file's name.  It begins after `delay_iterations` steps, and ends by itself after
    `max_iterations` steps (default: 500) or `max_seconds`, the first of them.  `profiler_kwargs`: record_shapes,
    with_stack, profile_memory and with_flops of torch's profiler.  `op_by_op`: run every step op by op meanwhile,
    instead of repeating recorded ones, so that the ops of all steps show."""

    profile_prefix: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    delay_iterations: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] | None = None
    max_iterations: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] | None = None
    max_seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_PROFILE)] = 60.0
    profiler_kwargs: dict[TorchOption, bool] | None = None
    op_by_op: bool = False


@dataclass(frozen=True, slots=True)
class AdminCommand:
    """`name`: what the engine calls it.  `routes`: paths of POST routes; none: only other commands and clients call it.

    `when`: when it takes effect.  `text`: for people, what it does.
    """

    name: str
    parameters: type[msgspec.Struct]
    when: When
    text: str
    routes: tuple[str, ...] = ()


def _routed(name: str, parameters: type[msgspec.Struct], when: When, text: str) -> AdminCommand:
    """A command whose route has its name."""
    return AdminCommand(name, parameters, when, text, (f"/{name}",))


COMMANDS: dict[str, AdminCommand] = {
    command.name: command
    for command in (
        _routed("pause", Pause, "step boundary", "stop generating"),
        _routed("extend_pause", NoParameters, "at once", "extend the lease of the pause"),
        _routed("resume", NoParameters, "at once", "resume generation; ends a sleep of level 0 too"),
        _routed("sleep", Sleep, "step boundary", "pause, and release memory"),
        AdminCommand("release_memory", ReleaseMemory, "step boundary", "pause, and release the named memory"),
        _routed("wake_up", WakeUp, "step boundary", "undo a sleep, or parts of it"),
        _routed(
            "release_kv_cache_memory",
            NoParameters,
            "step boundary",
            "release the KV cache's memory; running requests are computed again after wake_up",
        ),
        _routed("reset_prefix_cache", ResetPrefixCache, "at once", "empty the prefix cache"),
        _routed("add_draft_corpus", AddDraftCorpus, "at once", "keep outputs as drafts"),
        _routed("remove_draft_corpus", RemoveDraftCorpus, "at once", "drop the drafts of a group"),
        _routed(
            "init_weight_transfer_engine",
            InitTransfer,
            "in the background",
            "prepare a weight transfer; gloo and nccl join the trainer's group",
        ),
        _routed(
            "shutdown_weight_transfer_engine",
            NoParameters,
            "in the background",
            "close the weight transfer; an open update is rolled back",
        ),
        _routed("start_weight_update", StartUpdate, "in the background", "open an update"),
        AdminCommand("update_weights", StageTensors, "in the background", "stage tensors of the open update"),
        AdminCommand("begin_weight_stream", BeginStream, "at once", "announce a safetensors file"),
        AdminCommand("feed_weights", FeedStream, "in the background", "stage a piece of a safetensors file"),
        AdminCommand(
            "update_weights_from_dir",
            UpdateFromDirectory,
            "commit at a step boundary",
            "a complete update from a directory",
        ),
        _routed("finish_weight_update", FinishUpdate, "commit at a step boundary", "commit the staged weights"),
        _routed("abort_weight_update", AbortUpdate, "at once", "roll the update back"),
        _routed("update_weight_version", RenameVersion, "step boundary", "set the version of the current weights"),
        AdminCommand("weight_checksums", NoParameters, "in the background", "checksums of the weights in memory"),
        AdminCommand(
            "checkpoint_checksums", NoParameters, "in the background", "checksums of the checkpoint's tensors"
        ),
        AdminCommand("weights_checksum", NoParameters, "in the background", "one checksum of all weights"),
        AdminCommand("weight_coordinates", NoParameters, "in the background", "the tensors in which deltas count"),
        AdminCommand(
            "load_lora_adapter",
            LoadAdapter,
            "step boundary",
            "load an adapter",
            ("/v1/load_lora_adapter", "/load_lora_adapter"),
        ),
        AdminCommand(
            "unload_lora_adapter",
            UnloadAdapter,
            "step boundary",
            "unload an adapter when its requests have ended",
            ("/v1/unload_lora_adapter", "/unload_lora_adapter"),
        ),
        _routed("start_profile", StartProfile, "step boundary", "start to record a profile"),
        _routed("stop_profile", NoParameters, "step boundary", "end the profile: write the trace and tables of times"),
        _routed("collective_rpc", WorkerCall, "step boundary", "call the worker extension"),
        AdminCommand("apply_model", ModelCall, "step boundary", "call a function with the model"),
    )
}
