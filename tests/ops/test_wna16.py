"""Products with integer weights against float64, for any number of rows, and as the bfloat16 products that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.samples.common import normal
from tests.ops.samples.wna16 import E2M1, weights
from tokserve import ops  # noqa: F401  (declares the ops)
from tokserve.families.quantization.quantized import QuantizedWeight, quantize_int4
from tokserve.ops import registry
from tokserve.ops.quant import quantize_rows
from tokserve.ops.registry import OPS
from tokserve.ops.wna16 import QuantizedRows

registry.load_extension("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = OPS["linear_wna16"].available("cpu")


ISAS: list[str] = []
if "cpp" in IMPLEMENTATIONS:
    from tokserve import _C

    ISAS = [*_C.instruction_sets(), *(["amx_software"] if "avx512_bf16" in _C.instruction_sets() else [])]


@pytest.fixture
def selected() -> Iterator[Callable[[str], None]]:
    """Selects an instruction set, for a test."""
    before = _C.instruction_set()
    yield _C.select
    _C.select(before)


def call(name: str, op: str, *arguments: Any) -> Any:
    return OPS[op].implementations[name].call(*arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_products_are_those_of_the_dequantized_weight(name: str, dtype: torch.dtype) -> None:
    for columns, rows in ((512, 70), (264, 9), (20, 130)):
        for weight in weights(rows, columns):
            x = normal(dtype, 1, 5, columns)
            result = call(name, "linear_wna16", x, call(name, "pack_wna16", [weight]), None, torch.float32)
            dense = weight.dense().to(dtype if weight.float8 else torch.float32).double()
            expected = x.double() @ dense.t()
            bound = (x.double().abs() @ dense.abs().t()) * 2e-6 + 1e-6
            terms = sum(weight.by_group()[i].abs().sum(1) for i in (0, 1) if weight.by_group()[i] is not None)
            assert ((result.double() - expected).abs() <= bound + 2e-6 * terms * x.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    x = normal(dtype, 1, 70, 200)
    for weight in weights(130, 200):
        for op, pack in (("linear_wna16", "pack_wna16"), ("gated_linear_wna16", "pack_gated_wna16")):
            packed = call(name, pack, [weight])
            result = call(name, op, x, packed, None, None)
            for size in (1, 2, 5, 6, 7, 13, 64):
                assert torch.equal(call(name, op, x[70 - size :], packed, None, None), result[70 - size :])


def integers(rows: int, columns: int) -> list[QuantizedRows]:
    """The kinds of weights that are integers."""
    return [kind for kind in weights(rows, columns) if not kind.float8]


def rounding(x: Tensor, weight: QuantizedRows) -> Tensor:
    """x [T,K] with every group rounded to 127 steps of its largest magnitude, in the order of the weight's columns."""
    ordered = x.float() if weight.order is None else x.float()[:, weight.order.long()]
    rows = (quantize_rows.reference(part) for part in ordered.split(weight.group, 1))
    groups = [values.double() * scales.double()[:, None] for values, scales in rows]
    return torch.cat(groups, 1)


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "triton"])
def test_rounded_activations(name: str, dtype: torch.dtype) -> None:
    """They are rounded by group, and the sums have the reference's bits, whatever the batch."""
    for columns, rows in ((512, 70), (264, 9), (20, 130)):
        for weight in integers(rows, columns):
            x = normal(dtype, 1, 37, columns)
            packed = call(name, "pack_wna16", [weight], True)
            result = call(name, "linear_wna16", x, packed, None, torch.float32)
            dense = replace(weight, order=None).dense().double()
            expected = rounding(x, weight) @ dense.t()
            assert ((result.double() - expected).abs() <= (x.double().abs() @ dense.abs().t()) * 2e-5 + 1e-5).all()
            plain = call("torch", "pack_wna16", [weight], True)
            assert torch.equal(result, call("torch", "linear_wna16", x, plain, None, torch.float32))
            for size in (1, 2, 3, 5, 8):
                assert torch.equal(call(name, "linear_wna16", x[-size:], packed, None, torch.float32), result[-size:])
            assert rows % 2 or torch.equal(
                call(name, "gated_linear_wna16", x, call(name, "pack_gated_wna16", [weight], True), None, None),
                call(name, "linear_wna16", x, packed, None, None),
            )
    x[3, 5] = torch.inf
    result = call(name, "linear_wna16", x, packed, None, None)
    assert result[3].isnan().all() and result[:3].isfinite().all() and result[4:].isfinite().all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_mxfp4_has_the_bits_of_the_bfloat16_weight(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (130, 512), generator=generator, dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-12, 3, (130, 16), generator=generator).float()).to(torch.bfloat16)
    weight = QuantizedRows(codes, E2M1, 32, scales, folded=True)
    dense = weight.dense().to(torch.bfloat16)
    assert torch.equal(dense.float(), weight.dense())
    packed, plain = call(name, "pack_wna16", [weight]), call(name, "pack_linear", dense)
    for tokens in (1, 4, 7, 40):
        x = normal(torch.bfloat16, tokens, tokens, 512)
        result = call(name, "linear_wna16", x, packed, None, None)
        assert torch.equal(result, call(name, "linear", x, plain, None, None))


def float8_weight(rows: int, columns: int, group: int, seed: int = 1, block: int = 1) -> QuantizedRows:
    """Every byte of e4m3 but not-a-number; scales of many sizes, some of which make subnormal numbers, and each of
    which `block` rows share."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes = torch.where((codes & 127) == 127, 64, codes)
    powers = torch.randint(-12, 3, (-(-rows // block), -(-columns // group)), generator=generator)
    scales = torch.exp2(powers) * (1 + torch.rand(powers.shape, generator=generator))
    scales[-1] *= 2.0**-118
    return QuantizedRows(codes, None, group, scales.repeat_interleave(block, 0)[:rows].contiguous(), float8=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "group"), [(512, 128), (264, 88), (100, 100), (20, 64), (1096, 1096)])
def test_float8_has_the_bits_of_the_rounded_weight(
    isa: str, dtype: torch.dtype, columns: int, group: int, selected: Callable[[str], None]
) -> None:
    selected(isa)
    weight = float8_weight(130, columns, group)
    dense = weight.dense().to(dtype)
    for op, pack in (("linear", "pack"), ("gated_linear", "pack_gated")):
        packed = call("cpp", f"{pack}_wna16", [weight])
        plain = call("cpp", pack if op == "gated_linear" else "pack_linear", dense)
        for tokens in (1, 2, 3, 7, 40, 130):
            x = normal(dtype, tokens, tokens, columns)
            result = call("cpp", f"{op}_wna16", x, packed, None, None)
            assert torch.equal(result, call("cpp", op, x, plain, None, None))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block", [32, 128, 384])
def test_float8_in_blocks_has_the_bits_of_the_rounded_weight(
    isa: str, block: int, selected: Callable[[str], None]
) -> None:
    """Scales that all columns of a panel share, of either sign, and of sizes at which weights become subnormal or
    zero."""
    selected(isa)
    weight = float8_weight(384, 640, 64, block=block)
    factors = (1.0, -1.0, 2.0**-98, -(2.0**-87), 2.0**-110, 2.0**-118, 2.0**-140, 0.0, 2.0**99, -(2.0**110))
    weight.scales.mul_(torch.tensor(factors))
    dense = weight.dense().to(torch.bfloat16)
    x = torch.eye(640, dtype=torch.bfloat16)[5::16]  # the product is a weight, of each group some
    x[-1] = normal(torch.bfloat16, 1, 640)
    for op, pack in (("linear", "pack"), ("gated_linear", "pack_gated")):
        packed = call("cpp", f"{pack}_wna16", [weight])
        plain = call("cpp", pack if op == "gated_linear" else "pack_linear", dense)
        for rows in (*x.split(1), *x.split(2), *x.split(3), x):
            result = call("cpp", f"{op}_wna16", rows, packed, None, None)
            assert torch.equal(result, call("cpp", op, rows, plain, None, None))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_float8_keeps_not_a_number_and_infinity_where_they_are(name: str) -> None:
    for place in ("number", "scale", "infinite scale"):
        weight = float8_weight(70, 256, 128)
        weight.codes[5] = 64
        if place == "number":
            weight.codes[5, 200] = 255
        else:
            weight.scales[5, 1] = torch.inf
            if place == "scale":
                weight.scales.view(torch.int32)[5, 1] = 0x7FFFFFFF
        x = normal(torch.bfloat16, 1, 9, 256)
        for tokens in (1, 9):
            result = call(name, "linear_wna16", x[:tokens], call(name, "pack_wna16", [weight]), None, None)
            assert not result[:, 5].isfinite().any() and result[:, :5].isfinite().all()
            assert result[:, 6:].isfinite().all() and (place == "infinite scale" or result[:, 5].isnan().all())


@pytest.mark.parametrize("op", ["pack_wna16", "pack_gated_wna16"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_two_codes_in_a_byte_are_packed_as_one_in_each(name: str, op: str) -> None:
    for rows, columns in ((130, 64), (6, 40), (2, 8), (70, 36)):
        (plain,) = (kind for kind in weights(rows, columns) if kind.folded)
        codes = plain.codes[:, ::2] | plain.codes[:, 1::2] << 4
        halved = replace(plain, codes=codes, nibbles=True)
        assert halved.shape == plain.shape and torch.equal(halved.dense(), plain.dense())
        (expected,), (part,) = call(name, op, [plain]).parts, call(name, op, [halved]).parts
        assert torch.equal(part.packed, expected.packed) and part.columns == columns
        both = QuantizedWeight((halved,)).joined([QuantizedWeight((plain,))])
        assert both is not None and torch.equal(both.dense(), torch.cat([plain.dense()] * 2))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_parts_of_different_kinds_are_joined_by_rows(name: str) -> None:
    x, kinds = normal(torch.bfloat16, 1, 9, 160), [kind for kind in weights(70, 160) if kind.order is None]
    result = call(name, "linear_wna16", x, call(name, "pack_wna16", kinds), None, None)
    alone = [call(name, "linear_wna16", x, call(name, "pack_wna16", [kind]), None, None) for kind in kinds]
    assert torch.equal(result, torch.cat(alone, 1))


def test_rounding_to_nearest_is_within_half_a_step() -> None:
    weight = normal(torch.float32, 1, 40, 200)
    for group in (32, 64, 128):
        quantized = quantize_int4(weight, group)
        scales = quantized.parts[0].by_group()[0].abs().repeat_interleave(group, 1)[:, :200]
        error = (quantized.dense() - weight).abs()
        assert (error <= 0.55 * scales)[weight.abs() < 7 * scales].all() and (error <= 1.05 * scales).all()
        assert torch.equal(quantize_int4(quantized.dense(), group).dense(), quantized.dense()), "again: the same"


def test_a_weight_of_zeros_and_one_that_is_not_finite() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 3] = torch.inf
    dequantized = quantize_int4(weight, 32).dense()
    assert (
        torch.equal(dequantized[0], torch.zeros(64))
        and dequantized[1, :32].isnan().all()
        and (dequantized[1, 32:] == 0).all()
    )


@pytest.mark.parametrize("kind", range(9))
def test_parts_of_a_weight_mean_the_same_parts(kind: int) -> None:
    weight = QuantizedWeight((weights(24, 512)[kind],))
    dense = weight.dense()

    def dequantized(part: Any) -> Tensor:
        return part if isinstance(part, Tensor) else part.dense()

    assert torch.equal(dequantized(weight.narrow(0, 5, 9)), dense[5:14])
    if weight.parts[0].factors is not None:
        (part,) = weight.parts
        halved = QuantizedWeight((replace(part, codes=part.codes[:, ::2] | part.codes[:, 1::2] << 4, nibbles=True),))
        assert torch.equal(dequantized(halved.narrow(1, 256, 256)), dense[:, 256:])
    for start, length in ((0, 256), (256, 256), (7, 40)):
        assert torch.equal(dequantized(weight.narrow(1, start, length)), dense[:, start : start + length])
    joined = QuantizedWeight((weights(24, 512)[kind],)).joined([weight])
    assert joined is not None and len(joined.parts) == 1 and torch.equal(joined.dense(), torch.cat([dense, dense]))
    other = QuantizedWeight((weights(8, 512)[(kind + 1) % 9],))
    mixed = weight.joined([other])
    assert mixed is not None and torch.equal(mixed.dense(), torch.cat([dense, other.dense()]))


def test_wrong_arguments_are_refused() -> None:
    if "cpp" not in IMPLEMENTATIONS:
        pytest.skip(
            "needs the compiled extension: a C++20 compiler (Debian: apt-get install g++), then make clean install"
        )
    packed = call("cpp", "pack_wna16", weights(70, 64)[:1])
    part = packed.parts[0]

    def product(x: Tensor, **changes: Any) -> None:
        call("cpp", "linear_wna16", x, replace(packed, parts=(replace(part, **changes),)), None, None)

    x = torch.ones(2, 64)
    wrong: list[dict[str, Any]] = [
        {"columns": 72},
        {"rows": 200},
        {"group": 12},
        {"group": 0},
        {"bits": 5},
        {"ratio": 0},
        {"scales": part.scales[:1]},
        {"packed": part.packed[:-1]},
        {"factors": part.factors[:4]},
        {"order": torch.zeros(3, dtype=torch.int32)},
        {"order": torch.full((64,), 64, dtype=torch.int32)},
        {"sub_scales": torch.zeros(1, 1, 64, dtype=torch.int8)},
        {"mins": part.scales, "folded": True},
    ]
    for changes in wrong:
        with pytest.raises((ValueError, TypeError), match=r"linear_wna16|incompatible"):
            product(x, **changes)
    with pytest.raises(ValueError, match="linear_wna16"):
        product(torch.ones(2, 63))
    with pytest.raises(ValueError, match="embedding_wna16"):
        call("cpp", "embedding_wna16", torch.tensor([70]), packed, torch.float32)
