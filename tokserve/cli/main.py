"""The `tokserve` command.  Heavy modules are imported by the command that needs them, so --help is quick."""

from __future__ import annotations

import argparse
import difflib
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import tokserve
from tokserve.cli.bench import add_bench, bench
from tokserve.cli.options import add_flags
from tokserve.errors import StartError


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="tokserve",
        description="LLM inference server: tokens in, tokens out, exactly.",
        epilog="Begin with `tokserve serve demo`, which needs no download; COMMAND --help lists its options.",
    )
    root.add_argument("--version", action="version", version=f"tokserve {tokserve.__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="tokserve serve [MODEL] [OPTION ...]",
        description="Serve a model over HTTP.  `tokserve serve demo` needs no download.",
        allow_abbrev=False,
    )
    serve.add_argument(
        "model", nargs="?", default="demo", help="checkpoint directory, hub name `owner/name`, or `demo` (default)"
    )
    add_flags(serve, skip=("model",))
    serve.set_defaults(parser=serve)
    add_bench(commands)
    return root


def _refuse(command: argparse.ArgumentParser, argument: str) -> NoReturn:
    """Exit with 2 for an unknown argument of `command`, and suggest an option."""
    if not argument.startswith("-"):
        command.error(f"unexpected argument {argument!r}")
    name = argument.partition("=")[0]
    matches = re.findall(r"^ +(?:-\w+(?: [A-Z]+)?, )?(--[\w-]+)(?:, (--[\w-]+))?", command.format_help(), re.MULTILINE)
    flags = [flag for pair in matches for flag in pair if flag]
    close = difflib.get_close_matches(name.replace("_", "-"), [*flags, "--model"], 1)
    hint = f"; did you mean {close[0]}?" if close else f"; see {command.prog} --help"
    if close == ["--model"] and "--model" not in flags:
        hint = f"; the model is named without a flag: {command.prog} MODEL"
    command.error(f"unknown option {name}{hint}")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 on a bad command line, 1 when the server cannot start or its engine died."""
    root = parser()
    parsed, unknown = root.parse_known_args(argv)
    values = vars(parsed)
    chosen = values.pop("parser", root)
    if unknown:
        _refuse(chosen, next((argument for argument in unknown if argument.startswith("-")), unknown[0]))
    command = values.pop("command")
    if command is None:
        root.print_help()
        sys.exit(2)
    try:
        if command == "bench":
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # clean up on Ctrl-C
            code = bench(values)
        else:
            from tokserve.cli.serve import serve

            code = serve(values)
    except StartError as error:
        print(f"tokserve: error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)
