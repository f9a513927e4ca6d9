"""The shape of a JSON document: which paths it has, with which types.  What a client reads must still be there."""

from __future__ import annotations

import json
import re
from typing import Any

KINDS = {type(None): "null", bool: "bool", int: "number", float: "number", str: "str", dict: "object", list: "list"}
TYPED = ('data: {"type":"response.', 'data: {"type":"message_', 'data: {"type":"error"')  # the last events of others
_ID = re.compile(r"(token_id:)?\d+$")


def shape(value: Any) -> dict[str, str]:
    """Path -> type, as `choices[].index` -> `number`; of a path with several types, all but null: `number|str`.

    Keys that are token ids are one path, and so are the tokens of completions' `top_logprobs`.
    """
    results: dict[str, set[str]] = {}
    _collect(value, "", results)
    return {path: "|".join(sorted(kinds - {"null"})) or "null" for path, kinds in sorted(results.items())}


def _collect(value: Any, path: str, actual: dict[str, set[str]]) -> None:
    actual.setdefault(path, set()).add(KINDS[type(value)])
    if isinstance(value, list):
        for entry in value:
            _collect(entry, f"{path}[]", actual)
    elif isinstance(value, dict):
        by_token = path.endswith("logprobs.top_logprobs[]") and all(isinstance(v, float) for v in value.values())
        for key, entry in value.items():
            name = "#" if by_token or _ID.match(key) else key
            _collect(entry, f"{path}.{name}".lstrip("."), actual)


def reply_shape(kind: str, text: str) -> dict[str, str]:
    """The shape of an answer: of JSON, or of a stream's events together."""
    if kind.startswith("text/event-stream"):
        lines = [line for line in text.splitlines() if line.startswith("data: ")]
        assert lines, text[-200:]
        if not lines[-1].startswith(TYPED):
            assert lines.pop() == "data: [DONE]", text[-200:]
        return shape([json.loads(line.removeprefix("data: ")) for line in lines])
    return shape(json.loads(text))


def lacking(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What `old` has and `new` has not, or has with other types.  Null stands for any type."""
    return [
        f"{path}: {kinds}"
        for path, kinds in old.items()
        if path not in new
        or not (kinds == "null" or new[path] == "null" or set(kinds.split("|")) & set(new[path].split("|")))
    ]
