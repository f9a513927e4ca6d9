"""The order of a product's tiles."""

from __future__ import annotations

import triton
import triton.language as tl

BAND = 8  # tiles of rows computed before the next outputs: their inputs stay in the L2 cache


@triton.jit
def tile_start(rows, outputs, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first row and the first output of a program: BAND tiles of rows with the same outputs follow one another."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * tiles_n)
    return (band * BAND + within % height) * BLOCK_M, within // height * BLOCK_N


@triton.jit
def tile_of(rows, outputs, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """All rows and outputs of a program."""
    row, output = tile_start(rows, outputs, BAND, BLOCK_M, BLOCK_N)
    return row + tl.arange(0, BLOCK_M), output + tl.arange(0, BLOCK_N)
