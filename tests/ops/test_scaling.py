"""Rows and heads times factors, norms of values, gates of inputs: what they compute, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.samples.common import normal
from tokserve.ops.registry import OPS

FLOAT32 = torch.float32
X, HEADS = normal(FLOAT32, 1, 3, 64), normal(FLOAT32, 2, 3, 2, 32)
FACTORS, POSITIONS = normal(FLOAT32, 3, 3), torch.tensor([0, 15, 4000])
MALFORMED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "positions: too few": ("scale_by_position", (HEADS, POSITIONS[:2], 0.1, 4)),
    "positions: no period": ("scale_by_position", (HEADS, POSITIONS, 0.1, 0)),
    "factors: too few": ("scale_rows", (X, FACTORS[:2])),
    "factors: dtype": ("scale_rows", (X, FACTORS.half())),
    "values: too many heads": ("norm_values", (X, 3, 32, 1e-6)),
    "choices: no such expert": ("scale_choices", (X, torch.full((3, 64), 3).int(), FACTORS)),
    "choices: dtype of ids": ("scale_choices", (X, torch.zeros(3, 64).long(), FACTORS)),
    "inputs: no such layer": ("gate_inputs", (X, X, 1, "silu")),
    "inputs: other rows": ("gate_inputs", (X, X[:2], 0, "silu")),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_arguments_are_refused(case: str) -> None:
    op, arguments = MALFORMED[case]
    with pytest.raises(ValueError, match=op):
        OPS[op].implementations["cpp"].call(*arguments)


@pytest.mark.parametrize("first", [0, 1])
def test_the_factor_is_one_before_the_first_period_and_grows_by_whole_periods(first: int) -> None:
    for name in OPS["scale_by_position"].available("cpu"):
        scaled = OPS["scale_by_position"].implementations[name].call(HEADS, POSITIONS, 0.3, 16, first)
        wholes = torch.tensor([0.0, first, 250.0], dtype=torch.float64)
        expected = HEADS.double() * (1 + 0.3 * (1 + wholes).log())[:, None, None]
        assert torch.equal(scaled[0], HEADS[0])
        torch.testing.assert_close(scaled, expected.float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("copied", [False, True])
def test_values_are_normed_in_place_of_the_last_heads_or_behind_them(copied: bool) -> None:
    for name in OPS["norm_values"].available("cpu"):
        out = OPS["norm_values"].implementations[name].call(X, 2, 16, 1e-6, copied)
        kept = 64 if copied else 32
        heads = X[:, 32:].double().view(3, 2, 16)
        expected = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        assert torch.equal(out[:, :kept], X[:, :kept])
        torch.testing.assert_close(out[:, kept:].view(3, 2, 16), expected.float(), rtol=1e-5, atol=1e-6)
