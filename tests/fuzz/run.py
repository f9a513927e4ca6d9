"""`python -m tests.fuzz.run bodies --executions 1000000`: random changes to good inputs, until an unexpected error.

With `--atheris` (a package to be installed beside) the changes follow the coverage of tokserve's own code.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

NAMES = ("bodies", "wire", "template", "detokenizer")
PIECES = (
    b"null",
    b"-1",
    b"1e999",
    b"[",
    b"{",
    b'"',
    b"\x00",
    b"\xff",
    b"\xc0",
    b"\xdf\xff\xff\xff\xff",
    b"9" * 40,
    b"[" * 50,
    b"\x91" * 3000,
)


def changed(rng: random.Random, seed: bytes, other: bytes) -> bytes:
    """The seed with one to four changes: bytes, pieces, a cut, a repetition, the end of another seed."""
    mutated = bytearray(seed)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(mutated) + 1)
        match rng.randrange(6):
            case 0:
                mutated[place : place + 1] = rng.randbytes(1)
            case 1:
                mutated[place:place] = rng.choice(PIECES)
            case 2:
                del mutated[place : place + rng.randrange(1, 9)]
            case 3:
                mutated[place : place + rng.randrange(9)] = mutated[: rng.randrange(9)]
            case 4:
                mutated[place:] = other[rng.randrange(len(other) + 1) :]
            case _:
                mutated[place : place + 4] = rng.randbytes(rng.randrange(1, 5))
    return bytes(mutated)


def fuzz(name: str, executions: int, seed: int = 0) -> None:
    """Raises what the target raises, with the input as a note."""
    from tests.fuzz.targets import TARGETS, seeds

    target, corpus, rng = TARGETS[name], seeds(name), random.Random(seed)
    for i in range(executions):
        data = corpus[i] if i < len(corpus) else changed(rng, rng.choice(corpus), rng.choice(corpus))
        try:
            target(data)
        except BaseException as error:
            error.add_note(f"{name} was given {data!r}")
            raise


def guided(name: str, executions: int) -> None:
    """The same by atheris; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["tokserve"]):
        from tests.fuzz.targets import TARGETS, seeds
    directory = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    for i, seed in enumerate(seeds(name)):
        (directory / str(i)).write_bytes(seed)
    options = [f"-atheris_runs={executions}", "-rss_limit_mb=4096", "-print_final_stats=1", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *options, str(directory)], TARGETS[name])
    atheris.Fuzz()


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    args = parser.parse_args(argv)
    logging.disable()
    if args.atheris:
        guided(args.target, args.executions)
    began = time.monotonic()
    fuzz(args.target, args.executions, args.seed)
    print(f"{args.target}: {args.executions} executions in {time.monotonic() - began:.0f} s, nothing found")


if __name__ == "__main__":
    main()
