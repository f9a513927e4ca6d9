"""Products whose chains are not added yet: float32 sums that the next kernel adds, in ascending order.

A narrow weight is multiplied in several chains of inputs, by programs of their own.  The last one of a tile would wait
for the others, read their sums back, add, round and store; instead a norm, or the kernel that stores keys and values,
does these additions when it loads.  Everything else gets the product from a kernel that only adds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import cdiv, is_dependent, launch_dependents, launched, wait_for_inputs
from tokserve.gpu.kernels.rows.forms import OtherForm

MOST_ROWS = 16  # of products that are left so: with more, reading sums takes longer than waiting for a program
ADDED = 1024  # sums that a program adds
WARPS = 4


@triton.jit
def load_product(
    x_ptr, bias_ptr, row, within, inside, size, CHAINS: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr
):
    """Elements `within` the row that begins at `row`, in float32, zero where not `inside`.  CHAINS > 0: x_ptr holds the
    sums [CHAINS,size] float32 of so many chains, whose sum plus the bias is rounded to DTYPE."""
    if CHAINS == 0:
        return tl.load(x_ptr + row + within, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(inside.shape, tl.float32)
        for chain in tl.static_range(CHAINS):
            total += tl.load(x_ptr + chain * size + row + within, mask=inside, other=0.0)
        if BIAS:
            total += tl.load(bias_ptr + within, mask=inside, other=0.0).to(tl.float32)
        return total.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def add_chains_kernel(
    part_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    BIAS: tl.constexpr,
    CHAINS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BLOCK outputs of all [rows,outputs]: the sums of their chains, in ascending order, plus the bias."""
    wait_for_inputs(DEPENDENT)
    launch_dependents(DEPENDENT)
    size = rows.to(tl.int64) * outputs
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for chain in tl.static_range(CHAINS):
        total += tl.load(part_ptr + chain * size + at, mask=at < size, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % outputs).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def add_chains(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the product [T,N] of parts [chains,T,N], plus the bias, to `out`."""
    chains, rows, outputs = parts.shape
    device = out.device.index
    add_chains_kernel[(cdiv(rows * outputs, ADDED),)](
        parts,
        out if bias is None else bias,
        out,
        rows,
        outputs,
        bias is not None,
        chains,
        ADDED,
        is_dependent(device),
        num_warps=WARPS,
        **launched(device),
    )


class UnaddedProduct(OtherForm):
    """A product [T,N] that is not written yet, with the sums of its chains [chains,T,N] float32 and the bias that is
    added to them.  On trial."""

    parts: Tensor | None
    bias: Tensor | None

    def materialize(self) -> None:
        """Write the product."""
        if self.parts is not None:
            parts, self.parts = self.parts, None
            add_chains(parts, self.bias, self)


def unadded(out: Tensor, parts: Tensor, bias: Tensor | None) -> Tensor:
    """What `add_chains` would write to `out`."""
    product: UnaddedProduct = out.as_subclass(UnaddedProduct)
    product.parts, product.bias = parts, bias
    return product


def sums_of(x: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """What `load_product` reads of the rows x: a tensor, a bias, and the number of chains, 0 if these are added."""
    if isinstance(x, UnaddedProduct) and x.parts is not None:
        return x.parts, x.bias, len(x.parts)
    return x, None, 0
