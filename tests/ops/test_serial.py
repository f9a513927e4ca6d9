"""References compute what a library could cut between threads on one thread, and leave the number as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.ops.packing import pack_arguments
from tests.ops.samples import samples
from tests.tiers import slow_except
from tokserve import ops  # noqa: F401  (declares the ops)
from tokserve.ops.registry import OPS, REFERENCE
from tokserve.ops.serial import one_thread

THREADS = 3
PRODUCTS = {
    "__matmul__",
    "__rmatmul__",
    "addbmm",
    "addmm",
    "addmv",
    "baddbmm",
    "bilinear",
    "bmm",
    "chain_matmul",
    "dot",
    "einsum",
    "inner",
    "linear",
    "matmul",
    "mm",
    "mv",
    "scaled_dot_product_attention",
    "tensordot",
    "vdot",
}
WHOLE_NUMBERS = {"linear_int8", "gated_linear_int8", "experts_int8"}  # float32 sums below 2^24: exact in any order


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


class Products(TorchFunctionMode):
    """Notes the number of threads at every product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[tuple[str, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in PRODUCTS:
            self.threads.append((func.__name__, torch.get_num_threads()))
        return func(*args, **kwargs or {})


def packed(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Samples of products hold weights that are not packed yet."""
    return pack_arguments(name, REFERENCE, arguments)


NAMES = sorted(set(OPS) - WHOLE_NUMBERS)


@pytest.mark.some(26)
@pytest.mark.parametrize("name", slow_except(NAMES, *(name for name in NAMES if "wna16" not in name)))
def test_products_of_references_run_on_one_thread(name: str) -> None:
    op = OPS[name]
    with Products() as products:
        for dtype in op.tolerance:
            for arguments in samples(op.name, dtype):
                op.implementations[REFERENCE].call(*packed(name, arguments))
    assert all(threads == 1 for _, threads in products.threads), products.threads
    assert torch.get_num_threads() == THREADS
    if name in ("linear", "gated_linear", "linear_float8", "experts", "add_lora", "paged_attention"):
        assert products.threads


def test_the_number_of_threads_comes_back() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == THREADS
    with pytest.raises(ValueError, match="x"), one_thread():
        raise ValueError("x")
    assert torch.get_num_threads() == THREADS


def test_threads_that_have_computed_keep_theirs() -> None:
    started, inside, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        seen.append(torch.get_num_threads())
        started.set()
        assert inside.wait(60)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    assert started.wait(60)
    with one_thread():
        inside.set()
        thread.join()
    assert seen == [THREADS, THREADS]
