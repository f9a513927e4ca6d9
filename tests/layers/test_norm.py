from __future__ import annotations

import pytest
import torch

from tokserve.layers.norm import NormSpec, RMSNorm


def test_norm_alone_and_with_the_residual() -> None:
    norm = RMSNorm(8, NormSpec(1e-2), torch.float32)
    weight = torch.randn(8)
    norm.parameters()["weight"].load(weight)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)

    def expected(rows: torch.Tensor) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight

    torch.testing.assert_close(norm(x), expected(x))
    normed, total = norm.add(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, expected(x + residual))


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[8\], found \[1\]"):
        RMSNorm(8, NormSpec(1e-6), torch.float32).load(torch.ones(1))
