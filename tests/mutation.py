"""A mutation sample: does a test fail when one place of the package is wrong?

    make coverage      # which test executes which line
    .venv/bin/python -m tests.mutation --count 60 --seed 1 tokserve/engine tokserve/server/tokens

Changes one random place in one file at a time (a comparison, a constant, a condition, an operator, or a statement that
is left out), runs the fast tests that execute the line, and puts the file back.  A survivor is a change that no test
notices: a gap, unless the change means the same, or a test of a server notices it, which runs in another process.
Files with changes that are not committed are refused.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).parent.parent
DATA = ROOT / "build" / "coverage" / "data"
SECONDS = 120  # a test that takes longer fails: the change made something wait for ever
MAX_TESTS = 400  # of a line, those of the folders that execute it most
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class Mutation(NamedTuple):
    """The text from `first` to `last`, byte offsets in `path`, is replaced by `text`."""

    path: Path
    line: int
    first: int
    last: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.first] + self.text.encode() + source[self.last :]

    def describe(self, source: bytes) -> str:
        before = " ".join(source[self.first : self.last].decode().split())
        return f"{self.path.relative_to(ROOT)}:{self.line}: {before} -> {self.text}"


def changed(node: ast.AST) -> Iterator[str]:
    """What may stand in place of a node, as source."""
    if isinstance(node, ast.Compare):
        flipped = [FLIPPED[type(node.ops[0])](), *node.ops[1:]]
        yield f"({ast.unparse(ast.Compare(node.left, flipped, node.comparators))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        yield repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
    elif is_effect(node):
        yield "pass"


def is_effect(node: ast.AST) -> bool:
    """A statement that can be left out without a name going missing."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and not ast.unparse(node.value.func).startswith("logger.")
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], ast.Name | ast.Tuple)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break)


def conditions(node: ast.AST) -> Iterator[ast.expr]:
    """What decides at a node."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it, without annotations, which nothing executes."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from executed(child)


def mutations(path: Path, lines: set[int]) -> Iterator[Mutation]:
    """All changes of the functions in a file, on these lines."""
    source = path.read_bytes()
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def mutation(node: ast.expr | ast.stmt, text: str) -> Mutation:
        first = starts[node.lineno - 1] + node.col_offset
        return Mutation(path, node.lineno, first, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0), text)

    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in (inner for statement in function.body for inner in executed(statement)):
                if isinstance(node, ast.expr | ast.stmt) and node.lineno in lines:
                    yield from (mutation(node, text) for text in changed(node))
                yield from (mutation(c, f"(not ({ast.unparse(c)}))") for c in conditions(node) if c.lineno in lines)


def tests_of_lines(data: CoverageData, path: Path) -> dict[int, list[str]]:
    """Line -> the tests that execute it, as pytest takes them."""
    results = {}
    for line, contexts in data.contexts_by_lineno(str(path)).items():
        tests: dict[str, list[str]] = defaultdict(list)  # by folder
        for context in contexts:  # tests.engine.test_scheduler.test_one
            module, _, name = context.rpartition(".")
            file = module.replace(".", "/") + ".py"
            if (ROOT / file).exists():
                tests[file.rpartition("/")[0]].append(f"{file}::{name}")
        most_first = sorted(tests.values(), key=len, reverse=True)
        if chosen := [test for folder in most_first for test in sorted(folder)][:MAX_TESTS]:
            results[line] = chosen
    return results


def survives(mutation: Mutation, tests: list[str]) -> bool:
    """Whether all tests pass with the change."""
    source, times = mutation.path.read_bytes(), mutation.path.stat()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    try:
        mutation.path.write_bytes(mutation.applied(source))
        ended = subprocess.run(
            [*command, f"--timeout={SECONDS}", *tests],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            timeout=5 * SECONDS,
        )
    except subprocess.TimeoutExpired:  # it waits where no signal reaches it
        return False
    finally:
        mutation.path.write_bytes(source)
        os.utime(mutation.path, ns=(times.st_atime_ns, times.st_mtime_ns))  # so its compiled file stays valid
    return ended.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="files and folders to change")
    parser.add_argument("--count", type=int, default=60, help="how many changes to try")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    arguments = parser.parse_args()
    changes = subprocess.run(
        ["git", "diff", "--name-only", "HEAD", "--", *arguments.paths], cwd=ROOT, capture_output=True
    )
    if changes.stdout or not DATA.exists():
        sys.exit(f"commit first: {changes.stdout.decode()}" if changes.stdout else "run `make coverage` first")
    data = CoverageData(str(DATA))
    data.read()
    paths = [path.resolve() for path in arguments.paths]
    files = sorted({file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])})
    tests = {file: tests_of_lines(data, file) for file in files}
    candidates = sorted({change for file in files for change in mutations(file, set(tests[file]))})
    chosen = random.Random(arguments.seed).sample(candidates, min(arguments.count, len(candidates)))
    survivors = 0
    for change in chosen:
        start, text = time.monotonic(), change.describe(change.path.read_bytes())
        survived = survives(change, tests[change.path][change.line])
        survivors += survived
        print(f"{'SURVIVED' if survived else 'killed'} {time.monotonic() - start:.0f} s {text}", flush=True)
    print(f"killed {len(chosen) - survivors} of {len(chosen)}, of {len(candidates)} changes that tests reach")


if __name__ == "__main__":
    main()
