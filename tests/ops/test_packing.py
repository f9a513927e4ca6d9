"""Weights that are packed in parts are those that are packed at once, whatever the parts are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tokserve import ops  # noqa: F401  (declares the ops)
from tokserve.ops import registry
from tokserve.ops.registry import OPS
from tokserve.ops.wna16 import SIGNED, QuantizedRows

registry.load_extension("cpu")
SHAPES = [(1, 1), (64, 64), (70, 33), (200, 64), (131, 7), (320, 130), (96, 18)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EACH = [(name, op) for op in ("pack_linear", "pack_gated") for name in OPS[op].available("cpu")]
INTEGERS = [
    (name, op)
    for op in ("pack_linear_int8", "pack_gated_int8", "pack_int4", "pack_gated_int4")
    for name in OPS[op].available("cpu")
]


def normal(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def packed_in_parts(pack: Any, weight: Tensor, cuts: list[int], order: list[int]) -> Any:
    packed = None
    for part in order:
        rows = weight[cuts[part] : cuts[part + 1]]
        packed = pack(rows, len(weight), cuts[part], packed)
    assert packed is not None
    return packed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "op"), EACH)
def test_parts_in_any_order_make_the_whole(name: str, op: str, dtype: torch.dtype) -> None:
    pack, rng = OPS[op].implementations[name].call, random.Random(1)
    for outputs, columns in SHAPES:
        rows = 2 * outputs if op == "pack_gated" else outputs
        wide = normal(rows, columns + 3, dtype)
        transposed = wide[:, 1 : columns + 1].t().contiguous().t()
        for weight in (wide[:, :columns].contiguous(), wide[:, 3:], wide[:, 2 : columns + 2], transposed):
            expected = pack(weight)
            assert torch.equal(expected.unpacked(0, rows), weight)
            for count in (1, 2, 5):
                inner = sorted(rng.sample(range(1, rows), min(count - 1, rows - 1)))
                cuts = [0, *inner, rows]
                order = rng.sample(range(len(cuts) - 1), len(cuts) - 1)
                packed = packed_in_parts(pack, weight, cuts, order)
                assert torch.equal(packed.packed.view(torch.uint8), expected.packed.view(torch.uint8))
                assert (packed.rows, packed.columns, packed.dtype) == (expected.rows, expected.columns, expected.dtype)


@pytest.mark.parametrize(("name", "op"), [one for one in EACH if one[0] != registry.REFERENCE])
def test_rows_outside_the_weight_are_refused(name: str, op: str) -> None:
    pack = OPS[op].implementations[name].call
    packed = pack(normal(4, 8, torch.float32), 10, 0)
    for weight, first in ((normal(4, 8, torch.float32), 7), (normal(4, 8, torch.float32), -1)):
        with pytest.raises(ValueError, match="not all within"):
            pack(weight, 10, first, packed)
    for weight in (normal(4, 7, torch.float32), normal(4, 8, torch.bfloat16)):
        with pytest.raises(ValueError, match="wrong size or dtype"):
            pack(weight, 10, 0, packed)
    if op == "pack_gated":
        with pytest.raises(ValueError, match="even number"):
            pack(normal(3, 8, torch.float32))


def tensors(packed: Any) -> list[Tensor]:
    """All that an integer weight is kept in."""
    (part,) = packed.parts if hasattr(packed, "parts") else (packed,)
    return [part.packed.view(torch.uint8), part.scales]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "op"), INTEGERS)
def test_rounded_parts_make_the_whole(name: str, op: str, dtype: torch.dtype) -> None:
    call, rng = OPS[op].implementations[name].call, random.Random(2)

    def pack(weight: Tensor, *rest: Any) -> Any:
        return call(weight, 32, False, *rest) if op.endswith("int4") else call(weight, *rest)

    for outputs, columns in SHAPES:
        rows = 2 * outputs if "gated" in op else outputs
        weight = normal(rows, columns + 3, dtype)[:, 1 : columns + 1]
        expected = tensors(pack(weight))
        for count in (2, 5):
            cuts = [0, *sorted(rng.sample(range(1, rows), min(count - 1, rows - 1))), rows]
            order = rng.sample(range(len(cuts) - 1), len(cuts) - 1)
            packed = tensors(packed_in_parts(pack, weight, cuts, order))
            assert all(torch.equal(one, other) for one, other in zip(packed, expected, strict=True))


@pytest.mark.parametrize(("name", "op"), [one for one in INTEGERS if one[1].endswith("int4")])
def test_int4_is_packed_as_the_rounded_weight(name: str, op: str) -> None:
    other = {"pack_int4": "pack_wna16", "pack_gated_int4": "pack_gated_wna16"}[op]
    for outputs, columns in SHAPES:
        weight = normal(2 * outputs, columns, torch.bfloat16)
        codes, scales = OPS["quantize_int4"].implementations[name].call(weight, 32)
        expected = OPS[other].implementations[name].call((QuantizedRows(codes, SIGNED, 32, scales),))
        packed = OPS[op].implementations[name].call(weight, 32)
        assert all(torch.equal(one, two) for one, two in zip(tensors(packed), tensors(expected), strict=True))
        assert packed.handle is None or (packed.gated, packed.rows) == (expected.gated, expected.rows)
