"""All options: a field is a name, a type, a default, a range and a sentence; the command line follows from it.

Field names are the command line flags (`max_model_len` is `--max-model-len`) and the keyword arguments of
`LLM` and `AsyncLLM`; they are unique over all groups, so the groups need not be named.  A component receives
its group only; a module here holds the groups of one subject.  `resolve` replaces "auto" and None by values.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from tokserve.base.errors import StartError
from tokserve.base.rooms import contributions
from tokserve.config.cors import CorsConfig
from tokserve.config.kv import KVConfig, KVEventsPlan
from tokserve.config.kv_connector import KVStorePlan, KVTransferPlan
from tokserve.config.logs import LogConfig
from tokserve.config.media import MediaConfig
from tokserve.config.model import (
    BACKENDS,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_CPU_KV_BYTES,
    PACKING,
    CacheConfig,
    LoraConfig,
    ModelConfig,
    WeightsConfig,
)
from tokserve.config.parallel import ParallelConfig
from tokserve.config.profiler import ProfilerConfig, ProfilerPlan
from tokserve.config.replies import ReplyConfig
from tokserve.config.runtime import RuntimeConfig, SchedulerConfig
from tokserve.config.server import LimitsConfig, ServerConfig, TlsConfig
from tokserve.config.speculation import SpeculationPlan, SpeculativeConfig
from tokserve.config.vllm import own_options

__all__ = [
    "BACKENDS",
    "DEFAULT_BLOCK_SIZE",
    "DEFAULT_CPU_KV_BYTES",
    "PACKING",
    "SECRET",
    "CacheConfig",
    "Config",
    "CorsConfig",
    "KVConfig",
    "KVEventsPlan",
    "KVStorePlan",
    "KVTransferPlan",
    "LimitsConfig",
    "LogConfig",
    "LoraConfig",
    "MediaConfig",
    "ModelConfig",
    "ParallelConfig",
    "ProfilerConfig",
    "ProfilerPlan",
    "ReplyConfig",
    "RuntimeConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculationPlan",
    "SpeculativeConfig",
    "TlsConfig",
    "WeightsConfig",
    "fields",
    "option_values",
]
WITHOUT_EFFECT = "option %s has no effect here"
logger = logging.getLogger("tokserve.config")
T = TypeVar("T", bound=msgspec.Struct)
SECRET = ("api_key", "admin_api_key")  # options that are never shown

# what --rl changes where an option is not given
RL_DEFAULTS = {"logprobs_mode": "processed", "generation_config": "none", "scheduling_policy": "priority"}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The groups.  `Config.make(model="demo", port=8001)` fills them by field name.  `rooms`: options of rooms that
    were given, by the room's name."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculativeConfig = SpeculativeConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    parallel: ParallelConfig = ParallelConfig()
    weights: WeightsConfig = WeightsConfig()
    lora: LoraConfig = LoraConfig()
    server: ServerConfig = ServerConfig()
    replies: ReplyConfig = ReplyConfig()
    cors: CorsConfig = CorsConfig()
    tls: TlsConfig = TlsConfig()
    logs: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()
    media: MediaConfig = MediaConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    rooms: dict[str, dict[str, Any]] = {}

    def options_of(self, kind: type[T]) -> T:
        """The options of a room, whose group is of this type."""
        name = next(name for name, group in _groups() if group is kind)
        return msgspec.convert(self.rooms.get(name, {}), kind)

    @classmethod
    def make(cls, **values: Any) -> Config:
        """Build from flat field names, or vLLM's; None means the default.  Raises StartError naming the field."""
        values, without = own_options(values)
        for name in without:
            logger.warning(WITHOUT_EFFECT, name)
        if values.get("rl"):
            values = values | {name: value for name, value in RL_DEFAULTS.items() if values.get(name) is None}
        groups: dict[str, dict[str, Any]] = {}
        group_of = {name: group for group, name, _ in fields()}
        for name, value in values.items():
            if name not in group_of:
                close = difflib.get_close_matches(name, group_of, 1)
                hint = f"did you mean {close[0]!r}?" if close else "`tokserve serve --help=all` lists all"
                raise StartError(f"unknown option {name!r}; {hint}")
            if name == "model" and value is None:  # an unset variable must not select the demo model
                raise StartError("option model: must be str, got None")
            if value is not None:
                plain = os.fspath(value) if isinstance(value, os.PathLike) else value
                groups.setdefault(group_of[name], {})[name] = plain
        rooms = {name: groups.pop(name) for name, _ in contributions("options") if name in groups}
        try:
            for name, kind in contributions("options"):
                msgspec.convert(rooms.get(name, {}), kind)
            return msgspec.convert(groups | {"rooms": rooms}, cls)
        except msgspec.ValidationError as error:
            raise StartError(_readable(str(error), values)) from None


@cache
def fields() -> tuple[tuple[str, str, Any], ...]:
    """(group, field name, annotated type) of every option, in order of definition."""
    rows = []
    for name, kind in _groups():
        hints = get_type_hints(kind, include_extras=True)
        rows += [(name, field.name, hints[field.name]) for field in msgspec.structs.fields(kind)]
    return tuple(rows)


@cache
def _groups() -> tuple[tuple[str, Any], ...]:
    """(name, type) of every group of options: those of the core, then those of rooms."""
    core = [(group.name, group.type) for group in msgspec.structs.fields(Config) if group.name != "rooms"]
    return (*core, *contributions("options"))


def option_values(config: Config) -> Iterator[tuple[str, str, Any]]:
    """(group, field name, value) of every option, in order of definition."""
    for name, kind in _groups():
        options = (
            config.options_of(kind) if name in config.rooms or not hasattr(config, name) else getattr(config, name)
        )
        for field in kind.__struct_fields__:
            yield name, field, getattr(options, field)


def _readable(message: str, values: dict[str, Any]) -> str:
    """msgspec's message, which ends with a path, as a sentence about the option and its value."""
    what, _, path = message.partition(" - at `$.")
    if not path:
        return message
    name, _, inside = path.rstrip("`").split(".", 1)[-1].partition("[")
    if what.startswith("Invalid enum value"):
        hint = next(hint for _, field, hint in fields() if field == name)
        what = f"must be one of {', '.join(str(choice) for choice in _choices(hint))}"
    elif bound := re.fullmatch(r"Expected `\w+` (>=|<=|>) (\S+)", what):
        words = {">=": "at least", "<=": "at most", ">": "above"}
        what = f"must be {words[bound[1]]} {bound[2]}"
    elif kind := re.match(r"Expected `([^`]+)`, got", what):
        what = f"must be {kind[1].replace(' | null', '').replace(' | ', ' or ').replace('array', 'list')}"
    value = "" if name in SECRET else f", got {values[name]!r}"
    return f"option {name}{'[' if inside else ''}{inside}: {what}{value}"


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of an annotated field's Literal."""
    return get_args(hint) if get_origin(hint) is Literal else next(filter(None, map(_choices, get_args(hint))), ())
