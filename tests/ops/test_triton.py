"""The Triton kernels against the references, and their exactness with ==: in the interpreter, or on a GPU if
TRITON_INTERPRET=0 says so.

The interpreter's products of bfloat16 are wrong and its conversions to it truncate, so that dtype is for the GPU.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from tests.ops.packing import takes_packed  # noqa: E402
from tests.ops.samples import samples  # noqa: E402
from tests.ops.samples.wna16 import weights  # noqa: E402
from tests.ops.test_exact import Outputs, Paged, by_row, outputs, randn, same  # noqa: E402
from tests.ops.test_latent import PagedRows  # noqa: E402
from tests.ops.test_ops import close, run  # noqa: E402
from tokserve import ops  # noqa: E402, F401  (declares the ops)
from tokserve.gpu.kernels import attention, dense, launch  # noqa: E402
from tokserve.gpu.kernels import latent as latent_kernels  # noqa: E402
from tokserve.gpu.kernels.sums import strided_sums  # noqa: E402
from tokserve.ops import float8, registry  # noqa: E402
from tokserve.ops.registry import OPS, Op  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither the interpreter nor a GPU", allow_module_level=True)
assert registry.load_extension("cuda") is None
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities the kernels mean
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # by Triton 3.6
]
# of kernels that do not compute in float32 throughout, instead of the op's tolerance
TOLERANCE = {
    # weights are rounded to the dtype of the values before the product, as flash attention does
    ("paged_attention", torch.float16): (1e-3, 2e-3),
    ("paged_attention", torch.bfloat16): (8e-3, 16e-3),
    ("paged_attention", torch.float32): (1e-5, 1e-5),  # a GPU's exp2 is accurate to two units in the last place
    # 1 + tanh cancels in the reference and here, not equally
    ("latent_attention", torch.float16): (1e-3, 2e-3),
    ("latent_attention", torch.bfloat16): (8e-3, 16e-3),
    ("latent_attention", torch.float32): (1e-5, 1e-5),
    ("gelu_mul", torch.float32): (4e-6, 4e-6),
    ("gelu_mul", torch.float16): (4e-6, 1e-3),
    ("gelu_mul", torch.bfloat16): (4e-6, 8e-3),
    ("gated_linear", torch.float32): (3e-5, 3e-5),
    ("gated_linear_int8", torch.float32): (4e-6, 4e-6),  # the same as gelu_mul
    ("gated_linear_int8", torch.float16): (4e-6, 1e-3),
    ("gated_linear_int8", torch.bfloat16): (4e-6, 8e-3),
}
# cuBLAS may split K and round the parts to 16 bits before it adds them
BY_CUBLAS = {torch.float32: (3e-5, 3e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)}
# not in the interpreter, which runs programs one by one: the same lines run with the other dtype
SKIPPED_IN_INTERPRETER = {
    ("linear", torch.float16), ("linear_heads", torch.float16), ("gated_linear", torch.float32),
    ("linear_float8", torch.float16),
}  # fmt: skip
# of a sample in the interpreter
MAX_ELEMENTS = {
    ("filter_logits", torch.float32): 8_000,
    ("gated_delta", torch.float32): 600,  # a token after the other
    ("gated_delta", torch.float16): 260,
    ("scan_states", torch.float32): 600,
    ("scan_states", torch.float16): 260,
    ("short_conv", torch.float16): 500,
    ("linear", torch.float32): 6_000,
    ("matrix_product", torch.float16): 600,
    ("linear_float8", torch.float32): 100,  # which the interpreter converts one by one
    ("gated_linear", torch.float16): 5_000,
    ("norm_rope_store", torch.float16): 2_600,
}
LONG_IN_INTERPRETER = {
    "linear_wna16", "gated_linear_wna16", "experts_wna16", "linear_int8", "gated_linear_int8", "experts_int8",
}  # fmt: skip
OF_A_DTYPE = pytest.mark.parametrize(  # the interpreter runs the same lines for either: one is enough for `make test`
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)] if INTERPRETED else DTYPES
)


def takes_long(op: Op[Any, Any], dtype: torch.dtype) -> bool:
    """Whether the interpreter takes long, or runs the same lines with float16."""
    other = torch.float16 in op.tolerance and (op.name, torch.float16) not in SKIPPED_IN_INTERPRETER
    return INTERPRETED and (op.name in LONG_IN_INTERPRETER or (dtype == torch.float32 and other))


CASES = [
    pytest.param(
        op,
        name,
        dtype,
        id=f"{op.name}-{name}-{str(dtype)[6:]}",
        marks=[pytest.mark.slow] if takes_long(op, dtype) else [],
    )
    for op in OPS.values()
    for name in op.available("cuda")
    if name != registry.REFERENCE and not (name == "cublas" and INTERPRETED)
    for dtype in op.tolerance
    if (dtype in DTYPES or dtype == torch.int32) and not (INTERPRETED and (op.name, dtype) in SKIPPED_IN_INTERPRETER)
]


def to_device(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def to_cpu(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(to_cpu(item) for item in value)
    return value.cpu() if isinstance(value, Tensor) else value


def on_device(name: str) -> Callable[..., Any]:
    """The Triton implementation of an op, called with tensors of the CPU."""
    call = OPS[name].implementations["triton"].call
    return lambda *arguments: to_cpu(call(*(to_device(argument) for argument in arguments)))


def small_samples(op: Op[Any, Any], dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """The op's samples, without those that take the interpreter or the compiler long."""
    calls = list(samples(op.name, dtype))
    if not INTERPRETED and op.name == "paged_attention" and dtype == torch.float32:
        return [call for call in calls if call[0].shape[2] <= 128]  # heads of 256 take a minute to compile
    if not INTERPRETED or op.name in ("edit_rows", "prepare_step", "advance_step"):
        return calls
    max_elements, max_rows = MAX_ELEMENTS.get((op.name, dtype), 12_000), 70 if op.name.endswith("_attention") else 17
    return [call for call in calls if call[0].shape[0] <= max_rows and call[0].numel() <= max_elements]


@pytest.mark.some(12)
@pytest.mark.parametrize(("op", "name", "dtype"), CASES)
def test_kernel_is_close_to_the_reference(op: Op[Any, Any], name: str, dtype: torch.dtype) -> None:
    for arguments in small_samples(op, dtype):
        actual = to_cpu(run(op, name, tuple(to_device(argument) for argument in arguments)))
        expected = run(op, registry.REFERENCE, arguments)
        if not expected[1] or takes_packed(op.name):
            actual, expected = actual[0], expected[0]
        if op.name == "sampling_mask":  # of the ids so many mean something
            actual, expected = [(out[0], out[1][: len(expected[0][1])], *out[2:]) for out in (actual[0], expected[0])]
        tolerance = TOLERANCE.get((op.name, dtype), op.tolerance[dtype])
        by_cublas = name == "cublas" and op.name in ("linear", "gated_linear")
        close(actual, expected, BY_CUBLAS[dtype] if by_cublas else tolerance)


def test_every_op_has_a_kernel() -> None:
    without = {"packed_positions"}
    assert {name for name, op in OPS.items() if "triton" not in op.available("cuda")} <= without


@OF_A_DTYPE
def test_products_of_integers(dtype: torch.dtype) -> None:
    """One small weight of every kind, and a row alone."""
    call = OPS["linear_wna16"].implementations["triton"].call
    x = randn(dtype, 1, 3, 40)
    for kind in weights(20, 40):
        packed = OPS["pack_wna16"].implementations["triton"].call([kind])
        result = to_cpu(call(to_device(x), packed, None, torch.float32))
        dense = kind.dense().to(dtype).float() if kind.float8 else kind.dense()
        close(result, x.float() @ dense.t(), OPS["linear_wna16"].tolerance[dtype])
    same((to_cpu(call(to_device(x[1:2]), packed, None, torch.float32)),), (result[1:2],))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_weights_are_rounded_into_their_places_part_by_part(kind: str) -> None:
    weight = randn(torch.float32, 1, 20, 40)
    name, options = ("pack_gated_int4", (32, False)) if kind == "int4" else ("pack_gated_int8", ())
    pack, into = OPS[name].implementations["triton"].call, None
    for first, last in ((8, 20), (0, 3), (3, 8)):
        into = pack(to_device(weight[first:last]), *options, 20, first, into)
    call, x = on_device(f"linear_{'wna16' if kind == 'int4' else kind}"), randn(torch.float32, 2, 3, 40)
    assert into is not None and into.rows == 20
    same((call(x, into, None),), (call(x, pack(to_device(weight), *options), None),))


def test_experts_of_integers() -> None:
    """Experts of two kinds, one of floats, and one that no token chose; a token alone."""
    pack, call = OPS["pack_wna16"].implementations["triton"].call, OPS["experts_wna16"].implementations["triton"].call
    pack_floats, dtype = OPS["pack_linear"].implementations["triton"].call, torch.float32
    up, down = weights(16, 24), weights(24, 8)
    floats = randn(dtype, 1, 16, 24), randn(dtype, 2, 24, 8)
    gate_up = [*(pack([kind]) for kind in (up[0], up[1], up[0])), pack_floats(floats[0])]
    downs = [*(pack([kind]) for kind in (down[0], down[1], down[0])), pack_floats(floats[1])]
    x, ids = randn(dtype, 3, 3, 24), torch.tensor([[0, 3], [1, 0], [3, 1]], dtype=torch.int32)
    chosen = torch.tensor([[0.5, 2.0], [1.0, 0.25], [1.5, 1.0]])

    def outputs_of(rows: slice) -> Tensor:
        actual: Tensor = to_cpu(
            call(*map(to_device, (x[rows], ids[rows], chosen[rows])), gate_up, None, downs, None, "silu")
        )
        return actual

    dense_up = torch.stack([up[0].dense(), up[1].dense(), up[0].dense(), floats[0]])
    dense_down = torch.stack([down[0].dense(), down[1].dense(), down[0].dense(), floats[1]])
    expected = torch.zeros(3, 24)
    for token, slot in ((token, slot) for token in range(3) for slot in range(2)):
        gate, value = (dense_up[ids[token, slot]] @ x[token]).chunk(2)
        inner = torch.nn.functional.silu(gate) * value
        expected[token] += chosen[token, slot] * (dense_down[ids[token, slot]] @ inner)
    all_rows = outputs_of(slice(None))
    close(all_rows, expected, (1e-3, 1e-4))
    assert torch.equal(outputs_of(slice(1, 2)), all_rows[1:2])


def rows_are_batch_invariant(call: Callable[[Tensor], Tensor | Outputs], count: int) -> None:
    """`call` maps row numbers to their outputs; a row's outputs do not depend on the other rows."""
    all_rows = outputs(call(torch.arange(count)))
    rng = random.Random(count)
    for size in (1, count - 1):
        rows = torch.tensor(rng.choices(range(count), k=size))
        same(outputs(call(rows)), tuple(x[rows] for x in all_rows))


@OF_A_DTYPE
def test_elementwise_rows_are_batch_invariant(dtype: torch.dtype) -> None:
    x, residual, weight = randn(dtype, 1, 9, 130) * 4, randn(dtype, 2, 9, 130), randn(dtype, 3, 130)
    norm, add, silu, gelu = (on_device(name) for name in ("rms_norm", "add_rms_norm", "silu_mul", "gelu_mul"))
    rows_are_batch_invariant(lambda r: norm(x[r], weight, 1e-6), 9)
    rows_are_batch_invariant(lambda r: add(x[r], residual[r], weight, 1e-6), 9)
    layer_norm, residuals, cap, gelu_erf = (
        on_device(name) for name in ("add_layer_norm", "add_residual", "cap", "activate")
    )
    rows_are_batch_invariant(lambda r: layer_norm(x[r], residual[r], weight, weight, 1e-6, 0.5), 9)
    rows_are_batch_invariant(lambda r: residuals(x[r], residual[r], 0.5), 9)
    rows_are_batch_invariant(lambda r: cap(x[r], 0.5, 3.0), 9)
    rows_are_batch_invariant(lambda r: on_device("norm_values")(x[r], 1, 33, 1e-6), 9)
    rows_are_batch_invariant(lambda r: gelu_erf(x[r], "gelu"), 9)
    rows_are_batch_invariant(lambda r: silu(x[r]), 9)
    rows_are_batch_invariant(lambda r: gelu(x[r]), 9)


@OF_A_DTYPE
def test_prepared_tokens_are_batch_invariant(dtype: torch.dtype) -> None:
    qkv, norms, table = randn(dtype, 1, 7, 8 * 80), randn(dtype, 2, 2, 80), randn(torch.float32, 3, 50, 64)
    positions = torch.arange(7) * 6
    call = OPS["norm_rope_store"].implementations["triton"].call

    def prepared(rows: Tensor) -> Outputs:
        caches = torch.zeros(2, 8, 2, 4, 80, dtype=dtype, device=DEVICE)
        slots = torch.arange(len(rows))
        q = call(
            to_device(qkv[rows]),
            *to_device(norms),
            1e-6,
            to_device(table),
            to_device(positions[rows]),
            *caches,
            to_device(slots + 5),
        )
        stored = caches.transpose(2, 3).flatten(1, 2)[:, 5 : 5 + len(rows)]
        return to_cpu((q, stored[0], stored[1]))

    rows_are_batch_invariant(prepared, 7)


def pairwise(x: Tensor) -> Tensor:
    """Sums of rows of x [..., N]: of adjacent elements, then of their sums."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


@triton.jit
def strided_sums_of_tile(x_ptr, out_ptr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, 16)
    tl.store(out_ptr + row, strided_sums(tl.load(x_ptr + row[:, None] * 64 + tl.arange(0, 64)[None, :])))


def test_sums_have_an_order_that_is_written_out() -> None:
    """A norm adds up as a tree of pairs; the weights of a tile of keys pair by pair, those of a thread first."""
    x, weight = randn(torch.float32, 1, 3, 200) * 4, randn(torch.float32, 2, 200)
    squares = torch.nn.functional.pad(x * x, (0, 56))
    expected = x * torch.rsqrt(pairwise(squares) / 200 + 1e-6)[:, None] * weight
    close(on_device("rms_norm")(x, weight, 1e-6), expected, (1e-6, 1e-6))
    out = torch.empty(16, device=DEVICE)
    tile = randn(torch.float32, 3, 16, 64)
    strided_sums_of_tile[(1,)](to_device(tile), out)
    pairs = tile[:, ::2] + tile[:, 1::2]  # [16,32], of which a thread has every fourth
    same((out.cpu(),), (pairwise(torch.stack([pairwise(pairs[:, i::4]) for i in range(4)], -1)),))


LINEARS = [  # inputs, outputs; the last has four chains
    (100, 70, torch.float32), (128, 40, torch.float16), (256, 200, DTYPES[-1]), (1024, 24, DTYPES[-1]),
]  # fmt: skip
WIDE = [
    (1024, 2500, torch.bfloat16),
    (256, 2500, torch.bfloat16),
    (256, 5000, torch.bfloat16),
    (256, 8200, torch.bfloat16),
]  # the other tiles


@pytest.mark.some(2)
@pytest.mark.parametrize(("columns", "outputs_", "dtype"), LINEARS if INTERPRETED else LINEARS + WIDE)
def test_linear_rows_have_the_same_bits_in_any_tile(columns: int, outputs_: int, dtype: torch.dtype) -> None:
    num_rows = 300  # rows: every tile shape is used
    x, weight = randn(dtype, 1, num_rows, columns), randn(dtype, 2, outputs_, columns)
    packed = OPS["pack_linear"].implementations["triton"].call(weight)
    call = on_device("linear")
    all_rows = call(x, packed, None, torch.float32)
    for size in (1, 17, 64, 65, 129):
        assert torch.equal(call(x[:size], packed, None, torch.float32), all_rows[:size])
        assert torch.equal(call(x[num_rows - size :], packed, None, torch.float32), all_rows[num_rows - size :])


def test_narrow_products_are_sums_of_chains_over_equal_parts() -> None:
    x, weight = randn(DTYPES[-1], 1, 3, 1024), randn(DTYPES[-1], 2, 24, 1024)
    pack, call = OPS["pack_linear"].implementations["triton"].call, on_device("linear")
    assert [dense.chains(*shape) for shape in ((24, 1024), (2049, 1024), (4096, 100), (4097, 4096))] == [4, 2, 1, 1]
    parts = zip(x.split(256, 1), weight.split(256, 1), strict=True)
    first, *others = (call(part, pack(of_weight.contiguous()), None, torch.float32) for part, of_weight in parts)
    for part in others:
        first = first + part
    assert torch.equal(call(x, pack(weight), None, torch.float32), first)


@pytest.mark.some(2)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("tile", "step"), [((16, 32), 128), ((16, 16), 256), ((64, 32), 64)], ids=str)
def test_chains_have_the_same_bits_in_one_loop_and_by_programs_of_their_own(
    tile: tuple[int, int], step: int, separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = randn(DTYPES[-1], 1, 19, 1024), randn(DTYPES[-1], 2, 40, 1024)
    packed, call = OPS["pack_linear"].implementations["triton"].call(weight), on_device("linear")
    expected = call(x, packed, None, torch.float32)
    step = dense.BLOCK_K if INTERPRETED else step  # the interpreter sums a step in an order of its own
    entry = {"tile": tile, "step": step, "apart": separate, "warps": 4, "stages": 3}
    monkeypatch.setitem(launch.table(), "linear", [entry])
    launch.tuned.cache_clear()
    try:
        assert torch.equal(call(x, packed, None, torch.float32), expected)
    finally:
        launch.tuned.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
def test_a_gate_fused_with_its_product_has_the_bits_of_two_kernels(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "CHAINS", ())  # as of a wide weight
    x, weight = randn(DTYPES[-1], 1, 19, 72), randn(DTYPES[-1], 2, 44, 72)
    bias = randn(DTYPES[-1], 3, 44) if biased else None
    for kind, pack in (("linear", "pack_gated"), ("linear_int8", "pack_gated_int8")):
        call, packed = on_device(f"gated_{kind}"), OPS[pack].implementations["triton"].call(to_device(weight))
        for activation, gate in (("silu", "silu_mul"), ("gelu_tanh", "gelu_mul")):
            fused, both = call(x, packed, to_device(bias), activation), call(x, packed, to_device(bias), None)
            same((fused,), (on_device(gate)(both),))
            same((call(x[7:8], packed, to_device(bias), activation),), (fused[7:8],))


def test_int8_has_the_bits_of_the_reference() -> None:
    x, weight, bias = randn(DTYPES[-1], 1, 5, 140) * 3, randn(DTYPES[-1], 2, 40, 140), randn(DTYPES[-1], 3, 40)
    x[1], x[2, 7], x[3, :3], x[3, 3:] = 0.0, float("inf"), 127.0, 0.5
    packed = OPS["pack_linear_int8"].implementations["triton"].call(to_device(weight))
    result = on_device("linear_int8")(x, packed, bias)
    same((result,), (OPS["linear_int8"].reference(x, OPS["pack_linear_int8"].reference(weight), bias),))
    same(on_device("quantize_rows")(x), OPS["quantize_rows"].reference(x))


@pytest.mark.parametrize("equal", [True, False])
def test_a_library_serves_many_rows_only_if_it_was_seen_to_give_the_same_bits(
    equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fake_library(x: Tensor, weight: Tensor, out: Tensor) -> None:
        calls.append(len(x))
        dense.product(x, weight, None, out, None)
        out[-1, -1] += 0.0 if equal or len(x) == 20 else 1.0  # for one number of rows alone it is another sum

    monkeypatch.setattr(dense, "LIBRARY_ROWS", (20, 8))
    monkeypatch.setattr(dense, "CHAINS", ())
    monkeypatch.setattr(dense, "_accepted", set())
    monkeypatch.setattr(dense, "by_library", fake_library)
    x, weight = randn(torch.float16, 1, 51, 40), randn(torch.float16, 2, 24, 40)
    packed = OPS["pack_linear"].implementations["triton"].call(weight)
    call, bias = on_device("linear"), randn(torch.float16, 3, 24)
    expected = call(x, packed, None), call(x, packed, bias), call(x, packed, None, torch.float32)
    assert OPS["accept_library"].implementations["triton"].call(packed) is equal
    assert calls == ([20, 20, 8, 8] if equal else [20, 20, 8])
    calls.clear()
    results = call(x, packed, None), call(x, packed, bias), call(x, packed, None, torch.float32)
    assert calls == ([20, 20, 8] if equal else [])  # three rows are left over
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_float8_rows_are_batch_invariant(name: str) -> None:
    x, weight = randn(DTYPES[-1], 1, 70, 100) * 5, randn(DTYPES[-1], 2, 40, 100)
    x[3], x[4, 7], x[5] = 0.0, float("inf"), 1e-38
    device = "cpu" if name == "torch" else DEVICE
    packed = OPS["pack_linear_float8"].implementations[name].call(weight)
    call = OPS["linear_float8"].implementations[name].call
    all_rows = call(x.to(device), packed, None).cpu()
    assert all_rows[4].isnan().all() and (all_rows[3] == 0.0).all() and all_rows[5:].isfinite().all()
    for rows in ([0], [69], list(range(5, 70))):
        assert torch.equal(call(x[rows].to(device), packed, None).cpu(), all_rows[rows])


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("columns", [192, 200])  # whole groups of 128, the last one cut off
def test_float8_weights_with_scales_of_their_own_are_multiplied_as_they_are(name: str, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    values = torch.randn(24, columns, generator=generator).to(torch.float8_e4m3fn)
    x = randn(DTYPES[-1], 1, 6, columns) * 5
    device, call = "cpu" if name == "torch" else DEVICE, OPS["linear_float8"].implementations[name].call
    for groups, group in ((2, 128), (1, columns)):
        scales = (torch.rand(groups, 24, generator=generator) + 0.1) / columns**0.5
        packed = OPS["pack_scaled_float8"].implementations[name].call(values, scales, group)
        all_rows = call(x.to(device), packed, None, torch.float32).cpu()
        rounded, of_rows = float8.quantize(x)
        dequantized = values.double() * scales.t().repeat_interleave(group, 1)[:, :columns].double()
        exact = (rounded.double() @ dequantized.t()) * of_rows.double()[:, None]
        close(all_rows.double(), exact, (5e-3, 1e-2) if DEVICE == "cuda" else (1e-4, 1e-5))
        for rows in ([0], [5], [1, 2, 3, 4, 5]):
            assert torch.equal(call(x[rows].to(device), packed, None, torch.float32).cpu(), all_rows[rows])


@pytest.mark.slow
@OF_A_DTYPE
def test_rows_of_adapters_are_batch_invariant(dtype: torch.dtype) -> None:
    count, columns, sizes, rank = 20, 600, (70, 9), 5  # two stretches of K, two tiles of rows and of outputs
    x, base = randn(dtype, 1, count, columns), randn(dtype, 2, count, sum(sizes))
    down, up = randn(dtype, 3, 3, 2, rank, columns), randn(dtype, 4, 3, rank, sum(sizes))
    ranks = torch.tensor([[rank, 3], [0, 0], [2, rank]], dtype=torch.int32)
    scales = torch.tensor([[0.5, 2.0], [1.0, 1.0], [1.7, 0.3]])
    adapters = (torch.arange(count) % 4 - 1).int()
    call = OPS["add_lora"].implementations["triton"].call

    def added(rows: Tensor) -> Tensor:
        out = to_device(base[rows])
        call(out, *(to_device(tensor) for tensor in (x[rows], adapters[rows], down, up, ranks, scales)), sizes)
        return out.cpu()

    rows_are_batch_invariant(added, count)
    untouched = (adapters < 0) | (adapters == 1)
    all_rows = added(torch.arange(count))
    assert torch.equal(all_rows[untouched], base[untouched]) and not torch.equal(all_rows, base)


SHAPES = [  # query heads, KV heads, head dim, page, window, dtype
    (3, 1, 80, 16, 0, torch.float16),
    (5, 1, 64, 7, 70, torch.float16),
    (2, 2, 32, 64, 0, torch.float32),
    (8, 2, 128, 64, 0, torch.bfloat16),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=[pytest.mark.slow] if INTERPRETED and shape[-1] == torch.float32 else [])
        for shape in SHAPES
        if shape[-1] in DTYPES
    ],
    ids=str,
)
def test_attention_in_chunks_and_steps_is_attention_at_once(shape: tuple[Any, ...]) -> None:
    heads, kv_heads, dim, page, window, dtype = shape
    lengths = [270, 17]
    store = OPS["store_kv"].reference  # rows, as Triton keeps them
    paged = Paged(lengths, heads, kv_heads, dim, page=page, window=window, dtype=dtype, store=store)
    call = on_device("paged_attention")
    all_rows = [paged.attend(call, [(row, 0, length)])[0] for row, length in enumerate(lengths)]
    assert all(part.isfinite().all() for part in all_rows)
    paged.forget()
    for start, end in ((0, 1), (1, 100), (100, 256), (256, 257), (257, 270)):
        parts = paged.attend(call, [(1, min(start, 16), min(end, 17)), (0, start, end)])
        assert torch.equal(parts[0], all_rows[1][min(start, 16) : min(end, 17)])
        assert torch.equal(parts[1], all_rows[0][start:end])


@pytest.mark.parametrize("window", [0, pytest.param(200, marks=pytest.mark.slow)])
def test_attention_has_the_same_bits_on_any_number_of_programs(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a token, of drafts, with no token at all and of a prompt, divided among programs in the middle of a row
    and not; the work made before, for all layers, as well as at once."""
    dtype = DTYPES[0] if INTERPRETED else DTYPES[-1]
    lengths = [520, 5, 300, 12]
    spans = [(0, 519, 520), (1, 5, 5), (2, 296, 300), (3, 0, 12)]
    paged = Paged(lengths, 2, 1, 16, page=64, window=window, dtype=dtype, store=OPS["store_kv"].reference)
    paged.attend(lambda q, *rest: q, [(row, 0, length) for row, length in enumerate(lengths)])  # stores
    call, prepare = (OPS[name].implementations["triton"].call for name in ("paged_attention", "attention_work"))
    results = []
    divisions = ((4, 8), (3, 1)) if window == 0 else ((1, 8), (2, 8), (5, 8), (40, 8))
    for programs, packed in divisions:  # packed 1 leaves drafts to the other kernel
        monkeypatch.setattr(attention, "multiprocessors", lambda device, programs=programs: programs)
        monkeypatch.setattr(attention, "SCRATCH", (1 << 28) if packed > 1 else 0)

        def attend(q: Tensor, keys: Tensor, values: Tensor, *rows: Any) -> Tensor:
            q, keys, values, *rows = (to_device(argument) for argument in (q, keys, values, *rows))
            work = prepare(q, keys, *rows[:3], window)
            actual: Tensor = call(q, keys, values, *rows, None, work)
            used = 2 * len(rows[1])
            assert not work[used : used + len(rows[2]) * keys.shape[1]].any()  # counters are zero again
            return actual.cpu()

        results.append(torch.cat(paged.attend(attend, spans)))
    assert all(torch.equal(result, results[0]) for result in results)
    expected = torch.cat(paged.attend(OPS["paged_attention"].reference, spans))
    close(results[0], expected, TOLERANCE["paged_attention", dtype])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "latent"),
    [(5, 40), pytest.param(70, 40, marks=pytest.mark.slow), pytest.param(2, 300, marks=pytest.mark.slow)],
)  # one tile of heads and two; values in one part and in two
def test_latent_attention_in_chunks_and_steps_is_attention_at_once(
    heads: int, latent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [270, 17]
    paged = PagedRows(lengths, heads, latent, 8, page=16, dtype=torch.float16)
    call = on_device("latent_attention")
    all_rows = [paged.attend(call, [(row, 0, length)])[0] for row, length in enumerate(lengths)]
    for row, part in enumerate(all_rows):
        reference = paged.attend(OPS["latent_attention"].reference, [(row, 0, lengths[row])])[0]
        close(part, reference, TOLERANCE["latent_attention", torch.float16])
    for start, end in ((0, 1), (1, 100), (100, 256), (256, 257), (257, 270)):
        parts = paged.attend(call, [(1, min(start, 16), min(end, 17)), (0, start, end)])
        assert torch.equal(parts[0], all_rows[1][min(start, 16) : min(end, 17)])
        assert torch.equal(parts[1], all_rows[0][start:end])
    for name, value in (("SCRATCH", 0), ("ALIGN", 1)):  # a row at a time
        monkeypatch.setattr(latent_kernels, name, value)
    parts = paged.attend(call, [(1, 16, 17), (0, 269, 270)])
    assert torch.equal(parts[0], all_rows[1][16:]) and torch.equal(parts[1], all_rows[0][269:])


@pytest.mark.parametrize("name", ["torch", "triton"])
@OF_A_DTYPE
def test_a_float8_cache_holds_what_torch_rounds_to_and_is_read_as_that(name: str, dtype: torch.dtype) -> None:
    store, prepare, attend = (
        OPS[op].implementations[name].call for op in ("store_kv", "norm_rope_store", "paged_attention")
    )
    device = "cpu" if name == "torch" else DEVICE
    k, v = randn(dtype, 1, 20, 2, 32) * 9, randn(dtype, 2, 20, 2, 32)
    k[5] *= 1e-3  # past the smallest
    k[3, 1, :4] = torch.tensor([500.0, -6e4, 464.0, 0.0]).to(dtype)  # past the largest
    slots = torch.arange(20)
    caches, others = torch.zeros(2, 2, 3, 2, 8, 32, device=device).to(torch.float8_e4m3fn)
    store(k.to(device), v.to(device), *caches, slots.to(device))
    for cache, unrounded in zip(caches.cpu(), (k, v), strict=True):
        expected = unrounded.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(cache.float().transpose(1, 2).flatten(0, 1)[:20], expected)
    qkv = torch.cat([randn(dtype, 3, 20, 128), k.flatten(1), v.flatten(1)], 1).to(device)
    no_turn = torch.cat([torch.ones(1, 16), torch.zeros(1, 16)], 1).to(device)
    prepare(qkv, None, None, 0.0, no_turn, (slots * 0).to(device), *others, slots.to(device))
    assert torch.equal(others.float(), caches.float())
    rows = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([[0, 1, 2]], [0, 20], [20])]
    q = randn(dtype, 4, 20, 4, 32).to(device)
    read = attend(q, *caches, *rows, 0.1, 0)
    assert torch.equal(read, attend(q, *caches.to(dtype), *rows, 0.1, 0)) and read.isfinite().all()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_float8_cache_with_scales_is_one_of_what_its_numbers_mean(name: str) -> None:
    dtype, k_scale, v_scale = DTYPES[-1], 0.037109375, 1.75
    store, prepare, attend = (
        OPS[op].implementations[name].call for op in ("store_kv", "norm_rope_store", "paged_attention")
    )
    device = "cpu" if name == "torch" else DEVICE
    k, v = randn(dtype, 1, 20, 2, 32) * 9, randn(dtype, 2, 20, 2, 32) * 9
    k[3, 1, :2], v[4, 0, 0] = torch.tensor([448 * k_scale, 6e4]).to(dtype), 900.0
    slots = torch.arange(20)
    caches, others = torch.zeros(2, 2, 3, 2, 8, 32, device=device).to(torch.float8_e4m3fn)
    store(k.to(device), v.to(device), *caches, slots.to(device), k_scale, v_scale)
    for cache, unrounded, scale in zip(caches.cpu(), (k, v), (k_scale, v_scale), strict=True):
        expected = (unrounded.float() / torch.full_like(unrounded, scale, dtype=torch.float32)).clamp(-448, 448)
        assert torch.equal(cache.float().transpose(1, 2).flatten(0, 1)[:20], expected.to(torch.float8_e4m3fn).float())
    qkv = torch.cat([randn(dtype, 3, 20, 128), k.flatten(1), v.flatten(1)], 1).to(device)
    no_turn = torch.cat([torch.ones(1, 16), torch.zeros(1, 16)], 1).to(device)
    prepare(qkv, None, None, 0.0, no_turn, (slots * 0).to(device), *others, slots.to(device), k_scale, v_scale)
    assert torch.equal(others.float(), caches.float())
    rows = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([[0, 1, 2]], [0, 20], [20])]
    q = randn(torch.float32, 4, 20, 4, 32).to(device)
    read = attend(q, *caches, *rows, 0.1 * k_scale, 0, v_scale)
    dequantized = caches[0].float() * k_scale, caches[1].float() * v_scale
    close(read.cpu(), attend(q, *dequantized, *rows, 0.1, 0).cpu(), (1e-4, 1e-5))
    for start in (19, 7):  # a step and a chunk, after what the cache holds of the others
        rows[1][1] = 20 - start
        assert torch.equal(attend(q[start:], *caches, *rows, 0.1 * k_scale, 0, v_scale), read[start:])


def far_apart() -> Tensor:
    """A little more than 2^31 float16 numbers, whose memory is not touched."""
    count = (1 << 31) + (1 << 16)
    if DEVICE == "cuda":
        return torch.empty(count, dtype=torch.float16, device=DEVICE)
    memory = mmap.mmap(-1, 2 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float16)


def test_rows_may_begin_past_2_to_the_31() -> None:
    """Rows that lie apart, whose numbers and stride fit into 32 bits; an address reckoned in these crashes here."""
    distant, adjacent = far_apart().as_strided((3, 256), (1 << 30, 1)), randn(torch.float16, 1, 3, 256)
    distant.copy_(adjacent)
    adjacent = to_device(adjacent)
    call = {name: op.implementations["triton"].call for name, op in OPS.items() if "triton" in op.implementations}
    weight, ones = randn(torch.float16, 2, 8, 256), torch.ones(2, device=DEVICE)
    packed, float8_weight = call["pack_linear"](weight), call["pack_linear_float8"](weight)
    adapters, ranks = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([1, -1, 0], [[4], [4]]))
    down, up = to_device(randn(torch.float16, 3, 2, 1, 4, 256)), to_device(randn(torch.float16, 4, 2, 4, 8))
    table, index = to_device(randn(torch.float32, 5, 9, 32)), torch.arange(3, device=DEVICE)

    def results(x: Tensor) -> list[Tensor]:
        added, heads = torch.zeros(3, 8, dtype=x.dtype, device=DEVICE), x.unflatten(1, (8, 32))
        call["add_lora"](added, x, adapters, down, up, ranks, ones[:, None], (8,))
        caches = torch.zeros(2, 2, 2, 8, 32, dtype=x.dtype, device=DEVICE)
        q = call["norm_rope_store"](x, None, None, 0.0, table, index, *caches, index)
        stored = caches.clone()
        call["store_kv"](heads[:, :2], heads[:, 2:4], *caches, index + 8)
        return [
            call["linear"](x, packed, None), call["linear_float8"](x, float8_weight, None), call["silu_mul"](x), added,
            *call["rope"](heads[:, :4], heads[:, 4:], table, index), q, stored, caches,
        ]  # fmt: skip

    for one, other in zip(results(distant), results(adjacent), strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


def test_pages_may_lie_past_2_to_the_31() -> None:
    heads, page, dim = 2, 16, 32
    size = heads * page * dim
    flat, last = far_apart(), (1 << 31) // size + 1
    caches = [flat[start:][: (last + 1) * size].view(last + 1, heads, page, dim) for start in (0, size)]  # v: one on
    near = torch.zeros(2, 2, heads, page, dim, dtype=torch.float16, device=DEVICE)
    q, k, v = (to_device(randn(torch.float16, seed, 9, heads, dim)) for seed in range(3))
    slots, rows = (
        torch.arange(9, device=DEVICE),
        [torch.tensor(e, dtype=torch.int32, device=DEVICE) for e in ([0, 9], [9])],
    )
    store, prepare, attend = (
        OPS[n].implementations["triton"].call for n in ("store_kv", "norm_rope_store", "paged_attention")
    )
    results = []
    for (keys, values), block in ((caches, last), (near, 1)):
        keys[block], values[block] = 0.0, 0.0
        table = torch.tensor([[block]], dtype=torch.int32, device=DEVICE)
        store(k, v, keys, values, slots + block * page)
        all_rows = attend(q, keys, values, table, *rows, 0.1, 0)
        step = attend(q[8:], keys, values, table, rows[0].clamp(max=1), rows[1], 0.1, 0)
        assert torch.equal(step, all_rows[8:])
        qkv, turn = torch.cat([q, k, v], 1).flatten(1) * 2, torch.ones(9, dim, device=DEVICE)
        prepare(qkv, None, None, 0.0, turn, slots, keys, values, slots + block * page)
        results.append((all_rows, keys[block].clone(), values[block].clone()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)) and results[0][2].any()


@pytest.mark.slow
def test_sampling_rows_are_batch_invariant() -> None:
    count, width = 4, 4100  # two slices
    logits = randn(torch.float32, 1, count, width) * 3
    logits[::2] = logits[::2].round()  # ties
    index = torch.arange(count)
    seeds, positions, strength = index * 7919 - 9, index * 3, index * 0.2
    top_k, top_p, min_p = (index % 3 * 300).int(), 1.0 - index // 2 * 0.15, index % 3 * 0.01
    history = (torch.arange(count * 40).view(count, 40) * 37 % width).int()
    lens = (index * 7 % 41).int()
    draw, filtered, penalize = (on_device(name) for name in ("sample_fused", "filter_logits", "penalize"))
    rows_are_batch_invariant(
        lambda r: draw(logits[r], seeds[r], positions[r], (index % 4 == 0)[r], strength[r], True, 3), count
    )
    cut, mask = logits.masked_fill(logits < index[:, None] * 2.0, float("-inf")), on_device("sampling_mask")
    rows_are_batch_invariant(
        lambda r: by_row(mask(logits[r], cut[r], cut.argmax(-1)[r], (index % 4 == 0)[r], strength[r], 700)), count
    )
    rows_are_batch_invariant(lambda r: filtered(logits[r], top_k[r], top_p[r], min_p[r]), count)
    rows_are_batch_invariant(
        lambda r: penalize(logits[r], history[r], lens[r] // 3, lens[r], strength[r], strength[r], 0.5 + strength[r]),
        count,
    )


@pytest.mark.slow
def test_filters_keep_what_the_reference_keeps() -> None:
    """Ties, forbidden ids, rows of one value, and both sides of the largest top-k that is found slice by slice."""
    count, width = 11, 4500  # two slices
    logits = randn(torch.float32, 5, count, width) * 3
    logits[::2] = logits[::2].round()
    logits[1, :4000], logits[3], logits[5] = float("-inf"), 0.0, float("-inf")
    logits[5, 4400] = 1.0
    top_k = torch.tensor([20, 1, 64, 20, 65, 3, 0, 40, 0, 0, 4000], dtype=torch.int32)
    top_p = torch.tensor([0.95, 0.5, 1.0, 0.9, 0.8, 0.3, 1.0, 0.999, 0.3, 0.9, 0.99])
    min_p = torch.tensor([0.0, 0.1, 0.02, 0.0, 0.0, 0.5, 0.1, 0.0, 0.0, 0.0, 0.1])
    call = on_device("filter_logits")
    kept = call(logits, top_k, top_p, min_p)
    assert torch.equal(kept, OPS["filter_logits"].reference(logits, top_k, top_p, min_p))
    few = torch.tensor([0, 1, 2, 3, 5, 6, 7])
    assert torch.equal(call(logits[few], top_k[few], top_p[few], min_p[few], True), kept[few])
