"""The `tokserve` command.  Heavy modules are imported by the command that needs them, so --help is quick."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import tokserve
from tokserve.cli.bench import add_bench, bench
from tokserve.cli.options import add_flags
from tokserve.errors import StartError


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(prog="tokserve", description="LLM inference server: tokens in, tokens out, exactly.")
    root.add_argument("--version", action="version", version=f"tokserve {tokserve.__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP.  `tokserve serve demo` needs no download.",
    )
    serve.add_argument(
        "model", nargs="?", default="demo", help="checkpoint directory, hub name `owner/name`, or `demo` (default)"
    )
    add_flags(serve, skip=("model",))
    add_bench(commands)
    return root


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 on a bad command line, 1 when the server cannot start or its engine died."""
    root = parser()
    values = vars(root.parse_args(argv))
    command = values.pop("command")
    if command is None:
        root.print_help()
        sys.exit(2)
    try:
        if command == "bench":
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # so that it cleans up
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
