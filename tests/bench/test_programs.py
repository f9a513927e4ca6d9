"""Programs beside the package, `benchmarks/` and `examples/`: what they import of the package is there.

No test runs most of them, so a name that moved would be noticed by their users first.
"""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAMS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
OPTIONAL = ("tokserve.ray", "tokserve.rl.trl", "tokserve.train.trl")  # import what an extra installs


def imported(path: Path) -> list[tuple[str, str]]:
    """(module, name) of all `from tokserve... import name` in a file, also within functions."""
    return [
        (node.module, name.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tokserve"
        for name in node.names
        if not any(node.module.startswith(prefix) for prefix in OPTIONAL)
    ]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_of_programs_exist(path: Path) -> None:
    for module, name in imported(path):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")  # a module of a package, or an error that names it
