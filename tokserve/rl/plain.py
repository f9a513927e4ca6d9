"""Arguments as plain Python: what goes into a body is converted here, numpy's and torch's scalars and arrays too.

Without torch: a tensor is recognized if torch has been imported by the caller.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

PLAIN_KINDS = "biufU"  # of numpy's types: bool, integers, floats, text
SCALARS = (bool, int, float, str, bytes)


def plain(value: Any, field: str = "") -> Any:
    """`value` with nothing in it but None, bool, int, float, str, bytes, lists and dictionaries.

    `field`: where it is in the call.  Raises TypeError, which names the field, for what has no such form.
    """
    if value is None or type(value) in SCALARS:
        return value
    if isinstance(value, np.ndarray | np.generic):
        listed = value.tolist()
        return listed if value.dtype.kind in PLAIN_KINDS else plain(listed, field)
    if isinstance(value, Mapping):
        return {_key(key, field): plain(entry, _joined(field, key)) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(entry, f"{field}[{index}]") for index, entry in enumerate(value)]
    if _is_tensor(value):
        return plain(value.tolist(), field)
    if isinstance(value, int | float | str):  # a subclass, as of an enumeration
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "__array__"):  # of other libraries
        return plain(np.asarray(value), field)
    raise TypeError(f"{field or 'the body'}: a value of type {_named(type(value))} cannot be sent")


def integers(values: Any, field: str) -> list[int]:
    """A sequence of integers.  Raises TypeError, which names the field."""
    listed = plain(values, field)
    if not isinstance(listed, list):
        raise TypeError(f"{field} must be a sequence of integers, not {_named(type(values))}")
    for index, value in enumerate(listed):
        if type(value) is not int:
            raise TypeError(f"{field}[{index}] must be an integer, got {value!r}")
    return listed


def array(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """An array of what may be a tensor, on any device."""
    try:
        return np.asarray(values)
    except TypeError:  # numpy reads no tensors of a GPU
        return np.asarray(plain(values))


def _key(key: Any, field: str) -> Any:
    named = plain(key, field)
    if not isinstance(named, str | int):
        raise TypeError(f"{field or 'the body'}: a name of type {_named(type(key))} cannot be sent")
    return named


def _joined(field: str, key: Any) -> str:
    return f"{field}.{key}" if field else str(key)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _named(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
