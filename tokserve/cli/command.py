"""A command of `tokserve` that a room adds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

SEVERAL = ("served_model_name", "api_key")  # options that take all values that follow


@dataclass(frozen=True, slots=True)
class Command:
    """`add`: a function of the subparsers of `tokserve` that adds the command; its parsers set the default "parser" to
    themselves.  `run`: a function of the parser that has read the words, and of the values by name, which returns the
    exit code and raises StartError.  The module that holds them imports neither torch nor Triton."""

    name: str
    add: Callable[[Any], None]
    run: Callable[[argparse.ArgumentParser, dict[str, Any]], int]


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model, by position or by name, and a file of options."""
    parser.add_argument(
        "model", nargs="?", default=None, help="checkpoint directory, GGUF file, hub name `owner/name`, or `demo`"
    )
    parser.add_argument("--model", dest="same_model", metavar="MODEL", help="The same as MODEL.")
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="YAML file of options by name; those of the command line win."
    )


def take_model(command: argparse.ArgumentParser, values: dict[str, Any]) -> str:
    """Take the model out of the values of a command with `add_model`; exits with 2 if none or two are named, or if it
    seems to have been taken for another option's."""
    named, flagged = values.pop("model"), values.pop("same_model")
    if named and flagged and named != flagged:
        command.error(f"two models are named: {named!r} and {flagged!r}")
    for option in () if named or flagged else SEVERAL:
        last = (values[option] or [""])[-1]
        if last == "demo" or os.path.isdir(last):
            flag = "--" + option.replace("_", "-")
            command.error(f"{last!r} is a value of {flag} here, and no model is named; name the model before {flag}")
    return named or flagged or no_model(command)


def no_model(command: argparse.ArgumentParser) -> NoReturn:
    """Exit with 2: an unset variable in a script must not be a server of another model."""
    command.error("no model is named: a checkpoint directory, a hub name, or `demo`, which needs no download")
