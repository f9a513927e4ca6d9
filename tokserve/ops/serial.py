"""Torch operations on one thread, for the references: a library may divide a sum by the number of threads.

MKL divides the inner dimension of a product between threads on Intel processors, torch one long row of a sum.  On one
thread the order of a sum depends on the call's shape only, on every library and processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch operations of the calling thread use no other thread in this context.

    Costs about a microsecond.  OpenMP and MKL keep the number per calling thread, so threads that have computed before
    keep theirs; one that computes for the first time meanwhile may start with one, which changes its speed only.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
