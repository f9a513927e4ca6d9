"""A set of weights copied into the memory of another, so that captured steps, which name memory, read the new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass

from torch import Tensor

from tokserve.models.decoder import Decoder

PACKAGE = __name__.partition(".")[0]


def copy_weights(source: Decoder, target: Decoder) -> bool:
    """Copy the weights of `source` into the memory of `target`, of the same spec, and say whether that could be done:
    not if a tensor's place, shape, type or layout differs, or a number that a captured step holds; then nothing was.
    """
    old, new = dict(_held(target)), dict(_held(source))
    if old.keys() != new.keys() or any(_form(old[path]) != _form(new[path]) for path in old):
        return False
    for path, other in tensors_of(source):
        one = old[path]
        if isinstance(one, Tensor) and one.data_ptr() != other.data_ptr():  # tables are common to both
            one.copy_(other)
    target.provenance = source.provenance
    return True


def tensors_of(model: object) -> Iterator[tuple[str, Tensor]]:
    """Path (".blocks.0.mlp") and tensor of all that a model's or a layer's objects hold, each tensor once."""
    return ((path, value) for path, value in _held(model) if isinstance(value, Tensor))


def _held(value: object, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor | float]]:
    """The paths of tensors and floats, which launches may hold as they are."""
    seen = set() if seen is None else seen
    if isinstance(value, float):
        yield path, value
    if isinstance(value, str | bytes | int | float | None) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    parts: Iterator[tuple[object, object]]
    if isinstance(value, Mapping):
        parts = iter(value.items())
    elif isinstance(value, Sequence):
        parts = iter(enumerate(value))
    elif is_dataclass(value) or type(value).__module__.partition(".")[0] == PACKAGE:
        names = [name for base in type(value).__mro__ for name in vars(base).get("__slots__", ())]
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        parts = iter((held | (vars(value) if hasattr(value, "__dict__") else {})).items())
    else:
        return
    for name, part in parts:
        yield from _held(part, f"{path}.{name}", seen)


def _form(value: Tensor | float) -> object:
    return value if isinstance(value, float) else (value.shape, value.dtype, value.device, value.stride())
