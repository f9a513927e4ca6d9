"""`EngineArgs` and `AsyncEngineArgs`: the options of an engine as an object, for scripts that build one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from tokserve.base.errors import StartError


class EngineArgs(SimpleNamespace):
    """Options by name, as `LLM` takes them; they are checked when an engine is made of them."""

    def __init__(self, model: str = "demo", **options: Any) -> None:
        super().__init__(model=model, **options)


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM.from_engine_args`."""


def options_of(engine_args: Any) -> dict[str, Any]:
    """The options in an `EngineArgs`, a mapping or a dataclass.  Raises StartError for anything else."""
    if isinstance(engine_args, Mapping):
        return dict(engine_args)
    if isinstance(engine_args, SimpleNamespace):
        return dict(vars(engine_args))
    if is_dataclass(engine_args) and not isinstance(engine_args, type):
        return {field.name: getattr(engine_args, field.name) for field in fields(engine_args)}
    raise StartError(f"engine_args must be EngineArgs or a mapping of options, got {type(engine_args).__name__}")
