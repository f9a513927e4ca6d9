"""Gradients on the GPU: what a trainer needs beside the server's kernels.

A sum has one order that follows from shapes; no float is added atomically.  What belongs to a row, or to a sequence,
does not depend on the others.
"""

from __future__ import annotations

from tokserve.gpu.kernels.training import attention, mixture, products, rows

__all__ = ["attention", "mixture", "products", "rows"]
