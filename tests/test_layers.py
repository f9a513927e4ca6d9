"""The import graph in three layers: the core, rooms that add capabilities to it, and packages beside it.

Imports run from rooms, and from packages beside the core, to the core.  `ARROWS` counts those that still run the other
way: the number may only fall.  Imports by string ("tokserve.gpu.kernels.launch") count like statements.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import nodes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tokserve"
TORCH = {"torch", "transformers", "triton"}

# package of the core -> (packages of the core that it may import, foreign modules that it must not import)
CORE: dict[str, tuple[set[str], set[str]]] = {
    "base": (set(), TORCH),
    "protocol": ({"base"}, TORCH),
    "checkpoint": ({"base"}, TORCH),
    "config": ({"base", "protocol", "checkpoint"}, TORCH),
    "text": ({"base", "protocol", "checkpoint"}, TORCH),
    "ops": ({"base"}, {"transformers"}),
    "layers": ({"base", "protocol", "ops"}, {"transformers"}),
    "models": ({"base", "protocol", "checkpoint", "ops", "layers"}, {"transformers"}),
    "runner": ({"base", "protocol", "checkpoint", "config", "ops", "layers", "models"}, set()),
    "executor": ({"base", "protocol", "config", "runner"}, TORCH),
    "engine": ({"base", "protocol", "config", "executor"}, TORCH),
    "client": ({"base", "protocol", "checkpoint", "config", "text", "engine"}, TORCH | {"fastapi"}),
    "server": ({"base", "protocol", "checkpoint", "config", "text", "client"}, TORCH),
    "cli": ({"base", "protocol", "config", "client", "server"}, TORCH),
}
# package beside the core -> (packages of the core that it may import, foreign modules that it must not import)
BESIDE: dict[str, tuple[set[str], set[str]]] = {
    "rl": (set(), {"transformers"}),  # relative imports: it is also a distribution of its own
    "train": ({"base", "protocol", "checkpoint", "ops", "layers", "models"}, {"transformers"}),
    "ray": ({"base", "protocol", "config", "client", "server"}, TORCH),
    "bench": ({"base", "protocol", "client", "cli"}, TORCH),
    "testing": ({"base", "protocol", "checkpoint", "config", "engine", "client", "cli"}, TORCH),
}
ROOM_FOLDERS = ("features", "dialects", "families")  # each of their folders is a room, and so is gpu/
DEVICE_SIDE = {"ops", "layers", "models", "runner"}  # packages that need torch
HOST_SIDE = {"base", "protocol", "checkpoint", "config", "text", "executor", "engine", "client", "server", "cli"}
# files whose tables name rooms by strings, which are imported when a configuration or a checkpoint needs them
TABLES = {"models/registry.py", "ops/registry.py", "base/rooms.py"}
# pairs of a file of the core and a room (or a package beside the core) that it imports: they may only become fewer
ARROWS = 0
# files that may import what is forbidden to their package
FOREIGN_IN = {"rl/trl_run.py": {"transformers"}}  # of TRL's users, who have it: imported by rl/trl.py alone
MAX_FILES = 20  # of a folder
ONE_NAMESPACE = {"rl"}  # whose modules are public names of a distribution of its own
# modules that a package may import from another only in the named files
ONLY_IN = {
    ("client", "engine"): {"client/launch.py"},
    ("executor", "runner"): {"executor/inline.py"},
    ("engine", "executor"): {
        "engine/admin/control.py",
        "engine/admin/current_weights.py",
        "engine/core.py",
        "engine/features.py",
        "engine/process.py",
    },
    ("ops", "_C"): {path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "ops" / "cpu").glob("*.py")},
}
# who may import the C++ extension
EXTENSION = {"ops", "rl"}
# subpackages of the engine and the server: which of them a module of one may import, besides modules beside it
SUBPACKAGES: dict[str, set[str]] = {
    "engine/kv_cache": set(),
    "engine/output": set(),
    "engine/admin": {"kv_cache", "output"},
    "server/http": set(),
    "server/replies": {"http"},
    "server/tokens": {"http", "replies"},
    "server/admin": {"http"},
}
LAZY_IMPORTS = {
    "__init__.py",
    "checkpoint/__init__.py",
    "features/images/python_images.py",
    "ray/placement.py",
    "features/images/media/sources.py",
    "features/images/media/worker.py",
    "executor/base.py",
    "executor/inline.py",
    "features/ranks/worker.py",
    "features/grammar/grammar.py",
    "protocol/ebnf.py",
    "bench/cli.py",
    "cli/main.py",
    "cli/words.py",
    "cli/http.py",
    "testing/plugin.py",
    "testing/process.py",
}

Module = tuple[str, ...]  # the parts of a dotted name below tokserve


@cache
def modules() -> dict[Module, Path]:
    result = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if "demo_model" not in parts:
            result[parts[:-1] if parts[-1] == "__init__" else parts] = path
    return result


def sources() -> list[Path]:
    return list(modules().values())


def home(module: Module) -> str:
    """The package of the core, the room ("features/kv") or the package beside the core that a module lies in."""
    return "/".join(module[:2]) if module and module[0] in ROOM_FOLDERS else "".join(module[:1])


def is_room(place: str) -> bool:
    return place.partition("/")[0] in (*ROOM_FOLDERS, "gpu")


def _longest(parts: Iterable[str]) -> Module | None:
    """The module that a dotted name below tokserve begins with; None where there is none below the top."""
    module = tuple(parts)
    while module and module not in modules():
        module = module[:-1]
    return module or None


def _of_statement(node: ast.AST) -> Iterator[tuple[str, ...]]:
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level != 1:  # one level: within the package
        assert node.level in (0, 2), "relative imports hide the level"
        head = ("tokserve",) if node.level else tuple((node.module or "").split("."))
        yield from ((*head, alias.name) for alias in node.names)


@cache
def imported(path: Path) -> tuple[tuple[str, ...], ...]:
    """Dotted names of all imports of a file: those within functions too, and outside of `TABLES` those by string."""
    names = [name for node in nodes(path) for name in _of_statement(node)]
    for node in () if path.relative_to(PACKAGE).as_posix() in TABLES else nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tokserve."):
            parts = tuple(node.value.partition(":")[0].split("."))
            if len(parts) > 2 and all(part.isidentifier() for part in parts):  # "tokserve.engine" is a logger
                names.append(parts)
    return tuple(names)


@cache
def targets(path: Path) -> frozenset[Module]:
    """Modules of tokserve that a file imports."""
    paths = [name[1:] for name in imported(path) if name[0] == "tokserve" and len(name) > 1]
    return frozenset(module for name in paths if (module := _longest(name)) is not None)


def test_every_package_has_a_layer() -> None:
    places = {home(module) for module, path in modules().items() if path.parent != PACKAGE}
    known = {*CORE, *BESIDE, "gpu", *ROOM_FOLDERS}
    assert {place for place in places if place not in known and not is_room(place)} == set()
    top = {path.name for path in PACKAGE.iterdir() if path.is_file() and not path.name.startswith("_C.")}
    assert top == {"__init__.py", "__main__.py", "version.py", "py.typed"}


def test_folders_are_small() -> None:
    counts = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in sources())
    large = {folder: count for folder, count in counts.items() if count > MAX_FILES}
    assert large.keys() <= ONE_NAMESPACE, large


@pytest.mark.parametrize("package", [*CORE, *BESIDE])
def test_packages_import_only_what_is_below_them(package: str) -> None:
    allowed, banned = (CORE | BESIDE)[package]
    for module, path in modules().items():
        if home(module) != package:
            continue
        name = path.relative_to(PACKAGE).as_posix()
        for dotted in imported(path):
            is_exempt = dotted[0] in FOREIGN_IN.get(name, ())
            assert dotted[0] not in banned or is_exempt, f"{name} must not import {dotted[0]}"
            if dotted[:2] == ("tokserve", "_C"):
                assert package in EXTENSION, f"{name} imports the extension"
                assert name in ONLY_IN.get((package, "_C"), {name, "rl/native.py"})
        for target in {home(target) for target in targets(path)} & set(CORE) - {package}:
            assert target in allowed, f"{name} must not import {target}"
            assert name in ONLY_IN.get((package, target), {name}), f"{name} must not import {target}"


def test_fewer_and_fewer_files_of_the_core_import_a_room() -> None:
    arrows = {
        (path.relative_to(PACKAGE).as_posix(), home(target))
        for module, path in modules().items()
        if home(module) in CORE
        for target in targets(path)
        if home(target) not in CORE
    }
    by_room = Counter(room for _, room in arrows).most_common()
    assert len(arrows) <= ARROWS, f"a file of the core imports a room that it did not import before: {by_room}"
    assert len(arrows) == ARROWS, f"fewer arrows than before: set ARROWS to {len(arrows)}"


@cache
def at_import(path: Path) -> frozenset[Module | str]:
    """What is imported when a module is: modules of tokserve, and names of foreign packages."""
    tree = nodes(path)[0]
    result: set[Module | str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
        for name in _of_statement(node):
            if name[0] != "tokserve":
                result.add(name[0])
            elif (module := _longest(name[1:])) is not None:
                result |= {module[: size + 1] for size in range(len(module)) if module[: size + 1] in modules()}
    return frozenset(result)


def test_modules_do_not_import_each_other_in_circles() -> None:
    left = {module: {t for t in at_import(path) if isinstance(t, tuple)} for module, path in modules().items()}
    for module, needs in left.items():  # a package's own modules import it
        needs -= {module[:size] for size in range(len(module) + 1)}
    while done := {module for module, needs in left.items() if not needs}:
        left = {module: needs - done for module, needs in left.items() if module not in done}
    assert not left, f"these import each other: {sorted('.'.join(module) for module in left)[:20]}"


def test_the_host_side_does_not_load_torch() -> None:
    """Importing the front end or the engine loads neither torch nor the packages that need it."""
    heavy: dict[Module, set[str]] = defaultdict(set)
    pending = [(module, name) for module, path in modules().items() for name in at_import(path) if name in TORCH]
    users = defaultdict(set)
    for module, path in modules().items():
        for target in at_import(path):
            if isinstance(target, tuple):
                users[target].add(module)
    while pending:
        module, name = pending.pop()
        if name not in heavy[module]:
            heavy[module].add(str(name))
            pending += [(user, name) for user in users[module]]
    for module, path in modules().items():
        host = {home(target) for target in targets(path)} & (HOST_SIDE - {"base", "protocol", "config", "checkpoint"})
        if home(module) in HOST_SIDE or (is_room(home(module)) and host - {"executor"}):
            assert not heavy[module], f"importing tokserve.{'.'.join(module)} loads {heavy[module]}"


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_subpackages_import_only_what_is_below_them(package: str) -> None:
    parent, name = package.split("/")
    inside = {p.name for p in (PACKAGE / parent).iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert {f"{parent}/{package}" for package in inside} <= set(SUBPACKAGES), "a package without a row"
    for path in sorted((PACKAGE / package).glob("*.py")):
        for target in targets(path):
            if target[0] == parent and len(target) > 1 and target[1] in inside:
                assert target[1] in SUBPACKAGES[package] | {name}, f"{path} must not import {'.'.join(target)}"


def test_relative_imports_are_of_the_package_that_is_a_distribution_of_its_own() -> None:
    for module, path in modules().items():
        relative = [node for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.level]
        above = [node for node in relative if node.level > 1]
        if home(module) == "rl":
            others = [name for node in nodes(path) for name in _of_statement(node) if name[0] == "tokserve"]
            assert len(others) == len(above), f"{path.name} imports {others}: tokserve-client has no server"
        else:
            assert not relative, f"{path}: relative imports hide the level"


def test_imports_in_functions_are_allow_listed() -> None:
    for path in sources():
        name = path.relative_to(PACKAGE).as_posix()
        if name in LAZY_IMPORTS or name == "rl/__init__.py":
            continue
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = [n.lineno for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
                assert not inner, f"{name}:{inner} imports inside a function"


def test_importing_leaves_torch_out() -> None:
    names = "engine.core engine.process server.app client.async_llm cli.main bench.serve bench.offline"
    code = (
        f"import importlib, sys\nfor name in {names.split()!r}:\n"
        "    importlib.import_module(f'tokserve.{name}')\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
