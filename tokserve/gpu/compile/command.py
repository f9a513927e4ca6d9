"""`tokserve compile MODEL --arch sm_90`: the command and its report.  Triton and torch are imported when it runs."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from tokserve.base import log
from tokserve.base.errors import StartError
from tokserve.base.rooms import part
from tokserve.cli.command import Command, add_model, take_model
from tokserve.cli.options import add_flags, add_foreign_flags
from tokserve.config import WITHOUT_EFFECT, Config
from tokserve.config.resolve import resolve
from tokserve.config.vllm import own_options

logger = logging.getLogger("tokserve.compile")

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DESCRIPTION = (
    "Compile the GPU kernels that `tokserve serve` launches with the same options, on a machine that needs no GPU. "
    "They are kept in Triton's cache (TRITON_CACHE_DIR, by default ~/.triton/cache), where a server with the same "
    "versions of tokserve and Triton finds them. MODEL needs a config.json, and weights but with --load-format dummy."
)


def add_compile(commands: Any) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile the kernels of a GPU that is not here",
        usage="tokserve compile MODEL --arch ARCH [OPTION ...]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    add_model(parser)
    parser.add_argument("--arch", choices=ARCHITECTURES, required=True, help="the GPU's architecture (docs/gpus.md).")
    add_flags(parser, skip=("model",))
    add_foreign_flags(parser)
    parser.set_defaults(parser=parser)


def run(parser: argparse.ArgumentParser, values: dict[str, Any]) -> int:
    """Compile; returns the exit code (1: a kernel cannot be compiled or does not fit).  Raises StartError."""
    values.pop("config")
    architecture, model = values.pop("arch"), take_model(parser, values)
    if values["device"] not in (None, "auto", "cuda"):
        raise StartError(f"option device: kernels are compiled for cuda, not for {values['device']}")
    options, without = own_options(values | {"model": model, "device": "cuda"})
    config = Config.make(**options)
    # what a start logs of its checks would be said of no card
    level = config.logs.log_level if values["log_level"] else "warning"
    log.setup("compile", level, config.logs.log_format)
    for name in without:
        logger.warning(WITHOUT_EFFECT, name)
    config = resolve(config)
    try:
        compiled = part("gpu", "compile_start")(config, architecture)
    except ImportError as error:
        raise StartError(f"compile needs {error.name}: pip install triton") from None
    for failure in compiled.failures:
        print(f"tokserve: error: {failure}", file=sys.stderr)
    print(
        f"{compiled.variants - len(compiled.failures)} of {compiled.variants} kernels for {architecture} are in "
        f"{compiled.directory}, {compiled.fresh} of them new, after {compiled.seconds:.0f} s"
    )
    return 1 if compiled.failures else 0


COMMANDS = (Command("compile", add_compile, run),)
