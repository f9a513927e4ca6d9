"""The parts of request bodies that `params` declares: their fields, their ranges for OpenAPI, and the way back.

In a body null stands for every default, so all fields made here take it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Meta
from pydantic import BaseModel, create_model

from tokserve.protocol.params import Field, RequestOptions, SamplingParams, declared

# a body names the adapter by `model`; what is in kv_transfer_params is checked by itself; rooms set the session
NOT_IN_BODIES = ("adapter", "kv_transfer_params", "session")
OPTIONS = tuple(field for field in declared(RequestOptions) if field.name not in NOT_IN_BODIES)
_JSON_SCHEMA = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "min_length": "min{}",
    "max_length": "max{}",
}


def struct(name: str, fields: Iterable[Field]) -> Any:
    """A struct to inherit from, with these fields."""
    return msgspec.defstruct(name, [(f.name, f.type | None, f.default) for f in fields], kw_only=True)


def model(name: str, base: type[BaseModel], fields: Iterable[Field]) -> Any:
    """A pydantic model to inherit from, with these fields, None by default."""
    annotations: dict[str, Any] = {f.name: (f.type | None, None) for f in fields}
    return create_model(name, __base__=base, **annotations)


def options(body: Any, adapter: str) -> RequestOptions:
    """The options in a body.  Raises `RequestError` for one that is out of its range."""
    values = {f.name: value for f in OPTIONS if (value := getattr(body, f.name, None)) is not None}
    options = RequestOptions(**values, adapter=adapter)
    options.validate()
    return options


def limits(*types: Any) -> dict[str, dict[str, Any]]:
    """The ranges of the parameters and options of these types by name, in the words of JSON schema."""
    fields = (*declared(SamplingParams), *OPTIONS)
    return {f.name: _limits(f.type, f.range) for f in fields if f.range is not None and f.type in types}


def _limits(kind: Any, allowed: Meta) -> dict[str, Any]:
    unit = "Length" if kind is str else "Items"
    values = {word.format(unit): getattr(allowed, name) for name, word in _JSON_SCHEMA.items()}
    return {word: value for word, value in values.items() if value is not None}
