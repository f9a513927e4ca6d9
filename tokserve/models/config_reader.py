"""Typed reading of config.json, with errors that name the attribute."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tokserve.base.errors import NotBuiltIn, StartError

LAYERS = "num_hidden_layers"
MAX_LAYERS = 4096  # objects are made for all layers before a checkpoint can contradict their number


class ConfigReader:
    """Typed reading of a JSON object; a wrong value is a StartError that names the attribute."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def refuse(self, name: str, problem: str) -> StartError:
        """The error to raise about attribute `name`."""
        return StartError(f"config.json: {self.path}{name} {problem}")

    def unsupported(self, name: str, problem: str) -> NotBuiltIn:
        """The same about what is a sound model, but not one that is built in."""
        return NotBuiltIn(str(self.refuse(name, problem)))

    def present(self, name: str) -> bool:
        """Whether the attribute is there and not null."""
        return self.values.get(name) is not None

    def _value(self, name: str, default: Any) -> Any:
        """The attribute; `default` where it is absent or null.  Raises StartError if that is None."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.refuse(name, "is missing")
        return value

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer; null counts as absent; without a default it must be there."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.refuse(name, f"must be an integer of at least {minimum}, found {value!r}")
        if name == LAYERS and value > MAX_LAYERS:
            raise self.refuse(name, f"must be at most {MAX_LAYERS}, found {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; null counts as absent; without a default it must be there."""
        value = self._value(name, default)
        if not _is_positive(value):
            raise self.refuse(name, f"must be a positive number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean; null counts as absent."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, found {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """A string; null counts as absent."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, f"must be a string, found {value!r}")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; empty if absent."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.refuse(name, f"must be a list of strings, found {value!r}")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many positive numbers, which must be there."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self.refuse(name, f"must be a list of {count} numbers")
        if not all(map(_is_positive, value)):
            raise self.refuse(name, "must hold positive numbers only")
        return tuple(float(one) for one in value)

    def integers(self, name: str) -> list[int]:
        """A list of integers; empty if absent."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(type(entry) is int for entry in value):
            raise self.refuse(name, f"must be a list of integers, found {value!r}")
        return value

    def inner(self, name: str) -> ConfigReader:
        """An object; empty if absent."""
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.refuse(name, f"must be an object, found {value!r}")
        return ConfigReader(value, f"{self.path}{name}.")


def _is_positive(value: Any) -> bool:
    """Whether it is a positive number that a float holds: Python reads NaN, Infinity and 10**400 from JSON, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
