"""Options of the profiler, and what they amount to (docs/profiling.md)."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from tokserve.base.errors import StartError
from tokserve.config.common import about

# what vLLM's object says about torch's profiler, by our names
TORCH_OPTIONS = {
    "torch_profiler_record_shapes": "record_shapes",
    "torch_profiler_with_stack": "with_stack",
    "torch_profiler_with_memory": "profile_memory",
    "torch_profiler_with_flops": "with_flops",
}
# keys that change nothing here: the front end is never profiled, and a table is always made
IGNORED = ("ignore_frontend", "torch_profiler_dump_cuda_time_total", "warmup_iterations", "wait_iterations")
DEFAULT_STEPS, MAX_STEPS = 500, 100_000


class ProfilerPlan(NamedTuple):
    """What a profile is by default.  `directory`: where traces are written; None: profiles are refused.

    `torch_options`: keyword arguments of torch's profiler.  `delay`, `steps`: steps before and during a profile.
    """

    directory: str | None = None
    torch_options: dict[str, bool] = {}
    compress: bool = False
    delay: int = 0
    steps: int = DEFAULT_STEPS


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Profiles of the engine."""

    profiler_dir: Annotated[
        str | None, about("Directory for traces; it allows /start_profile. Default: profiles are refused.")
    ] = None
    profiler_config: Annotated[
        dict[str, Any] | None,
        about(
            'vLLM\'s JSON object for the same, {"profiler": "torch", "torch_profiler_dir": DIR}, with '
            "torch_profiler_record_shapes, _with_stack, _with_memory, _with_flops, _use_gzip, delay_iterations and "
            "max_iterations, the defaults of a profile."
        ),
    ] = None

    def resolved(self) -> ProfilerPlan:
        """What the options amount to.  Raises StartError."""
        options = {name: value for name, value in (self.profiler_config or {}).items() if value is not None}
        kind = options.pop("profiler", "torch")
        if kind != "torch":
            raise StartError(f"option profiler_config: profiler must be torch, got {kind!r}")
        directory = options.pop("torch_profiler_dir", self.profiler_dir)
        if directory is not None and (not isinstance(directory, str) or not directory):
            raise StartError(f"option profiler_config: torch_profiler_dir must be a directory, got {directory!r}")
        if self.profiler_dir not in (None, directory):
            raise StartError("options profiler_dir and profiler_config name different directories")
        delay, steps = _count(options, "delay_iterations", 0), _count(options, "max_iterations", 0)
        flags = {name: _flag(options, name) for name in (*TORCH_OPTIONS, "torch_profiler_use_gzip")}
        compress = flags.pop("torch_profiler_use_gzip")
        if unknown := sorted(options.keys() - set(IGNORED)):
            raise StartError(f"option profiler_config: unknown key {unknown[0]!r}")
        options = {TORCH_OPTIONS[name]: True for name, on in flags.items() if on}
        return ProfilerPlan(directory, options, compress, delay, steps or DEFAULT_STEPS)


def _count(options: dict[str, Any], name: str, default: int) -> int:
    value = options.pop(name, default)
    if type(value) is not int or not 0 <= value <= MAX_STEPS:
        raise StartError(f"option profiler_config: {name} must be an integer from 0 to {MAX_STEPS}, got {value!r}")
    return value


def _flag(options: dict[str, Any], name: str) -> bool:
    value = options.pop(name, False)
    if not isinstance(value, bool):
        raise StartError(f"option profiler_config: {name} must be true or false, got {value!r}")
    return value
