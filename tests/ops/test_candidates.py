"""Kernels on trial: that each has the bits of what it replaces (in Triton's interpreter), and how they are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.gpu import candidates, trial
from tokserve.gpu.options import GpuOptions, check

pytest.importorskip("triton")

from tests.ops.packing import pack_arguments
from tests.ops.samples import samples
from tests.ops.samples.common import normal as randn
from tests.ops.test_exact import Paged
from tests.ops.test_triton import DTYPES, INTERPRETED, on_device, pytestmark, to_device
from tokserve.gpu.kernels import attention, dense
from tokserve.gpu.kernels.products import by_tma
from tokserve.gpu.kernels.rows import rounded
from tokserve.gpu.kernels.rows.chains import UnaddedProduct
from tokserve.gpu.kernels.rows.rounded import RoundedRows, quantize
from tokserve.ops.registry import OPS

__all__ = ["pytestmark"]


@pytest.fixture(autouse=True)
def none_in_use() -> Iterator[None]:
    candidates.use(())
    yield
    candidates.use(candidates.selected(None, ""))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [(4, 1, 0), pytest.param(2, 2, 100, marks=pytest.mark.slow), pytest.param(20, 1, 0, marks=pytest.mark.slow)],
)
def test_low_tiles_of_decode_have_the_bits_of_high_ones(heads: int, kv_heads: int, window: int) -> None:
    """A token, drafts that fit a low tile and drafts that do not, beside a prompt; 20 heads of a group need 32 rows."""
    dtype = torch.float16 if INTERPRETED else DTYPES[-1]
    store = OPS["store_kv"].reference
    paged = Paged([300, 70, 140, 40], heads, kv_heads, 32, page=64, window=window, dtype=dtype, store=store)
    paged.attend(lambda q, *rest: q, [(row, 0, length) for row, length in enumerate(paged.lengths)])  # stores
    call = on_device("paged_attention")
    spans = [(0, 299, 300), (1, 67, 70), (2, 130, 140), (3, 0, 40)]
    high = paged.attend(call, spans)
    candidates.use({"decode_tile"})
    q = torch.empty(4, heads, 32, dtype=dtype)
    assert attention.divide(q, paged.caches[0], paged.tables).tile == (16 if heads // kv_heads <= 16 else 32)
    for one, other in zip(paged.attend(call, spans), high, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "has_bias"),
    [
        (70, 96, 1024, False),  # four chains
        pytest.param(200, 150, 72, True, marks=pytest.mark.slow),
        pytest.param(131, 130, 1024, True, marks=pytest.mark.slow),
    ],
)
def test_products_by_tma_have_the_bits_of_others(rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    dtype = torch.float16 if INTERPRETED else DTYPES[-1]
    x, matrix = randn(dtype, 1, rows, inputs), randn(dtype, 2, outputs, inputs)
    bias = randn(dtype, 3, outputs) if has_bias else None
    packed = ops.PackedWeight(outputs, inputs, dtype, to_device(matrix))
    linear, gated = (OPS[name].implementations["triton"].call for name in ("linear", "gated_linear"))

    def products() -> list[torch.Tensor]:
        arguments = to_device(x), packed, None if bias is None else to_device(bias)
        return [linear(*arguments), linear(*arguments, torch.float32), gated(*arguments, "silu")]

    expected = products()
    candidates.use({"linear_tma"})
    assert by_tma.fits(to_device(x), packed.packed, dense.chains(outputs, inputs))
    assert not by_tma.fits(to_device(x)[:64], packed.packed) and not by_tma.fits(to_device(x).float(), packed.packed)
    for one, other in zip(products(), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("group", [0, pytest.param(128, marks=pytest.mark.slow)])
def test_float8_products_by_tma_have_the_bits_of_others(group: int) -> None:
    values, scales = (randn(torch.float32, seed, *size) for seed, size in ((2, (96, 256)), (4, (2, 96))))
    packed = OPS["pack_linear_float8"].implementations["triton"].call(to_device(values))
    if group:
        packed = ops.PackedFloat8(96, 256, packed.packed, to_device(scales.abs()), group)
    x = to_device(randn(torch.float16 if INTERPRETED else DTYPES[-1], 1, 70, 256))
    linear = OPS["linear_float8"].implementations["triton"].call
    expected = linear(x, packed, None)
    candidates.use({"float8_tma"})
    assert by_tma.fits(packed.packed, packed.packed)
    assert torch.equal(linear(x, packed, None), expected)


@pytest.mark.parametrize(
    ("name", "most"),
    [("experts", 1), *(pytest.param(name, 17, marks=pytest.mark.slow) for name in ("experts", "experts_int8"))],
)
def test_gated_experts_have_the_bits_of_a_product_and_a_gate(name: str, most: int) -> None:
    """Experts with biases and without, more rows than a tile has, and an activation that is left to two kernels."""
    call = OPS[name].implementations["triton"].call
    for number, unpacked in enumerate(samples(name, torch.float16 if INTERPRETED else DTYPES[-1])):
        if INTERPRETED and len(unpacked[0]) > most:
            continue
        arguments = pack_arguments(name, "triton", tuple(map(to_device, unpacked)))
        candidates.use(())
        expected = call(*arguments)
        candidates.use({"experts_gated", "experts_dependent"})
        assert torch.equal(call(*arguments), expected), number


@pytest.mark.parametrize("name", ["add_rms_norm", "layer_norm", "silu_mul", "activate"])
def test_rows_are_rounded_by_the_kernel_that_computes_them_as_by_another(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with zeros, an infinity, not-a-number and tiny numbers among them."""
    width, dtype = 200, torch.float16 if INTERPRETED else DTYPES[-1]
    monkeypatch.setattr(rounded, "_widths", {width})
    x, residual = randn(dtype, 1, 6, width * (1 + (name == "silu_mul"))), randn(dtype, 2, 6, width)
    x[1], residual[1], x[2, 5], x[3, -1], x[4] = 0.0, 0.0, float("inf"), float("nan"), 1e-6
    weight = randn(dtype, 3, width)
    rest: dict[str, tuple[object, ...]] = {
        "add_rms_norm": (residual, weight, 1e-6, 0.5),
        "layer_norm": (weight, weight, 1e-6),
        "silu_mul": (),
        "activate": ("relu2", False),
    }
    arguments = [to_device(value) if isinstance(value, torch.Tensor) else value for value in (x, *rest[name])]
    call = OPS[name].implementations["triton"].call

    def rows() -> torch.Tensor:
        result: torch.Tensor = call(*arguments)[0] if name == "add_rms_norm" else call(*arguments)
        return result

    expected = rows()
    assert type(expected) is torch.Tensor
    values, scales = quantize(expected)
    assert scales[2:4].isnan().all() and scales[[0, 1, 4, 5]].isfinite().all()
    candidates.use({"float8_rows"})
    result = rows()
    assert isinstance(result, RoundedRows) and result.rounded is quantize(result)
    assert torch.equal(result.rounded[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(result.rounded[1].view(torch.int32), scales.view(torch.int32))
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
    monkeypatch.setattr(rounded, "_widths", {width + 8})
    assert type(rows()) is torch.Tensor, "no float8 weight has so many inputs"


def test_rows_that_torch_may_have_changed_are_rounded_again() -> None:
    candidates.use({"float8_rows"})
    packed = OPS["pack_linear_float8"].implementations["triton"].call(to_device(randn(torch.float32, 1, 8, 48)))
    x = OPS["activate"].implementations["triton"].call(to_device(randn(torch.float16, 2, 3, 48)), "relu")
    assert isinstance(x, RoundedRows) and x.rounded is not None, "a weight of 48 inputs has been packed"
    assert x.shape == (3, 48) and x.new_empty(2).shape == (2,) and x.rounded is not None
    linear = OPS["linear_float8"].implementations["triton"].call
    first, others = x.narrow(0, 0, 1), torch.cat([x, x])
    assert type(first) is type(others) is torch.Tensor and x.rounded is None
    first.mul_(3.0)
    assert torch.equal(linear(x, packed, None), linear(x.clone(), packed, None))


@pytest.mark.parametrize(("outputs", "has_bias"), [(96, True), pytest.param(2112, False, marks=pytest.mark.slow)])
def test_chains_that_the_next_kernel_adds_have_the_bits_of_those_that_a_product_adds(
    outputs: int, has_bias: bool
) -> None:
    """Four chains, or two: norms with a residual and without, rotation, and what else reads or changes a product."""
    dtype, rows = torch.float16 if INTERPRETED else DTYPES[-1], 3
    shapes = (rows, 1024), (outputs, 1024), (rows, outputs), (outputs,), (outputs,)
    x, matrix, residual, weight, bias = (to_device(randn(dtype, seed, *shape)) for seed, shape in enumerate(shapes))
    packed = ops.PackedWeight(outputs, 1024, dtype, matrix)
    table, positions = to_device(randn(torch.float32, 6, 9, 32)), torch.arange(rows, device=x.device)
    call = {name: op.implementations["triton"].call for name, op in OPS.items() if "triton" in op.implementations}

    def results() -> list[torch.Tensor]:
        products = [call["linear"](x, packed, bias if has_bias else None) for _ in range(6)]
        assert {isinstance(one, UnaddedProduct) for one in products} == {candidates.is_on("chains_next")}
        caches = torch.zeros(2, 2, 1, 16, 32, dtype=dtype, device=x.device)
        added = [
            call["rms_norm"](products[0], weight, 1e-6),
            *call["add_rms_norm"](products[0], residual, weight, 1e-6, 0.5),
            *call["add_layer_norm"](products[1], residual, weight, bias, 1e-6),
            call["norm_rope_store"](products[2], weight[:32], bias[:32], 1e-6, table, positions, *caches, positions),
            caches,
        ]
        unread = [one for one in products if isinstance(one, UnaddedProduct) and one.parts is not None]
        assert len(unread) == (6 if candidates.is_on("chains_next") else 0), "a kernel has added them for these"
        products[4].mul_(2.0)
        return [*added, call["silu_mul"](products[2]), products[3] + 1.0, products[4], *products[5].chunk(2, 1)]

    expected = results()
    candidates.use({"chains_next"})
    for one, other in zip(results(), expected, strict=True):
        assert torch.equal(one, other)
    assert type(call["linear"](x, packed, None, torch.float32)) is torch.Tensor
    assert type(call["linear"](x.repeat(6, 1), packed, None)) is torch.Tensor, "too many rows"


@pytest.mark.slow
def test_few_ids_are_drawn_as_from_filtered_logits() -> None:
    few, cut, draw, score = (on_device(name) for name in ("sample_few", "filter_logits", "sample", "logprobs"))
    for logits, seeds, positions, greedy, temperature, *limits, scaled, k in islice(
        samples("sample_few", DTYPES[0]), 1
    ):
        top = max(k, 0)
        ids, finite, *columns = few(logits, seeds, positions, greedy, temperature, *limits, scaled, top)
        cleared = logits.where(logits.amax(1).isfinite()[:, None], 0.0)
        divided = cleared / temperature.where(temperature != 0.0, 1.0)[:, None]
        assert torch.equal(finite, logits.amax(1).isfinite())
        assert torch.equal(ids, draw(cut(divided, *limits, True), seeds, positions, greedy))
        expected = score(cleared, ids, k, None, temperature if scaled else None)
        assert all(torch.equal(one, other) for one, other in zip(columns, expected, strict=True))


def test_names_come_from_the_option_or_from_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "FILE", tmp_path / "tokserve" / "gpu.json")
    assert candidates.selected(None, "H200") == []
    candidates.store("H200", ["decode_tile", "of another release"])
    candidates.store("H100", [])
    assert candidates.selected(None, "H200") == ["decode_tile"] and candidates.selected(None, "H100") == []
    assert candidates.selected("none", "H200") == [] and candidates.selected("all", "") == list(candidates.BY_NAME)
    assert candidates.selected("decode_early, decode_tile", "H200") == ["decode_early", "decode_tile"]
    candidates.FILE.write_text('["no", "table"]')
    assert candidates.selected(None, "H200") == []


def test_a_start_refuses_a_candidate_that_does_not_exist() -> None:
    config = Config.make(gpu_candidates="decode_tile")
    check(config)
    assert config.options_of(GpuOptions).gpu_candidates == "decode_tile"
    with pytest.raises(StartError, match="gpu_candidates: unknown candidate 'fast'; there are: decode_tile,"):
        check(Config.make(gpu_candidates="fast"))


def test_a_start_goes_without_candidates_that_fail() -> None:
    def check() -> list[str]:
        if candidates.is_on("decode_tile"):
            raise RuntimeError("out of resource")
        return ["the head"]

    candidates.use({"decode_tile", "decode_early"})
    assert trial.without_unequal(check, (RuntimeError,)) == ["the head"]
    assert candidates.in_use() == []
    candidates.use({"decode_tile"})
    with pytest.raises(RuntimeError, match="out of resource"):
        trial.without_unequal(check, (OSError,))


@pytest.mark.parametrize("form", [tuple, torch.Tensor, RoundedRows])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_start_goes_without_candidates_that_change_bits(
    wrong: bool, form: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change a tensor, one of a pair, or what is made of rows that the next op takes in another form."""

    def cap(x: torch.Tensor, *rest: float) -> object:
        result = x + (2**-20 if wrong and candidates.is_on("decode_tile") else 0.0)
        if form is RoundedRows and candidates.is_on("decode_tile"):
            return rounded.with_rounded(x + 0.0, (result, x))
        return (x, result) if form is tuple else result

    def following(x: torch.Tensor) -> torch.Tensor:
        return x.rounded[0] + 0.0 if isinstance(x, RoundedRows) and x.rounded else x + 0.0

    monkeypatch.setattr(ops, "cap", cap)
    candidates.use({"decode_tile", "decode_early"})

    monkeypatch.setattr(ops, "silu_mul", following)

    def check() -> list[str]:
        x = ops.cap(torch.ones(3, 4), 1.0, 2.0)
        ops.silu_mul(x[1] if isinstance(x, tuple) else x)
        return []

    assert trial.without_unequal(check) == []
    assert candidates.in_use() == ([] if wrong else ["decode_tile", "decode_early"])
    assert ops.cap is cap
