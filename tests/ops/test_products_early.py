"""Products that fetch weights before their inputs are there, emulated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.emulated_gluon import Emulated
from tests.ops.test_triton import INTERPRETED, pytestmark
from tokserve import ops
from tokserve.gpu import candidates
from tokserve.gpu.kernels import dense, gated
from tokserve.gpu.kernels.products import early
from tokserve.gpu.kernels.rows.chains import UnaddedProduct
from tokserve.ops.registry import OPS

__all__ = ["pytestmark"]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    if not INTERPRETED:
        pytest.skip("a GPU runs the kernel itself")
    kernel = Emulated(early.linear_early_kernel)
    monkeypatch.setattr(early, "linear_early_kernel", kernel)
    return kernel


def integers(seed: int, *shape: int) -> torch.Tensor:
    """Small ones, of which no sum is rounded, so that any order adds up to the same."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "has_bias"),
    [
        (3, 128, 1536, True),  # four chains of three steps
        pytest.param(16, 4160, 1280, False, marks=pytest.mark.slow),  # one of ten, more than fit in shared memory
    ],
)
def test_products_are_those_of_dense(
    rows: int, outputs: int, inputs: int, has_bias: bool, emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are not adjacent; sums in float32, gated ones, and chains that are left to the next kernel, too."""
    x, matrix = integers(1, rows, inputs + 64)[:, :inputs], integers(2, outputs, inputs)
    bias = integers(3, outputs) if has_bias else None
    packed = ops.PackedWeight(outputs, inputs, matrix.dtype, matrix)
    linear = OPS["linear"].implementations["triton"].call

    def products() -> list[torch.Tensor]:
        out = x.new_empty(rows, outputs // 2)
        gated.gated_product(x, matrix, bias, out, "silu", None)
        return [linear(x, packed, bias), linear(x, packed, bias, torch.float32), out]

    expected = products()
    assert not emulated.runs
    monkeypatch.setattr(dense.early, "fits", lambda *shapes: True)
    *sums, activated = products()
    assert all(map(torch.equal, sums, expected))
    torch.testing.assert_close(activated, expected[-1], rtol=2e-3, atol=1e-3)  # powers are torch's
    assert emulated.runs == 3
    monkeypatch.setattr(candidates, "is_on", lambda name: name == "chains_next")
    left = linear(x, packed, bias)
    assert emulated.runs == 4 and isinstance(left, UnaddedProduct) == (dense.chains(outputs, inputs) > 1)
    assert torch.equal(left, expected[0])
