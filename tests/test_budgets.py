"""Budgets that keep the code base readable: sizes, counts and names, checked on every commit."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.sources import nodes
from tokserve import config
from tokserve.engine.request import Request

PACKAGE = Path(__file__).parent.parent / "tokserve"
CXX = sorted((PACKAGE.parent / "csrc").iterdir())
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "demo_model" not in p.parts)
MAX_FILE, MAX_FUNCTION, MAX_ENV, MAX_SKIPS = 700, 60, 5, 60
MAX_TEST_FILE = 700
MAX_CXX_FILE, MAX_CXX_FUNCTION, MAX_CXX_LINE = 400, 60, 120
MAX_SCHEDULER, MAX_REQUEST = 350, 30
BANNED = {"manager", "helper", "helpers", "util", "utils", "info", "data", "impl", "mixin", "v2"}
RESOLVE = ("resolve.py", "option_checks.py", "engine_config.py")  # what knows all options
OF_VLLM = {"data_1", "data_2"}  # names of its parameters
BROAD_EXCEPT = {  # process entry, threads, restarts, admission, grammars, admin commands, HTTP edge, a test's script,
    # a parser of the library's that raises plain Exceptions
    "engine/process.py",
    "features/ranks/worker.py",
    "engine/admission.py",
    "features/grammar/mask_worker.py",
    "engine/admin/command.py",
    "server/app.py",
    "server/replies/sse.py",
    "testing/scripted.py",
    "features/grammar/grammars.py",
    "features/grammar/trial_process.py",
    "features/images/media/pool.py",
    "client/engine_client.py",
    "protocol/ebnf.py",
}


def words(name: str) -> set[str]:
    return {w.lower() for w in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_files_keep_the_house_rules() -> None:
    for path in FILES:
        _check_file(path)


def _check_file(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    text = path.read_text()
    syntax = nodes(path)
    assert len(text.splitlines()) <= MAX_FILE, f"{name} is over {MAX_FILE} lines"
    assert not text.strip() or ast.get_docstring(syntax[0]), f"{name} does not say why it exists"
    assert not words(path.stem) & BANNED, f"{name}: banned word in the file's name"
    for node in syntax:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "kernels" not in path.parts:
            size = (node.end_lineno or 0) - node.lineno + 1
            assert size <= MAX_FUNCTION, f"{name}: {node.name} has {size} lines"
        assert not isinstance(node, ast.Global) or name == "ops/registry.py", f"{name}: global"
        if isinstance(node, ast.ExceptHandler) and name not in BROAD_EXCEPT:
            caught = "everything" if node.type is None else ast.unparse(node.type)
            assert caught not in ("everything", "Exception", "BaseException"), f"{name}:{node.lineno}: broad except"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            literal = len(node.args) == 3 and isinstance(node.args[1], ast.Constant)
            assert not literal or name == "models/spec.py", (
                f"{name}:{node.lineno}: getattr with a literal and a default"
            )
        if isinstance(node, ast.Attribute) and node.attr == "wait_for" and ast.unparse(node.value) == "asyncio":
            raise AssertionError(f"{name}:{node.lineno}: wait_for may swallow a cancellation: use asyncio.timeout")
    names = {node.name for node in syntax if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.arg for node in syntax if isinstance(node, ast.arg)}
    for word in names - OF_VLLM:
        assert not words(word) & BANNED, f"{name}: banned word in {word!r}"


def cxx_functions(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line, from 1, of every function definition: as clang-format lays it out, its closing brace stands
    alone, indented as its first line.  Blocks directly inside a function are returned, too."""
    for last, line in enumerate(lines):
        if line in ("}", "  }"):
            depth = len(line) - 1
            first = next(i for i in range(last - 1, -1, -1) if re.match(rf" {{{depth}}}[\w~]", lines[i]))
            yield first + 1, last + 1


def test_test_files_are_short() -> None:
    tests = Path(__file__).parent
    for path in tests.rglob("*.py"):
        name = path.relative_to(tests).as_posix()
        lines = len(path.read_text().splitlines())
        assert lines <= MAX_TEST_FILE, f"{name} has {lines} lines"


def test_cxx_files_keep_the_house_rules() -> None:
    for path in CXX:
        _check_cxx_file(path)


def _check_cxx_file(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_CXX_FILE, f"{path.name} has {len(lines)} lines"
    assert lines[0].startswith("//") or path.suffix == ".cpp", f"{path.name} does not say what it is"
    for number, line in enumerate(lines, 1):
        assert len(line) <= MAX_CXX_LINE, f"{path.name}:{number} has {len(line)} columns"
    for first, last in cxx_functions(lines):
        assert last - first < MAX_CXX_FUNCTION, f"{path.name}:{first}: a function of {last - first + 1} lines"


def test_device_kinds_are_named_only_where_they_may_be() -> None:
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if name.startswith(("ops/", "gpu/")) or name == "runner/device.py" or path.name in RESOLVE:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                assert not constants & {"cpu", "cuda"}, f"{name}:{node.lineno} tests for a device kind"


def test_environment_names_are_few() -> None:
    env = {m for p in FILES for m in re.findall(r"TOKSERVE_[A-Z_]+", p.read_text())}
    assert len(env) <= MAX_ENV, env
    readers = {p.name for p in FILES if "os.environ" in p.read_text()}
    libraries = {
        "broadcast.py",
        "collectives.py",
        "dense.py",
        "placement.py",
        "worker.py",
        "worker_process.py",
        "one_blas_thread.py",
    }
    assert readers <= {*RESOLVE, "http.py"} | libraries, readers


def test_option_names_are_unique_and_documented() -> None:
    fields = list(config.fields())
    assert len({name for _, name, _ in fields}) == len(fields)
    for _, name, hint in fields:
        assert any(getattr(m, "description", None) for m in hint.__metadata__), f"{name} has no sentence"


def test_the_formatter_is_taken_as_it_is() -> None:
    folders = ("tokserve", "tests", "examples", "benchmarks", "scripts")
    paths = (path for folder in folders for path in (PACKAGE.parent / folder).rglob("*.py"))
    marks = sum(line.endswith("# fmt: skip") for path in paths for line in path.read_text().splitlines())
    assert marks <= MAX_SKIPS


def test_the_engine_s_core_stays_small() -> None:
    lines = (PACKAGE / "engine" / "scheduler.py").read_text().splitlines()
    assert len(lines) <= MAX_SCHEDULER, f"the scheduler has {len(lines)} lines"
    assert len(Request.__slots__) <= MAX_REQUEST, f"a request has {len(Request.__slots__)} attributes"
