"""Command line flags from the config fields: one flag per field, with its sentence as help.

Only the form of a value is parsed here (number, JSON, size suffix); the config checks ranges, so that the command line
and the Python API refuse the same values with the same message.
"""

from __future__ import annotations

import argparse
import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from tokserve import config as options

SHORT = {  # vLLM's short names of options
    "data_parallel_size": "-dp",
    "data_parallel_backend": "-dpb",
    "speculative_config": "-sc",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
}
_SUFFIX = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Add a flag for every config field to `parser`, grouped as the config is."""
    groups: dict[str, Any] = {}
    for group, name, hint in options.fields():
        if name in skip:
            continue
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        _add(groups[group], name, hint)


def _add(group: Any, name: str, hint: Any) -> None:
    base, text, several = _unwrap(hint)
    flags = [*([SHORT[name]] if name in SHORT else []), "--" + name.replace("_", "-")]
    default = _default(name)
    if default not in (None, [], ""):
        text += f" Default: {_shown(default)}."
    common: dict[str, Any] = {"dest": name, "default": None, "help": text.replace("%", "%%")}
    if base is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(base) is Literal:
        choices = get_args(base)
        group.add_argument(*flags, type=type(choices[0]), choices=choices, **common)
    elif base == list[str] and several:
        group.add_argument(*flags, action="extend", nargs="+", metavar="TEXT", **common)
    elif base == list[str]:
        group.add_argument(*flags, action="append", metavar="TEXT", **common)
    elif get_origin(base) in (dict, list):
        group.add_argument(*flags, type=_json, metavar="JSON", **common)
    elif base is int:
        group.add_argument(*flags, type=_size if name.endswith("_bytes") else int, metavar="N", **common)
    else:
        group.add_argument(*flags, type=base, metavar=base.__name__.upper(), **common)


def _unwrap(hint: Any) -> tuple[Any, str, bool]:
    """An annotated field's plain type (without None and ranges), its sentence, and whether one flag takes several
    values."""
    text, several = "", False
    while True:
        if get_origin(hint) is Annotated:
            hint, *metas = get_args(hint)
            several = several or any(isinstance(m, msgspec.Meta) and bool(m.extra) for m in metas)
            text = next((m.description for m in metas if isinstance(m, msgspec.Meta) and m.description), text)
        elif get_origin(hint) in (Union, types.UnionType):
            hint = next(arm for arm in get_args(hint) if arm is not type(None))
        else:
            return hint, text, several


def _default(name: str) -> Any:
    config = options.Config()
    return next(getattr(getattr(config, group), field) for group, field, _ in options.fields() if field == name)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


def _size(text: str) -> int:
    number, suffix = text, text[-1:].lower()
    scale = 1
    if suffix in _SUFFIX:
        number, scale = text[:-1], _SUFFIX[suffix]
    try:
        return int(float(number) * scale) if scale > 1 else int(number)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (examples: 512M, 4G)") from None
