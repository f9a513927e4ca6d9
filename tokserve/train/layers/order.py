"""Gradients that are added to the masters one part of the graph at a time.

Autograd sums what reaches a parameter in a backward pass before it adds that to `grad`, so the order of the sum
depends on what is in the pass.  Parts of a graph that are given masters of their own add theirs one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor


def in_order(masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves with the masters' values, each of which passes its whole gradient on to its master's `grad`."""
    leaves = {}
    for name, master in masters.items():
        leaf = master.detach().requires_grad_(master.requires_grad)
        if master.requires_grad:
            hooked: Any = leaf
            hooked.register_post_accumulate_grad_hook(partial(_pass_on, master))
        leaves[name] = leaf
    return leaves


def _pass_on(master: Tensor, leaf: Tensor) -> None:
    with torch.no_grad():
        if master.grad is None:
            master.grad = leaf.grad
        elif leaf.grad is not None:
            master.grad += leaf.grad
    leaf.grad = None
