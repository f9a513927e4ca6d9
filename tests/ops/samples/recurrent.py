"""Sample inputs of the ops whose layers have a state, and of the gates of heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.ops.samples.common import Samples, normal

Row = tuple[int, int, int, int]  # new tokens, length, and the positions of the state before and after
ROWS: tuple[tuple[tuple[Row, ...], tuple[tuple[int, int, int], ...]], ...] = (  # and saves: row, position, state row
    (((1, 1, 0, 1),), ()),
    (((9, 9, 0, 9), (1, 40, 39, 40), (2, 5, 9, 9), (3, 70, 64, 68)), ((0, 4, 5), (0, 8, 6), (3, 66, 7))),
    (((1, 16, 16, 16), (45, 45, 0, 45), (6, 106, 100, 101)), ((-1, 0, 0),)),
    (((5, 5, 0, 1), (2, 9, 4, 8)), ((0, 1, 4), (1, 5, 3), (1, 8, 6))),
)
DRAFTS = 5  # inputs that a ring has beyond its taps


def columns(rows: tuple[Row, ...], saves: tuple[tuple[int, int, int], ...]) -> tuple[Tensor, ...]:
    """query_start, seq_lens, state_rows, start, end and saves; each row's state is in the row of its number."""
    new, length, start, end = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    query_start = torch.cat((torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()))
    index = torch.arange(len(rows))
    if len(rows) > 3:
        index[2] = -1  # no state
    return query_start, length, index, start, end, torch.tensor(saves, dtype=torch.int32).view(-1, 3)


def gated_delta(dtype: torch.dtype) -> Samples:
    shapes = (
        (2, 1, 16, 16, 4),
        (1, 2, 8, 5, 3),
        (2, 3, 20, 36, 2),
        (1, 1, 64, 64, 4),
    )  # k heads, v per k, Dk, Dv, taps
    for number, (rows, saves) in enumerate(ROWS):
        for key_heads, group, key_dim, value_dim, taps in shapes:
            heads, tokens = key_heads * group, sum(row[0] for row in rows)
            channels, values = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim
            yield (
                normal(dtype, 1, tokens, channels + values),
                normal(dtype, 2, tokens, 2 * heads),
                normal(torch.float32, 3, taps, channels),
                normal(torch.float32, 4, heads),
                normal(torch.float32, 5, heads),
                normal(torch.float32, 6, value_dim),
                1e-6,
                number % 2 == 1,
                normal(torch.float32, 7, 8, heads, key_dim, value_dim),
                normal(dtype, 8, 8, taps + DRAFTS, channels + 2 * heads),
                *columns(rows, saves),
            )


def large_scan() -> tuple[Any, ...]:
    """Work for several threads."""
    bf16, f32 = torch.bfloat16, torch.float32
    vectors = (normal(f32, seed, 8) for seed in (3, 4, 5))
    return (
        *(normal(bf16, 1, 70, 256 + 320 + 8), normal(f32, 2, 4, 320), normal(f32, 6, 320), *vectors),
        *(normal(f32, 7, 256), 256, 1e-5, 0.0, torch.inf, normal(f32, 8, 9, 8, 32, 32), normal(bf16, 9, 9, 6, 328)),
        *columns(((50, 50, 0, 50), (20, 30, 8, 28)), ((0, 16, 5), (1, 20, 6))),
    )


def wrong_scans() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls of `scan_states` with an argument that must be refused, and what is wrong with it."""
    f32 = torch.float32
    vector = normal(f32, 1, 2)
    scan: tuple[Any, ...] = (
        *(normal(f32, 2, 5, 8 + 24 + 2), normal(f32, 3, 2, 24), normal(f32, 4, 24), vector, vector, vector),
        *(normal(f32, 5, 8), 8, 1e-6, 0.0, 1.0, normal(f32, 6, 3, 2, 8, 4), normal(f32, 7, 3, 4, 26)),
        *columns(((2, 6, 4, 6), (3, 3, 0, 2)), ((0, 5, 2),)),
    )
    for what, at, wrong in (
        ("width", 0, normal(f32, 2, 5, 33)),
        ("dtype", 0, scan[0].half()),
        ("channels", 1, normal(f32, 3, 2, 23)),
        ("conv bias", 2, normal(f32, 4, 23)),
        ("heads", 3, normal(f32, 1, 3)),
        ("bias", 4, vector.double()),
        ("skip", 5, vector[:1]),
        ("norm", 6, normal(f32, 5, 9)),
        ("norm size", 7, 3),
        ("state", 11, normal(f32, 6, 3, 3, 8, 4)),
        ("ring", 12, normal(f32, 7, 3, 4, 25)),
        ("rings", 12, normal(f32, 7, 2, 4, 26)),
        ("a row outside", 15, torch.tensor([0, 3])),
    ):
        yield what, (*scan[:at], wrong, *scan[at + 1 :])


def short_conv(dtype: torch.dtype) -> Samples:
    for rows, saves in ROWS:
        for channels, taps, biased in ((64, 3, False), (5, 4, True), (300, 2, True)):
            yield (
                normal(dtype, 1, sum(row[0] for row in rows), 3 * channels),
                normal(torch.float32, 2, taps, channels),
                normal(torch.float32, 3, channels) if biased else None,
                normal(dtype, 4, 8, taps + DRAFTS, channels),
                *columns(rows, saves),
            )


def scan_states(dtype: torch.dtype) -> Samples:
    shapes = ((4, 2, 16, 16, 4, True), (5, 1, 8, 5, 3, False), (6, 2, 20, 36, 2, True))  # H, G, N, P, taps, biased
    for number, (rows, saves) in enumerate(ROWS):
        for heads, groups, size, dim, taps, biased in shapes:
            tokens, inner = sum(row[0] for row in rows), heads * dim
            channels = inner + 2 * groups * size
            yield (
                normal(dtype, 1, tokens, inner + channels + heads),
                normal(torch.float32, 2, taps, channels),
                normal(torch.float32, 3, channels) if biased else None,
                normal(torch.float32, 4, heads),
                normal(torch.float32, 5, heads),
                normal(torch.float32, 6, heads),
                normal(torch.float32, 7, inner) if number % 2 else None,
                inner // groups if biased else inner,
                1e-5,
                0.01,
                torch.inf if biased else 1.0,
                normal(torch.float32, 8, 8, heads, size, dim),
                normal(dtype, 9, 8, taps + DRAFTS, channels + heads),
                *columns(rows, saves),
            )


def gate_heads(dtype: torch.dtype) -> Samples:
    for tokens, heads, dim, more in ((1, 2, 16, 0), (7, 3, 5, 30), (0, 1, 8, 8), (33, 4, 64, 128)):
        yield normal(dtype, tokens, tokens, heads, dim), normal(dtype, 1, tokens, 2 * heads * dim + more)
