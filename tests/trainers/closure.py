"""What distributions need, as those that are installed here declare it, and what a program imports besides.

`closure.py PROGRAM NAME...` prints the names of the first, and `import NAME` for the second.  Runs in a recipe's
environment.  tokserve-client is not installed there, so its declaration is read from the tree.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CLIENT = Path(__file__).parents[2] / "tokserve" / "rl" / "pyproject.toml"


def declared(name: str) -> list[str]:
    """The requirements of a distribution; none of one that is not installed, as the requirement is not of here."""
    if name == "tokserve-client":
        return list(tomllib.loads(CLIENT.read_text())["project"]["dependencies"])
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def closure(names: list[str]) -> set[str]:
    """These distributions and all that they need here."""
    todo: list[tuple[str, frozenset[str]]] = [(canonicalize_name(name), frozenset()) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) not in seen:
            seen.add((name, extras))
            for requirement in map(Requirement, declared(name)):
                marker = requirement.marker
                if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                    todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def imported(program: Path) -> set[str]:
    """The distributions that a program imports from at its top."""
    modules: set[str] = set()
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module))
    providers = packages_distributions()
    return {canonicalize_name(name) for module in modules for name in providers.get(module.split(".")[0], [])}


if __name__ == "__main__":
    installed = closure(sys.argv[2:])
    print("\n".join(sorted(installed)))
    for name in sorted(imported(Path(sys.argv[1])) - installed):
        print(f"import {name}")
