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
MOST_TAGS = 4  # properties whose constants are tried as tags
WORK = 20_000  # comparisons of two schemas, 10 microseconds each, in the front end's event loop

Schemas = Mapping[str, Any]  # by their JSON pointers


def by_pointer(root: Schema) -> dict[str, Any]:
    """All schemas in a schema by their pointers."""
    return dict(walk(root))


def target_of(schema: Any, schemas: Schemas) -> Any:
    """The schema that a reference names, or None: it is unknown."""
    ref = schema.get("$ref")
    return schemas.get(unquote(ref[1:])) if isinstance(ref, str) and ref.startswith("#") else None


class Exclusions:
    """Proofs that no value matches two of several schemas.

    A schema may name others twice, and itself: what was found is kept, and all proofs together may take `WORK`
    comparisons.  Beyond that, and deeper than `STEPS`, nothing is proved.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._work = WORK
        self._kinds: dict[int, frozenset[str]] = {}  # by the identity of a schema
        self._known: dict[tuple[int, int], bool] = {}

    def hold(self, branches: Sequence[Any]) -> bool:
        """Whether no value matches two of these schemas, for certain."""
        pending = [list(branches)]
        while pending:
            group = pending.pop()
            parts = self._parts(group)
            if len(parts) > 1:
                pending += parts
            elif not all(self._disjoint(first, second, STEPS) for first, second in combinations(group, 2)):
                return False
        return True

    def _parts(self, branches: list[Any]) -> list[list[Any]]:
        """Shorter lists of these schemas, so that any two with a value in common are in one of them; or all in one.
        Types, constants and tags tell that without comparing pairs."""
        self._work -= len(branches) // 8  # about as long as so many comparisons
        if len(branches) < 3 or self._work < 0:
            return [branches]
        targets = [self._followed(branch) for branch in branches]
        kinds = [self._types(target, STEPS) for target in targets]
        ways: list[Sequence[frozenset[str] | None]] = [kinds, [_values(target) for target in targets]]
        if all(kind == {"object"} for kind in kinds):
            tags = self._constant_tags(targets)
            ways += [[tags[name].get(index) for index in range(len(targets))] for name in list(tags)[:MOST_TAGS]]
        return max((_split(branches, keys) for keys in ways), key=len)

    def _constant_tags(self, objects: Sequence[Any]) -> dict[str, dict[int, frozenset[str]]]:
        """The constants of properties that objects must have, by name and the object's place, the commonest first."""
        constants: dict[str, dict[int, frozenset[str]]] = {}
        for index, schema in enumerate(objects):
            for name, tag in _tags(schema).items():
                values = _values(self._followed(tag))
                if values is not None:
                    constants.setdefault(name, {})[index] = values
        return dict(sorted(constants.items(), key=lambda named: -len(named[1])))

    def _followed(self, schema: Any) -> Any:
        """What a schema refers to."""
        for _ in range(STEPS):
            target = target_of(schema, self._schemas) if isinstance(schema, dict) else None
            if target is None:
                break
            schema = target
        return schema

    def _disjoint(self, first: Any, second: Any, steps: int) -> bool:
        """Whether no value matches both."""
        if first is False or second is False:
            return True
        if not isinstance(first, dict) or not isinstance(second, dict) or not steps:
            return False
        pair = (id(first), id(second))
        if pair in self._known:
            return self._known[pair]
        self._work -= 1
        if self._work < 0:
            return False
        self._known[pair] = False  # where a proof needs itself
        self._known[pair] = self._compared(first, second, steps)
        return self._known[pair]

    def _compared(self, first: Schema, second: Schema, steps: int) -> bool:
        if not self._types(first, steps) & self._types(second, steps):
            return True
        for one, other in ((first, second), (second, first)):
            for branches in _branches(one, self._schemas):
                if all(self._disjoint(branch, other, steps - 1) for branch in branches):
                    return True
        values = _values(first), _values(second)
        if values[0] is not None and values[1] is not None:
            return not values[0] & values[1]
        return self._differ_in_a_property(first, second, steps)

    def _types(self, schema: Any, steps: int) -> frozenset[str]:
        """The types that values may have, integers and other numbers apart."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or not steps:
            return TYPES
        if id(schema) in self._kinds:
            return self._kinds[id(schema)]
        self._kinds[id(schema)] = TYPES  # where it contains itself
        kinds = schema.get("type", list(TYPES))
        types = frozenset(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        if "number" in types:
            types |= {"integer"}
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
        )
        if values is not None:
            types &= {kind for value in values for kind in _types_of(value)}
        for branches in _branches(schema, self._schemas):
            types &= frozenset[str]().union(*(self._types(branch, steps - 1) for branch in branches))
        self._kinds[id(schema)] = types
        return types

    def _differ_in_a_property(self, first: Schema, second: Schema, steps: int) -> bool:
        """Whether both are objects, and one that both demand cannot match both: a discriminator."""
        if any(self._types(schema, steps) != {"object"} for schema in (first, second)):
            return False
        one, other = _tags(first), _tags(second)
        return any(self._disjoint(one[name], other[name], steps - 1) for name in one.keys() & other.keys())


def _tags(schema: Schema) -> dict[str, Any]:
    """The properties that an object must have, with their schemas."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: properties[name] for name in _names(schema.get("required")) if name in properties}


def _split(items: list[Any], keys: Sequence[frozenset[str] | None]) -> list[list[Any]]:
    """The items in lists, so that any two with a key in common are in one.  One without known keys is in all of them;
    where that would double the items, there is one list."""
    first: dict[str, int] = {}  # the place of the first item with a key
    parents = list(range(len(items)))

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = place = parents[parents[place]]
        return place

    for place, known in enumerate(keys):
        for key in known or ():
            parents[root(place)] = root(first.setdefault(key, place))
    everywhere = [item for item, known in zip(items, keys, strict=True) if known is None]
    parts: dict[int, list[Any]] = {}
    for place, known in enumerate(keys):
        if known is not None:
            parts.setdefault(root(place), []).append(items[place])
    if len(parts) * len(everywhere) > len(items) or len(parts) < 2:
        return [items]
    return [part + everywhere for part in parts.values()]


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


def _types_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int | float):
        return ("integer", "number")
    kinds = {type(None): "null", str: "string", list: "array", dict: "object"}
    return (kinds[type(value)],)


def _values(schema: Any) -> frozenset[str] | None:
    """The only values that match, as text; None: there may be any."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return frozenset({_written(schema["const"])})
    return frozenset(map(_written, schema["enum"])) if isinstance(schema.get("enum"), list) else None


def _written(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def has_no_finite_value(schemas: Schemas) -> bool:
    """Whether every value of the root contains another of its like, without an end."""
    finite: set[str] = set()
    waiting: dict[str, list[str]] = {}  # schemas, by the one that was not known to be finite
    pending = list(schemas)  # inner ones are at the end, and taken first
    while pending:
        pointer = pending.pop()
        if pointer not in finite and _ends(pointer, schemas, finite, waiting):
            finite.add(pointer)
            pending += waiting.pop(pointer, ())
    return "" not in finite


def _ends(pointer: str, schemas: Schemas, finite: set[str], waiting: dict[str, list[str]]) -> bool:
    """Whether some value of this schema is finite, if those of the schemas in `finite` are; notes what it waits for."""
    schema = schemas[pointer]

    def ends(inner: str) -> bool:
        known = inner in finite or inner not in schemas
        if not known:
            waiting.setdefault(inner, []).append(pointer)
        return known

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
