"""What follows from a JSON schema: which branches exclude one another, and whether any finite value matches.

Both are proofs: where a schema is not understood, branches may overlap and values may exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from tokserve.protocol.jsonschema import Schema, walk

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
STEPS = 32  # references, and branches within branches, that a proof goes through

Schemas = Mapping[str, Any]  # by their JSON pointers


def by_pointer(root: Schema) -> dict[str, Any]:
    """All schemas in a schema by their pointers."""
    return dict(walk(root))


def target_of(schema: Any, schemas: Schemas) -> Any:
    """The schema that a reference names, or None: it is unknown."""
    ref = schema.get("$ref")
    return schemas.get(unquote(ref[1:])) if isinstance(ref, str) and ref.startswith("#") else None


def exclude_one_another(branches: Sequence[Any], schemas: Schemas) -> bool:
    """Whether no value matches two of the branches, for certain."""
    return all(_disjoint(first, second, schemas, STEPS) for first, second in combinations(branches, 2))


def _disjoint(first: Any, second: Any, schemas: Schemas, steps: int) -> bool:
    """Whether no value matches both."""
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict) or not steps:
        return False
    if not _types(first, schemas, steps) & _types(second, schemas, steps):
        return True
    for one, other in ((first, second), (second, first)):
        for branches in _branches(one, schemas):
            if all(_disjoint(branch, other, schemas, steps - 1) for branch in branches):
                return True
    values = _values(first), _values(second)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    return _differ_in_a_property(first, second, schemas, steps)


def _branches(schema: Schema, schemas: Schemas) -> Iterator[list[Any]]:
    """Lists of schemas, in each of which a value of this schema matches one."""
    target = target_of(schema, schemas)
    if target is not None:
        yield [target]
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            yield schema[name]
    if isinstance(schema.get("allOf"), list):
        yield from ([part] for part in schema["allOf"])


def _types(schema: Any, schemas: Schemas, steps: int) -> frozenset[str]:
    """The types that values may have, integers and other numbers apart."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict) or not steps:
        return TYPES
    kinds = schema.get("type", list(TYPES))
    types = frozenset(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
    if "number" in types:
        types |= {"integer"}
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    if values is not None:
        types &= {kind for value in values for kind in _types_of(value)}
    for branches in _branches(schema, schemas):
        types &= frozenset[str]().union(*(_types(branch, schemas, steps - 1) for branch in branches))
    return types


def _types_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int | float):
        return ("integer", "number")
    kinds = {type(None): "null", str: "string", list: "array", dict: "object"}
    return (kinds[type(value)],)


def _values(schema: Schema) -> frozenset[str] | None:
    """The only values that match, as text; None: there may be any."""
    if "const" in schema:
        return frozenset({_written(schema["const"])})
    return frozenset(map(_written, schema["enum"])) if isinstance(schema.get("enum"), list) else None


def _written(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _differ_in_a_property(first: Schema, second: Schema, schemas: Schemas, steps: int) -> bool:
    """Whether both are objects, and one that both demand cannot match both: a discriminator."""
    if any(_types(schema, schemas, steps) != {"object"} for schema in (first, second)):
        return False
    one, other = first.get("properties"), second.get("properties")
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    shared = {*_names(first.get("required"))} & {*_names(second.get("required"))} & one.keys() & other.keys()
    return any(_disjoint(one[name], other[name], schemas, steps - 1) for name in shared)


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def has_no_finite_value(schemas: Schemas) -> bool:
    """Whether every value of the root contains another of its like, without an end."""
    finite: set[str] = set()
    order = list(schemas)[::-1]  # inner ones first
    while True:
        new = {pointer for pointer in order if pointer not in finite and _ends(pointer, schemas, finite)}
        if "" in new:
            return False
        if not new:
            return True
        finite |= new


def _ends(pointer: str, schemas: Schemas, finite: set[str]) -> bool:
    """Whether some value of this schema is finite, if those of the schemas in `finite` are."""
    schema = schemas[pointer]

    def ends(inner: str) -> bool:
        return inner in finite or inner not in schemas

    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#") and not ends(unquote(ref[1:])):
        return False
    for name, needed in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        branches = schema.get(name) if isinstance(schema.get(name), list) else None
        if branches and not needed(ends(f"{pointer}/{name}/{index}") for index in range(len(branches))):
            return False
    if "const" in schema or "enum" in schema:
        return True
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        names = (name.replace("~", "~0").replace("/", "~1") for name in _names(schema.get("required")))
        return all(ends(f"{pointer}/properties/{name}") for name in names)
    if schema.get("type") == "array" and isinstance(schema.get("minItems"), int) and schema["minItems"] > 0:
        first = schema.get("prefixItems")
        count = len(first) if isinstance(first, list) else 0
        places = [f"{pointer}/prefixItems/{index}" for index in range(min(count, schema["minItems"]))]
        return all(map(ends, places + ([f"{pointer}/items"] if schema["minItems"] > count else [])))
    return True
