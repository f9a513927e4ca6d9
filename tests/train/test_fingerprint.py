"""A tensor's fingerprint notices what a plain sum of its memory would not."""

from __future__ import annotations

import pytest
import torch

from tokserve.train.fingerprint import fingerprint


@pytest.mark.parametrize("size", [65, 4099, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_that_cancel_are_noticed(dtype: torch.dtype, size: int) -> None:
    """Adam's first step changes every weight by the learning rate, up or down."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.ones(size, dtype=dtype)
    bits = weights.view(torch.int32 if dtype == torch.float32 else torch.int16)
    seen = {fingerprint(weights)}
    for _ in range(20):
        before = bits.clone()
        for pair in torch.randperm(size // 2 * 2, generator=generator).view(-1, 2)[:200]:
            bits[pair[0]] += 17
            bits[pair[1]] -= 17
        assert int(bits.long().sum()) == int(before.long().sum())
        seen.add(fingerprint(weights))
    assert len(seen) == 21


def test_equal_values_have_one_fingerprint() -> None:
    weights = torch.randn(70, 130)
    assert fingerprint(weights) == fingerprint(weights.clone()) == fingerprint(weights.t().contiguous().t())
    assert fingerprint(weights) != fingerprint(weights.flip(0))
    assert fingerprint(torch.zeros(8)) != fingerprint(torch.zeros(8, dtype=torch.bfloat16))
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0))
