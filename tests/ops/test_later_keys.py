"""GPU attention of rows whose queries see the keys after themselves, too: images' and encoders'.

Kernels run in Triton's interpreter; with TRITON_INTERPRET=0, on a GPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.test_exact import Paged
from tests.ops.test_ops import close
from tests.ops.test_triton import DTYPES, INTERPRETED, TOLERANCE, on_device, pytestmark
from tokserve.ops.registry import OPS

__all__ = ["pytestmark"]


@pytest.mark.parametrize("window", [0, pytest.param(70, marks=pytest.mark.slow)])
def test_rows_that_see_later_keys_have_the_same_bits_in_any_parts(window: int) -> None:
    """Whole, from any query on, and the last queries alone, which the kernel of decode takes; beside causal rows."""
    dtype = DTYPES[0] if INTERPRETED else DTYPES[-1]
    paged = Paged([270, 12], 2, 1, 16, page=64, window=window, dtype=dtype, store=OPS["store_kv"].reference)
    call = on_device("paged_attention")
    all_rows, causal = paged.attend(call, [(0, 0, 270), (1, 0, 12)], [True, False])
    expected = torch.cat(paged.attend(OPS["paged_attention"].reference, [(0, 0, 270), (1, 0, 12)], [True, False]))
    close(torch.cat([all_rows, causal]), expected, TOLERANCE["paged_attention", dtype])
    assert torch.equal(causal, paged.attend(call, [(1, 0, 12)])[0])
    for start in (100, 268):
        rest, other = paged.attend(call, [(0, start, 270), (1, 0, 12)], [True, False])
        assert torch.equal(rest, all_rows[start:]) and torch.equal(other, causal)
    alone = paged.attend(call, [(0, 269, 270), (1, 11, 12)], [True, False])  # a query a row: the kernel of decode only
    assert torch.equal(alone[0], all_rows[269:]) and torch.equal(alone[1], causal[11:])
