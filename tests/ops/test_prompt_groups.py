"""Attention of prompts by groups of warps with roles, emulated: its values, and that roles do not wait for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.emulated_gluon import Emulated
from tests.ops.samples.common import normal
from tests.ops.test_triton import INTERPRETED, pytestmark
from tokserve.gpu.kernels import attention
from tokserve.gpu.kernels.prompts import by_groups
from tokserve.ops.registry import OPS

__all__ = ["pytestmark"]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    if not INTERPRETED:
        pytest.skip("a GPU runs the kernel itself")
    kernel = Emulated(by_groups.prompt_kernel)
    monkeypatch.setattr(by_groups, "prompt_kernel", kernel)
    monkeypatch.setattr(by_groups, "multiprocessors", lambda device: 3)  # programs, each with several tiles
    yield kernel
    assert kernel.runs


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "has_sinks"),
    [
        (8, 2, 64, 0, False),
        pytest.param(7, 1, 64, 100, True, marks=pytest.mark.slow),
        pytest.param(2, 2, 128, 0, True, marks=pytest.mark.slow),
    ],
)
def test_groups_of_warps_attend_as_prefill_does(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    has_sinks: bool,
    emulated: Emulated,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts, a chunk late in its row, one that ends in a page whose rest is no number, and a row of one token."""
    lengths, queries, page = [300, 530, 70, 64, 9], [300, 40, 70, 3, 1], 64
    widths = [-(-length // page) for length in lengths]
    caches = normal(torch.float16, 1, 2, sum(widths), kv_heads, page, dim)
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    places = iter(torch.randperm(sum(widths), generator=torch.Generator().manual_seed(2)).tolist())
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        pages = [next(places) for _ in range(width)]
        tables[row, :width] = torch.tensor(pages)
        caches[:, pages[-1], :, (length - 1) % page + 1 :] = torch.nan
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = normal(torch.float16, 3, sum(queries), heads + 2 * kv_heads, dim)[:, :heads]  # as projections leave it
    sinks = normal(torch.float32, 4, heads) if has_sinks else None
    arguments = (q, *caches.unbind(), tables, starts, torch.tensor(lengths, dtype=torch.int32), dim**-0.5, window)
    call = OPS["paged_attention"].implementations["triton"].call
    expected = call(*arguments, 1.0, 0.0, sinks)
    assert expected.isfinite().all()
    monkeypatch.setattr(attention.by_groups, "fits", lambda *of_step: True)
    torch.testing.assert_close(call(*arguments, 1.0, 0.0, sinks), expected, atol=2e-3, rtol=2e-3)
