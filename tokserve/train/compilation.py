"""`uncompiled`: a forward pass that torch.compile leaves as it is.

A compiler may contract and reorder operations, and the server's bits are those of its own ops in their order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Result = TypeVar("Result")


def uncompiled(function: Callable[P, Result]) -> Callable[P, Result]:
    """The function, run without compilation also in a compiled module; it loads nothing of the compiler itself."""
    disabled: list[Callable[P, Result]] = []  # at most one

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return call
