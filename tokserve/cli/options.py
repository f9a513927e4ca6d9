"""Command line flags from the config fields: one flag per field, with its sentence as help.

Only the form of a value is parsed here (number, JSON, size suffix); the config checks ranges, so that the command line
and the Python API refuse the same values with the same message.
"""

from __future__ import annotations

import argparse
import json
import types
from functools import cache, partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from tokserve import config as options
from tokserve.config import vllm

SHORT = {  # vLLM's short names of options
    "api_server_count": "-asc",
    "compilation_config": "-cc",
    "data_parallel_size": "-dp",
    "data_parallel_backend": "-dpb",
    "enable_expert_parallel": "-ep",
    "nnodes": "-n",
    "node_rank": "-r",
    "optimization_level": "-O",
    "quantization": "-q",
    "speculative_config": "-sc",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
}
COUNTS_OF_TOKENS = (
    "max_model_len",
    "max_num_batched_tokens",
    "max_queued_tokens",
    "max_chunk",
    "state_snapshot_interval",
)
JSON_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")  # vLLM's form of these
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9}
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


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's other options, which help does not show: what they mean is known where all options are checked."""
    for name, arity in vllm.flags():
        common: dict[str, Any] = {"dest": name, "default": None, "help": argparse.SUPPRESS}
        if arity == "flag":
            parser.add_argument(*_flags(name), action=argparse.BooleanOptionalAction, **common)
        else:
            parser.add_argument(*_flags(name), nargs="+" if arity == "values" else None, **common)


def _flags(name: str) -> list[str]:
    return [*([SHORT[name]] if name in SHORT else []), "--" + name.replace("_", "-")]


def _add(group: Any, name: str, hint: Any) -> None:
    base, text, several = _unwrap(hint)
    flags = _flags(name)
    default = _defaults()[name]
    if default not in (None, [], ""):
        text += f" Default: {str(default).lower() if isinstance(default, bool) else default}."
    common: dict[str, Any] = {"dest": name, "default": None, "help": text.replace("%", "%%")}
    if base is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(base) is Literal:
        choices = get_args(base)
        of_vllm = partial(vllm.own_value, name)
        group.add_argument(*flags, type=int if type(choices[0]) is int else of_vllm, choices=choices, **common)
    elif name in JSON_LISTS:
        group.add_argument(*flags, action=_Texts, nargs="+", metavar="TEXT", **common)
    elif base == list[str] and several:
        group.add_argument(*flags, action="extend", nargs="+", metavar="TEXT", **common)
    elif base == list[str]:
        group.add_argument(*flags, action="append", metavar="TEXT", **common)
    elif get_origin(base) in (dict, list):
        group.add_argument(*flags, type=_json, metavar="JSON", **common)
    elif base is int:
        kind: Any = _size if name.endswith(("_bytes", "_memory")) else _count if name in COUNTS_OF_TOKENS else int
        group.add_argument(*flags, type=kind, metavar="N", **common)
    else:
        group.add_argument(*flags, type=base, metavar="TEXT" if base is str else "NUMBER", **common)


class _Texts(argparse.Action):
    """Collects texts; a JSON list is all of its texts."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        texts = list(vars(namespace)[self.dest] or [])
        for value in values:
            try:
                texts += msgspec.json.decode(value, type=list[str])
            except msgspec.DecodeError:
                texts.append(value)
        setattr(namespace, self.dest, texts)


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


@cache
def _defaults() -> dict[str, Any]:
    return {name: value for _, name, value in options.option_values(options.Config())}


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


def _count(text: str) -> int | None:
    """A number of tokens, as vLLM reads it: 4k is 4000, 4K is 4096, auto and -1 are the default."""
    if text in ("auto", "-1"):
        return None
    scale = _DECIMAL.get(text[-1:]) or _SUFFIX.get(text[-1:].lower(), 1)
    try:
        return int(float(text[:-1]) * scale) if scale > 1 else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"not a number of tokens: {text!r} (examples: 4096, 4k, 4K)") from None
