"""References of the ops on packed weights: the product x W^T, with and without a gated activation, and row lookup.

A BLAS picks its order of summation by the shape of the call and by the number of threads: MKL divides K between threads
on Intel processors.  For batch invariance, every product of a weight has one shape, on one thread: TILE rows (the last
tile is padded with zeros) by a weight whose sides are padded to a multiple of ALIGN.  The weight is held as float32,
twice the memory of a 16-bit checkpoint, since the reference returns float32 sums for any dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokserve.ops import elementwise
from tokserve.ops.registry import op
from tokserve.ops.serial import one_thread

TILE = 16  # rows of one product
ALIGN = 16  # weight sides: one cache line of float32
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-5, 8e-3), torch.float16: (2e-5, 1e-3)}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [rows, columns] in the layout of the `linear` that it was packed for.

    Rows lie in panels of `panel`; a panel holds its rows' elements side by side, `depth` of each row at a time.  Of a
    gated weight (`gated`), the first half of a panel are rows of the gate, the second half those that they gate.
    """

    rows: int  # N, outputs
    columns: int  # K, inputs
    dtype: torch.dtype  # of the weight before packing
    packed: Tensor
    panel: int = 1
    depth: int = 1
    gated: bool = False

    def lanes(self, rows: Any) -> Any:
        """The number, panel by panel, of the place of each row (integers in a numpy array or a tensor)."""
        if not self.gated:
            return rows
        half, gates = self.panel // 2, self.rows // 2
        is_up = rows >= gates
        within = rows - is_up * gates
        return within // half * self.panel + within % half + is_up * half

    def positions(self, rows: Any, columns: Any) -> Any:
        """Where in `packed`, flat, the elements (row, column) are: integers in numpy arrays or tensors."""
        lanes = self.lanes(rows)
        height = -(-self.columns // self.depth) * self.depth
        lane = lanes % self.panel
        start = (lanes - lane) * height + lane * self.depth
        if self.depth == 1:
            return start + columns * self.panel
        return start + columns // self.depth * (self.panel * self.depth) + columns % self.depth

    def unpacked(self, first: int, last: int) -> Tensor:
        """Rows first .. last - 1 as they were before packing: [last - first, columns]."""
        lanes = self.lanes(torch.arange(first, last, device=self.packed.device))
        low, high = int(lanes.min()), int(lanes.max()) + 1
        begin, end = low // self.panel, -(-high // self.panel)
        steps = -(-self.columns // self.depth)
        size = steps * self.panel * self.depth
        panels = self.packed.view(-1)[begin * size : end * size].view(end - begin, steps, self.panel, self.depth)
        start = begin * self.panel
        if end - begin == 1:
            panels, start = panels[:, :, low - start : high - start], low
        block = panels.transpose(1, 2).reshape(-1, steps * self.depth)[:, : self.columns]
        return block.index_select(0, lanes - start).to(self.dtype)


@op(tolerance=TOLERANCE, follows="linear")
def pack_linear(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedWeight | None = None
) -> PackedWeight:
    """The weight [N,K] in the layout of `linear`: here its transpose in float32, padded with zeros.

    With `rows`, it is the rows `first` .. `first` + N - 1 of a weight [rows,K]: `into` is that weight as an earlier
    call returned it, None in the first one.  It is whole when every row has been packed.
    """
    columns = weight.shape[1]
    if into is None:
        rows = len(weight) if rows is None else rows
        packed = torch.zeros(_aligned(columns), _aligned(rows))
        into = PackedWeight(rows, columns, weight.dtype, packed, panel=packed.shape[1])
    into.packed[:columns, first : first + len(weight)] = weight.t()
    return into


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@op(tolerance={})
def packed_positions(packed: PackedWeight, first_row: int, elements: Tensor) -> Tensor:
    """Where in `packed`, flat, elements [E] int64 are that are counted, row by row, from `first_row` on."""
    return torch.as_tensor(packed.positions(elements // packed.columns + first_row, elements % packed.columns))


@op(tolerance={})
def accept_library(packed: PackedWeight) -> bool:
    """Let `linear` leave many rows of weights of this shape to the device's own library, if that gives them the same
    bits; whether it does.  The reference leaves it nothing."""
    return False


@op(tolerance=TOLERANCE)
def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T,K] times the packed weight's transpose, plus bias [N]: [T,N], summed in float32 and rounded once.

    `out_dtype` float32 returns the sums as they are; None rounds to x's dtype.
    """
    tokens = x.shape[0]
    depth, width = packed.packed.shape  # K and N, padded
    tiles = -(-tokens // TILE)
    rows = torch.zeros(tiles * TILE, depth)
    rows[:tokens, : packed.columns] = x
    sums = torch.empty(tiles * TILE, width)
    with one_thread():
        for start in range(0, tiles * TILE, TILE):
            torch.mm(rows[start : start + TILE], packed.packed, out=sums[start : start + TILE])
    result = sums[:tokens, : packed.rows]
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype or x.dtype).contiguous()


@op(tolerance={dtype: (0.0, 0.0) for dtype in TOLERANCE}, follows="linear")
def embedding(ids: Tensor, packed: PackedWeight, multiplier: float = 1.0) -> Tensor:
    """Rows ids [T] int64 of a packed weight, as they were before packing, times the multiplier: [T,K].

    An embedding tied to the output head thus shares its memory.
    """
    rows = packed.packed[: packed.columns].index_select(1, ids).t()
    return (rows * multiplier).to(packed.dtype).contiguous()


@op(tolerance=TOLERANCE, follows="gated_linear")
def pack_gated(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedWeight | None = None
) -> PackedWeight:
    """The weight [2I,K] of a gate and, below it, the up projection, in the layout of `gated_linear`; or some of its
    rows, as `pack_linear` takes them."""
    return pack_linear.reference(weight, rows, first, into)


@op(tolerance=TOLERANCE)
def gated_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """activation(gate) * up for x [T,K] times a gated weight's transpose plus bias [2I] (gate, then up): [T,I].

    `activation` is "silu" or "gelu_tanh".  The product is rounded to x's dtype before it: bit for bit what
    `silu_mul` or `gelu_mul` of `linear` is.  None: the product itself, [T,2I], bit for bit that of `linear`.
    """
    return elementwise.gated(linear.reference(x, packed, bias), activation)
