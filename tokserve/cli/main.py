"""The `tokserve` command.  Heavy modules are imported by the command that needs them, so --help is quick."""

from __future__ import annotations

import argparse
import difflib
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import tokserve
from tokserve.base.errors import StartError
from tokserve.base.rooms import contributions
from tokserve.cli.command import Command, add_model, take_model
from tokserve.cli.help import add_help
from tokserve.cli.options import add_flags, add_foreign_flags
from tokserve.cli.words import completed, dashed, read_options

SIMILAR = 0.7  # of names without their dashes: below that a suggestion is a guess


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="tokserve",
        description="LLM inference server: tokens in, tokens out, exactly.",
        epilog="Begin with `tokserve serve demo`, which needs no download; COMMAND --help lists its options.",
    )
    root.add_argument("-V", "--version", action="version", version=f"tokserve {tokserve.__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="tokserve serve MODEL [OPTION ...]",
        description="Serve a model over HTTP.  `tokserve serve demo` needs no download.",
        allow_abbrev=False,
        add_help=False,
    )
    add_help(serve)
    add_model(serve)
    add_flags(serve, skip=("model",))
    add_foreign_flags(serve)
    serve.set_defaults(parser=serve)
    for command in _added().values():
        command.add(commands)
    return root


def _added() -> dict[str, Command]:
    """The commands that rooms add, by name."""
    return {command.name: command for _, several in contributions("command_line") for command in several}


def _refuse(command: argparse.ArgumentParser, argument: str) -> NoReturn:
    """Exit with 2 for an unknown argument of `command`, and suggest an option."""
    if not argument.startswith("-"):
        command.error(f"unexpected argument {argument!r}")
    name = argument.partition("=")[0]
    shown = [action for action in command._actions if action.help != argparse.SUPPRESS]
    flags = [flag[2:] for action in shown for flag in action.option_strings if flag.startswith("--")]
    close = difflib.get_close_matches(name.replace("_", "-").lstrip("-"), flags, 1, SIMILAR)
    hint = f"; did you mean --{close[0]}?" if close else f"; see {command.prog} --help"
    command.error(f"unknown option {name}{hint}")


def _parsed(root: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """The values of these words; exits with 2 if one of them is unknown."""
    parsed, unknown = root.parse_known_args(words)
    values = vars(parsed)
    if unknown:
        _refuse(
            values.get("parser", root), next((argument for argument in unknown if argument.startswith("-")), unknown[0])
        )
    return values


def _in_full(root: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """The words with whole names of options; exits with 2 for the beginning of several."""
    command: argparse.ArgumentParser | None = vars(root.parse_known_args(words)[0]).get("parser")
    if command is None:
        return words
    try:
        return completed(words, command)
    except StartError as error:
        command.error(str(error))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 on a bad command line, 1 when the server cannot start or its engine died."""
    root = parser()
    words = dashed(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    elif words == ["version"]:
        words = ["--version"]
    words = _in_full(root, words)
    values = _parsed(root, words)
    if values.get("config") is not None:
        try:
            file_words, model = read_options(values["config"], values["parser"], words)
        except StartError as error:
            values["parser"].error(str(error))
        values = _parsed(root, [words[0], *file_words, *words[1:]])
        values["model"] = values["model"] or values["same_model"] or model
    chosen = values.pop("parser", root)
    command = values.pop("command")
    if command is None:
        chosen.print_help()
        sys.exit(2)
    try:
        if command == "serve":
            from tokserve.cli.serve import serve

            values.pop("config")
            model = take_model(chosen, values)
            code = serve(values | {"model": model})
        else:
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # clean up on Ctrl-C
            code = _added()[command].run(chosen, values)
    except StartError as error:
        print(f"tokserve: error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)
