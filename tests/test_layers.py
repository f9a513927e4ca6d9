"""The import graph against the layering table of docs/architecture.md: a module imports only what is below it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import nodes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tokserve"
ROOT_ORDER = [
    "errors",
    "structs",
    "memory",
    "cgroups",
    "log",
    "trace",
    "sockets",
    "processes",
    "curve",
    "regex",
    "turns",
    "jsonschema",
    "schema_logic",
    "reduced_schema",
    "ebnf",
    "kv_transfer",
    "params",
    "prompt",
    "image_parts",
    "kv_spec",
    "gguf",  # a package
    "checkpoint",
    "vision",
    "classifier",
    "encoders",
    "config",  # a package
    "cpu_list",
    "engine_config",
    "option_checks",
    "resolve",
    "ray_cluster",
    "messages",
    "plan",
    "admin",
    "one_blas_thread",
]
# package -> (packages and root files it may import, foreign modules it must not import anywhere)
TORCH = {"torch", "transformers", "triton"}
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "root": (set(), TORCH),
    "config": ({"errors", "params"}, TORCH),
    "gguf": ({"errors"}, TORCH),
    "device": ({"errors", "cgroups", "cpu_list", "memory"}, {"transformers"}),
    "ops": ({"errors", "_C"}, {"transformers"}),
    "text": ({"errors", "image_parts", "jsonschema", "params", "reduced_schema", "checkpoint"}, TORCH),
    "media": ({"errors", "structs", "image_parts", "config", "log", "prompt", "turns", "vision"}, TORCH),
    "rl": ({"_C"}, {"transformers"}),  # relative imports: it is also a distribution of its own
    "layers": ({"ops", "errors", "kv_spec", "classifier"}, {"transformers"}),
    "models": (
        {"layers", "ops", "rl", "kv_spec", "checkpoint", "classifier", "encoders", "errors", "gguf"},
        {"transformers"},
    ),
    "hf": ({"models", "layers", "ops", "kv_spec", "errors"}, set()),
    "train": ({"models", "layers", "ops", "rl", "kv_spec", "checkpoint", "errors", "params"}, {"transformers"}),
    "runner": (
        {
            "memory",
            "cgroups",
            "hf",
            "models",
            "layers",
            "ops",
            "device",
            "rl",
            "plan",
            "prompt",
            "kv_spec",
            "params",
            "config",
            "checkpoint",
            "classifier",
            "errors",
            "trace",
            "vision",
        },
        set(),
    ),
    "executor": (
        {
            "structs",
            "plan",
            "config",
            "engine_config",
            "ray_cluster",
            "runner",
            "errors",
            "log",
            "kv_spec",
            "vision",
            "curve",
            "memory",
            "one_blas_thread",
            "sockets",
            "processes",
        },
        TORCH,
    ),
    "engine": (
        {
            "memory",
            "structs",
            "admin",
            "messages",
            "plan",
            "prompt",
            "params",
            "config",
            "errors",
            "kv_spec",
            "log",
            "trace",
            "turns",
            "sockets",
            "processes",
            "curve",
            "executor",
            "vision",
            "checkpoint",
            "kv_transfer",
            "one_blas_thread",
        },
        TORCH,
    ),
    "client": (
        {
            "structs",
            "admin",
            "messages",
            "prompt",
            "image_parts",
            "media",
            "vision",
            "params",
            "config",
            "engine_config",
            "resolve",
            "text",
            "errors",
            "log",
            "checkpoint",
            "classifier",
            "encoders",
            "curve",
            "engine",
            "kv_transfer",
            "ray_cluster",
            "processes",
        },
        TORCH | {"fastapi"},
    ),
    "server": (
        {
            "memory",
            "structs",
            "admin",
            "client",
            "kv_transfer",
            "text",
            "media",
            "vision",
            "image_parts",
            "jsonschema",
            "reduced_schema",
            "prompt",
            "params",
            "errors",
            "config",
            "log",
            "checkpoint",
        },
        TORCH,
    ),
    "ray": ({"client", "server", "config", "engine_config", "resolve", "errors", "params"}, TORCH),
    "cli": (
        {
            "memory",
            "bench",
            "client",
            "server",
            "executor",
            "config",
            "engine_config",
            "resolve",
            "errors",
            "log",
            "processes",
            "sockets",
            "one_blas_thread",
        },
        TORCH,
    ),
    "bench": ({"client", "params", "errors", "structs"}, TORCH),
    "testing": (
        {
            "cli",
            "client",
            "rl",
            "engine",
            "messages",
            "plan",
            "processes",
            "prompt",
            "params",
            "kv_spec",
            "checkpoint",
            "config",
            "errors",
        },
        TORCH,
    ),
}
FOREIGN_IN = {
    "features/images/media/worker.py": {"transformers"},  # a process of its own
    "rl/trl_run.py": {"transformers"},  # of TRL's users, who have it: imported by rl/trl.py alone
}
# modules a package may import from another only in the named file
ONLY_IN = {
    ("client", "engine"): {"client/launch.py"},
    ("executor", "runner"): {"executor/inline.py", "features/ranks/worker.py"},
    ("engine", "executor"): {
        "features/lora/slot_assignment.py",
        "features/lora/commands.py",
        "engine/admin/control.py",
        "features/profiler/commands.py",
        "engine/core.py",
        "features/kv/external_kv.py",
        "engine/process.py",
        "features/weights/current_weights.py",
        "features/weights/commands.py",
    },
    ("rl", "_C"): {"rl/native.py"},
    ("ops", "_C"): {path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "ops" / "cpu").glob("*.py")},
}
# subpackages of the engine and the server: which of them a module of one may import, besides modules beside it
SUBPACKAGES: dict[str, set[str]] = {
    "engine/kv_cache": set(),
    "engine/kv_transfer": {"kv_cache"},
    "engine/output": set(),
    "engine/structured_output": set(),
    "engine/admin": {"kv_cache", "output"},
    "engine/speculation": {"admin"},
    "server/http": set(),
    "server/replies": {"http"},
    "server/observe": {"http"},
    "server/tokens": {"http", "replies"},
    "server/openai": {"http", "replies", "tokens"},
    "server/pooling": {"http", "replies", "openai"},
    "server/anthropic": {"http", "replies", "openai", "tokens"},
    "server/admin": {"http"},
    "server/sglang": {"http", "replies", "tokens", "openai", "pooling", "admin", "observe"},
    "server/trainers": {"http", "admin"},
    "server/sagemaker": {"http", "openai", "pooling"},
}
LAZY_IMPORTS = {
    "tokserve/__init__.py",
    "checkpoint.py",
    "features/images/python_images.py",
    "ray/placement.py",
    "features/images/media/sources.py",
    "features/images/media/worker.py",
    "executor/base.py",
    "executor/inline.py",
    "features/ranks/worker.py",
    "features/grammar/grammar.py",
    "ebnf.py",
    "bench/cli.py",
    "cli/main.py",
    "cli/words.py",
    "cli/http.py",
    "testing/plugin.py",
    "testing/process.py",
}


def sources() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "demo_model" not in p.parts)


def package_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    if len(parts) > 1:
        return parts[0]
    return "device" if path.stem == "device" else "root"


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 1:  # within a package that is one level: `test_relative_imports` says where
                continue
            assert node.level in (0, 2), "relative imports hide the level"
            head = ("tokserve",) if node.level else tuple((node.module or "").split("."))
            if head == ("tokserve",):
                yield from (("tokserve", alias.name) for alias in node.names)
            else:
                yield head


def test_imports_only_lower_levels() -> None:
    for path in sources():
        _check_levels(path)


def _check_levels(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    package = package_of(path)
    allowed, banned = ALLOWED[package]
    for module in imported(path):
        is_exempt = module[0] in FOREIGN_IN.get(name, ())
        assert module[0] not in banned or is_exempt, f"{name} must not import {module[0]}"
        if module[0] != "tokserve" or len(module) == 1:
            continue
        target = module[1]
        if name in ("__init__.py", "__main__.py") or target == package or target == "__version__":
            continue
        if package == "root":
            assert target in ROOT_ORDER, f"{name} imports {target}, which is above it"
            assert ROOT_ORDER.index(target) < ROOT_ORDER.index(path.stem), f"{name} imports {target}: wrong order"
            continue
        assert target in allowed, f"{name} ({package}) must not import {target}"
        files = ONLY_IN.get((package, target))
        assert files is None or name in files, f"{package} may import {target} only in {files}, not in {name}"


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_subpackages_import_only_what_is_below_them(package: str) -> None:
    parent, name = package.split("/")
    inside = {p.name for p in (PACKAGE / parent).iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert {f"{parent}/{package}" for package in inside} <= set(SUBPACKAGES), "a package without a row"
    for path in sorted((PACKAGE / package).glob("*.py")):
        for module in imported(path):
            if module[:2] == ("tokserve", parent) and len(module) > 2 and module[2] in inside:
                assert module[2] in SUBPACKAGES[package] | {name}, f"{path} must not import {'.'.join(module)}"


def test_relative_imports_are_of_the_package_that_is_a_distribution_of_its_own() -> None:
    for path in sources():
        relative = [node for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.level]
        above = [node for node in relative if node.level > 1]
        others = [module for module in imported(path) if module[0] == "tokserve"]
        if package_of(path) == "rl":
            assert len(others) == len(above), f"{path.name} imports {others}: tokserve-client has no server"
        else:
            assert not relative, f"{path}: relative imports hide the level"


def test_imports_in_functions_are_allow_listed() -> None:
    for path in sources():
        name = str(path.relative_to(PACKAGE))
        if name in LAZY_IMPORTS or name == "__init__.py":
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
