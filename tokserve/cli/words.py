"""The words of a command line in other spellings: underscores, `--option.key value` for JSON, and files of options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokserve.base.errors import StartError

SHOWN = 5  # names that an error lists at most


def dashed(words: Sequence[str]) -> list[str]:
    """The words with dashes in the names of options, and `--option.key value` as `--option {"key": value}`."""
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        option, *keys = name.split(".")
        if not word.startswith("--"):
            result.append(word)
        elif keys and all(keys):
            inner = objects.setdefault(option.replace("_", "-"), {})
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = _json_or_text(value if equals else next(rest, ""))
        else:
            result.append(name.replace("_", "-") + equals + value)
    return [*result, *(part for option, held in objects.items() for part in (option, json.dumps(held)))]


def completed(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words with the names of options in full, where they are the beginning of one name alone.  Raises StartError
    for the beginning of several."""
    names = [name for name in parser._option_string_actions if name.startswith("--")]
    result = []
    for word in words:
        name, equals, value = word.partition("=")
        if len(name) > 2 and name.startswith("--") and name not in names:
            matches = [one for one in names if one.startswith(name)]
            if len({id(parser._option_string_actions[one]) for one in matches}) > 1:
                raise StartError(f"option {name} could be {', '.join(matches[:SHOWN])}")
            word = matches[0] + equals + value if matches else word
        result.append(word)
    return result


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_options(path: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], str | None]:
    """The options of a YAML file as words, without those that `words` have, and the model that it names.  Raises
    StartError."""
    values = _read(path)
    model = values.pop("model", None)
    known = parser._option_string_actions
    chosen = {id(known.get(word.partition("=")[0])) for word in words if word.startswith("-")}
    result: list[str] = []
    for key, value in values.items():
        flag = "--" + key.replace("_", "-")
        action = known.get(flag)
        if action is None:
            raise StartError(f"{path}: unknown option {key!r}")
        if value is not None and id(action) not in chosen:
            result += _words(flag, action, value)
    return result, None if model is None else str(model)


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise StartError(f"--config: {path!r} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartError(f"--config: {path!r} is not YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise StartError(f"--config: {path!r} must map names of options to values")
    return values


def _words(flag: str, action: argparse.Action, value: Any) -> list[str]:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise StartError(f"--config: {flag[2:]} must be true or false, got {value!r}")
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, list) and (action.nargs == "+" or isinstance(action, argparse._AppendAction)):
        return [f"{flag}={_text(one)}" for one in value]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
