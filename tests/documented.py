"""Whether a reply is one that /openapi.json documents: its status, its media type and its body."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from typing import Any

import httpx

Schema = dict[str, Any]
KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def check(document: Schema, response: httpx.Response, *, without_bodies: Container[str] = ()) -> None:
    """Raise AssertionError for a reply that the document does not have.  `without_bodies`: groups of routes whose
    replies are made by the engine, which a fake does not make."""
    request, status = response.request, response.status_code
    path = request.url.path.rstrip("/") or "/"
    operation = _operation(document, path, request.method)
    if operation is None:
        assert status >= 400 or request.method in ("HEAD", "OPTIONS"), f"{request.method} {path} is not documented"
        return
    where = f"{request.method} {path} {status}"
    assert str(status) in operation["responses"], f"{where} is not documented: {response.text[:300]}"
    content = operation["responses"][str(status)].get("content", {})
    media = response.headers.get("content-type", "").partition(";")[0]
    assert media in content or (not content and not response.content), f"{where}: {media!r} is not documented"
    if media == "application/json" and not (status == 200 and operation["tags"][0] in without_bodies):
        schema = content[media]["schema"]
        wrong = next(_wrong(document["components"]["schemas"], schema, json.loads(response.content), "$"), None)
        assert wrong is None, f"{where}: {wrong}"


def _operation(document: Schema, path: str, method: str) -> Schema | None:
    paths: Schema = document["paths"]
    patterns = (name for name in paths if "{" in name and re.fullmatch(name.replace("{id}", ".+"), path))
    known: Schema = paths.get(path) or paths.get(max(patterns, key=len, default=""), {})
    return known.get(method.lower())


def _wrong(schemas: Schema, schema: Schema, value: Any, at: str) -> Iterator[str]:
    """What of a value is not as the schema has it; properties that it does not name are wrong."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        faults = [next(_wrong(schemas, part, value, at), None) for part in schema["anyOf"]]
        if None not in faults:
            yield max((fault for fault in faults if fault), key=len)
        return
    kind = schema.get("type")
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} is not one of {schema['enum']}"
    elif kind and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{at} is no {kind}: {value!r:.80}"
    elif kind == "array":
        for index, item in enumerate(value):
            yield from _wrong(schemas, schema.get("items", {}), item, f"{at}[{index}]")
    elif kind == "object":
        named = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{at}.{name} is missing"
        for name, item in value.items():
            others = schema.get("additionalProperties", not named)
            if name in named:
                yield from _wrong(schemas, named[name], item, f"{at}.{name}")
            elif isinstance(others, dict):
                yield from _wrong(schemas, others, item, f"{at}.{name}")
            elif not others:
                yield f"{at}.{name} is not documented"
