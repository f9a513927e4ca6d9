"""Rotary position embedding as one table: a row per position, cosines then sines, in float32.

A `RopeSpec` says which of the known ways to stretch frequencies is meant; `rope_table` works it out once, at
start-up, for every position that will be served.  Angles are float32 products, as in the training code,
because at position 100,000 the rounding of the product shows; their cosines are taken in float64 and rounded, so
that an entry does not depend on the table's size or on threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ROWS = 4096  # computed at a time, to bound the memory for float64
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "none"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequencies of the first `dim` elements of a head (all of them, unless rotary is partial).

    `original`: positions the model was trained on before its context was extended; `factor`: by how much.
    The low and high frequency factors are of llama3; the rest below are of yarn, where `attention_factor`
    None means the paper's value, or the ratio of `mscale` to `mscale_all_dim` if both are given.
    `short` and `long` are longrope's: what each frequency is divided by, where at most `original` positions are served
    and where more are.  `interleaved`: neighbours are a pair, not the elements of two halves.  Kind "none" turns
    nothing, "proportional" only the first `turned` elements, counted by pairs.  `axes`: where a position has several
    coordinates, the one that each frequency turns with; (): it has one.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    interleaved: bool = False
    axes: tuple[int, ...] = ()
    turned: int = 0


NO_ROPE = RopeSpec(2, 1.0, "none")


def rope_table(spec: RopeSpec, positions: int) -> Tensor:  # [positions, dim] float32
    """Row p: cos, then sin, of p times each of the dim / 2 frequencies, both times the attention factor.

    Dynamic NTK: transformers raises the base as a sequence grows past `original`, so what it computes for a
    long sequence depends on how it got there: a prompt is rotated with the base of its whole length, a
    generated token with the base of the length at that time, and cached keys keep theirs.  Here row p has
    the base of length p + 1 (`original` at least): equal to transformers for sequences up to `original`,
    and, past it, to its token by token generation with a cache.  So one table, made once for the served
    length, gives a token the same rotation in any chunk, any request and for any served length.

    Longrope: transformers takes the long factors for every token of a sequence once it is longer than `original`, and
    forgets its cache then.  Here all tokens have the long factors if more than `original` positions are served, else
    the short ones, so that a token's bits follow from its prefix alone.
    """
    scale = _attention_factor(spec)
    table = torch.empty(positions, spec.dim)
    for start in range(0, positions, ROWS):
        rows = table[start : start + ROWS]
        steps = torch.arange(start, start + len(rows), dtype=torch.float32)[:, None]  # [rows, 1]
        angles = (steps * _frequencies(spec, steps, positions)).double()
        torch.cat((angles.cos().float() * scale, angles.sin().float() * scale), dim=-1, out=rows)
    return table


def rows_of_axes(table: Tensor, spec: RopeSpec, positions: Tensor) -> Tensor:  # [T, dim]
    """A row for each of T tokens whose positions have several coordinates, int64 [axes, T]."""
    rows = table[positions]  # [axes, T, dim]
    if not spec.axes:
        return rows[0]
    axes = torch.tensor(spec.axes * 2, device=table.device)  # of cosines, then of sines
    return rows.gather(0, axes.expand(1, *rows.shape[1:]))[0]


def _frequencies(spec: RopeSpec, steps: Tensor, positions: int) -> Tensor:  # [dim / 2], or [rows, dim / 2]
    plain = 1.0 / _periods(spec)
    match spec.kind:
        case "default":
            return plain
        case "linear":
            return plain / spec.factor
        case "dynamic":
            return _dynamic(spec, plain, steps)
        case "llama3":
            return _llama3(spec, plain)
        case "yarn":
            return _yarn(spec, plain)
        case "longrope":
            return 1.0 / (torch.tensor(spec.long if positions > spec.original else spec.short) * _periods(spec))
        case "proportional":
            return torch.where(torch.arange(spec.dim // 2) < spec.turned // 2, plain / spec.factor, 0.0)
        case "none":
            return torch.zeros_like(plain)


def _periods(spec: RopeSpec) -> Tensor:  # [dim / 2], positions per radian
    return torch.pow(spec.theta, _exponents(spec))


def _exponents(spec: RopeSpec) -> Tensor:  # [dim / 2]
    return torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim


def _dynamic(spec: RopeSpec, plain: Tensor, steps: Tensor) -> Tensor:  # [rows, dim / 2]
    """NTK-aware scaling by length: theta times (factor * length / original - (factor - 1)) ** (dim / (dim - 2))."""
    lengths = (steps.double() + 1).clamp_(min=spec.original)
    stretch = spec.factor * lengths / spec.original - (spec.factor - 1.0)
    theta = spec.theta * stretch ** (spec.dim / (spec.dim - 2))
    longer = 1.0 / theta ** _exponents(spec).double()
    return torch.where(lengths > spec.original, longer.float(), plain)


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:  # [dim / 2]
    """Llama 3.1: short waves stay, waves longer than original / low_freq_factor are stretched, a ramp between."""
    waves_in_context = spec.original / (2 * math.pi / plain)
    keep = (waves_in_context - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / spec.factor + keep * plain


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:  # [dim / 2]
    """YaRN (arXiv 2309.00071, section 3.2): by turns in the original context, below beta_slow a frequency is
    stretched, above beta_fast it is kept, a ramp between.
    """

    def turns_at(turns: float) -> float:  # index of the frequency that makes this many turns
        return spec.dim * math.log(spec.original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = turns_at(spec.beta_fast), turns_at(spec.beta_slow)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(spec.dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    keep = 1 - stretched
    return 1.0 / (spec.factor * _periods(spec)) * (1 - keep) + plain * keep


def _attention_factor(spec: RopeSpec) -> float:
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "longrope":
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original)) if spec.factor > 1 else 1.0
    if spec.mscale and spec.mscale_all_dim:
        return yarn_scale(spec.factor, spec.mscale) / yarn_scale(spec.factor, spec.mscale_all_dim)
    return yarn_scale(spec.factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's multiplier of attention for a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
