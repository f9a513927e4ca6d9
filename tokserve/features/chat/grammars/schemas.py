"""JSON schemas of calls and of their arguments, as grammars need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import UNSET

Functions = Mapping[str, dict[str, Any]]  # the JSON schemas of the arguments, by name
OPEN_ENDED = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
DEFINITIONS = ("$defs", "definitions")


class NotExpressible(ValueError):
    """The tools cannot be expressed as a grammar."""


class Schema(msgspec.Struct):
    """The keywords of a JSON schema that decide how an element is written."""

    type: str | list[str] = "string"
    properties: dict[str, Any] = {}
    required: list[str] = []
    items: Any = True
    additional: Any = msgspec.field(name="additionalProperties", default=False)
    enum: list[Any] | None = None
    const: Any = UNSET
    any_of: list[Any] = msgspec.field(name="anyOf", default=[])
    one_of: list[Any] = msgspec.field(name="oneOf", default=[])
    ref: str | None = msgspec.field(name="$ref", default=None)
    min_properties: int = msgspec.field(name="minProperties", default=0)
    max_properties: int | None = msgspec.field(name="maxProperties", default=None)

    def kinds(self) -> list[str]:
        """The types that it names."""
        return self.type if isinstance(self.type, list) else [self.type]

    def values(self) -> list[Any] | None:
        """The values that it names; None: it names none."""
        return self.enum if self.const is UNSET else [self.const]


def parse_schema(schema: Any, name: str) -> Schema:
    """A schema of the function `name`.  Raises NotExpressible."""
    try:
        parsed = msgspec.convert(schema, Schema)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise NotExpressible(f"the parameters of {name!r} are not a JSON schema: {error}") from None
    values = parsed.values()
    if values is not None and "type" in schema:
        parsed.enum, parsed.const = [value for value in values if _is_of(value, parsed.kinds())], UNSET
        if values and not parsed.enum:
            raise NotExpressible(f"the parameters of {name!r} have constants of another type than their own")
    return parsed


def _is_of(value: Any, kinds: list[str]) -> bool:
    """Whether a constant is of one of these types of JSON Schema."""
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value % 1 == 0)
    return {type(None): "null", str: "string", list: "array", dict: "object"}[type(value)] in kinds


def named_properties(schema: dict[str, Any], name: str) -> Schema:
    """The schema of the arguments of `name`, which must be defined by their names.  Raises NotExpressible."""
    parsed = parse_schema(schema, name)
    if more := OPEN_ENDED & schema.keys() - {"additionalProperties"}:
        raise NotExpressible(f"the parameters of {name!r} are defined by {min(more)} and not by their names")
    return parsed


def resolve_ref(ref: str, root: dict[str, Any], name: str) -> Any:
    """What `ref` refers to in `root`.  Raises NotExpressible for anything but a definition."""
    path = ref.split("/")
    if len(path) == 3 and path[0] == "#" and path[1] in DEFINITIONS:
        definitions = root.get(path[1])
        if isinstance(definitions, dict) and path[2] in definitions:
            return definitions[path[2]]
    raise NotExpressible(f"the parameters of {name!r} refer to {ref}")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has only the properties of `schema`, unless that says otherwise."""
    no_others = {} if OPEN_ENDED & schema.keys() else {"additionalProperties": False}
    return schema | no_others | {"type": "object"}


def list_of(functions: Functions, keys: tuple[str, str], max_calls: int | None) -> dict[str, Any]:
    """The schema of a list of calls with their names and arguments under `keys`."""
    call = any_of(functions, keys)
    limit = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}


def any_of(functions: Functions, keys: tuple[str, str]) -> dict[str, Any]:
    """The schema of one call with its name and arguments under `keys`."""
    pointers = {name: f"#/$defs/{quote(name.replace('~', '~0').replace('/', '~1'))}" for name in functions}
    calls = [
        {
            "type": "object",
            "properties": {keys[0]: {"const": name}, keys[1]: {"$ref": pointer}},
            "required": list(keys),
            "additionalProperties": False,
        }
        for name, pointer in pointers.items()
    ]
    definitions = {name: _rebase_refs(closed(functions[name]), pointer) for name, pointer in pointers.items()}
    return {"anyOf": calls, "$defs": definitions}


def _rebase_refs(schema: Any, pointer: str) -> Any:
    """A schema moved to `pointer` of another schema: its references are rebased."""
    if isinstance(schema, list):
        return [_rebase_refs(value, pointer) for value in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _rebase_refs(value, pointer) for name, value in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = pointer + target[1:]
    return moved
