"""Which parameters of a table `make test` runs: the others are marked slow."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """The values, those not in `fast` marked slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_after(values: Iterable[Any], count: int) -> list[Any]:
    """The values, those behind the first `count` marked slow."""
    return [value if i < count else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


def paired(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs; those are fast in which each row meets one column, the columns in turns."""
    return [
        pytest.param(row, column, marks=() if i % len(columns) == j else pytest.mark.slow)
        for (i, row), (j, column) in product(enumerate(rows), enumerate(columns))
    ]


def in_turns(rows: Sequence[Any], column: Sequence[Any], count: int) -> list[Any]:
    """Each row with every `count`th value of the column, beginning with the next one each; with all of them, slow."""
    parts = [pytest.param(row, column[i % count :: count], id=f"{i}-part") for i, row in enumerate(rows)]
    every = [pytest.param(row, column, marks=pytest.mark.slow, id=f"{i}-every") for i, row in enumerate(rows)]
    return parts + every


def slow_cases(cases: Iterable[Sequence[Any]], *fast: Sequence[Any]) -> list[Any]:
    """Cases of several parameters, those not in `fast` marked slow."""
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in cases]
