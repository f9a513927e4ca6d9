"""The sort of a mixture's choices by expert on a GPU.

Kernels run in Triton's interpreter; with TRITON_INTERPRET=0, on a GPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.test_triton import DEVICE, pytestmark
from tokserve.gpu.kernels import mixture

__all__ = ["pytestmark"]


def test_choices_are_sorted_by_expert() -> None:
    """The order of a stable sort, the inverse of it, and where each expert's choices begin; some have none."""
    generator = torch.Generator().manual_seed(3)
    for tokens, k, experts in ((1, 8, 128), (5, 1, 3), (40, 4, 60), (300, 8, 17), (7, 2, 1)):
        ids = torch.randint(0, max(1, experts - experts // 3), (tokens, k), generator=generator, dtype=torch.int32)
        ids = ids.to(DEVICE)
        (order, starts), places = mixture.sorted_choices(ids, experts)
        expected = torch.sort(ids.flatten(), stable=True).indices
        assert torch.equal(order.long(), expected)
        assert torch.equal(places.long(), torch.argsort(expected))
        counts = torch.bincount(ids.flatten(), minlength=experts)
        assert torch.equal(starts.long(), torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        for rows in (16, 64):
            tiles, most = mixture.tiles_of((order, starts), rows)
            assert torch.equal(tiles.long(), ((counts + rows - 1) // rows).cumsum(0))
            assert int(tiles[-1]) <= most
