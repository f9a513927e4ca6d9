"""Parsed files of the package, for the tests that read its source."""

import ast
from functools import cache
from pathlib import Path

from tokserve.base.memory import no_collections


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree, the module first."""
    with no_collections():
        return list(ast.walk(ast.parse(path.read_text())))
