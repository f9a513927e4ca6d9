"""AMX: the software tiles against the manual's pseudo-code, the start-up check, and the product that runs on tiles.

The product is tested as `amx_software`, which is `amx` with software tiles, on any processor with AVX512-BF16.  One
test runs the tile instructions themselves, each emulated as the processor refuses it (amx_traps.cpp).
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import product as combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.driver import Driver, prefill, random_ids
from tests.ops.samples import samples
from tests.ops.test_cpu import CALLS, PACKING, outputs, run
from tests.tiny_models import tiny_config
from tokserve import ops
from tokserve.models.load import load_decoder
from tokserve.ops.registry import OPS

_C = pytest.importorskip("tokserve._C")
if "avx512_bf16" not in _C.instruction_sets():
    pytest.skip("amx's attention needs AVX512-BF16", allow_module_level=True)

BF16 = torch.bfloat16
SMALLEST = 2.0**-126  # normal float32
FEATURES = ["avx2", "fma", "f16c", "avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512vnni", "avx512bf16"]
FEATURES += ["avx512vbmi", "amx-tile", "amx-bf16"]
TileProduct = Callable[[bytes, bytes, bytes], bytes]


@pytest.fixture(autouse=True)
def on_software_tiles() -> Iterator[None]:
    chosen, threads = _C.instruction_set(), _C.threads()
    _C.select("amx_software")
    yield
    _C.select(chosen)
    _C.set_threads(threads)


def units(x: float) -> int:
    """A finite float32 in units of 2^-149."""
    numerator, denominator = x.as_integer_ratio()
    return numerator * 2**149 // denominator


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < SMALLEST else x


def rounded(exact: int, flush: bool) -> float:
    """`exact` units of 2^-298 to 24 bits, ties to even.  Tiny is what is below the normal range after that."""
    magnitude = abs(exact)
    if (surplus := magnitude.bit_length() - 24) > 0:
        half, tail = 1 << surplus - 1, magnitude & (1 << surplus) - 1
        magnitude >>= surplus
        magnitude += tail > half or (tail == half and magnitude & 1)
        magnitude <<= surplus
    if magnitude >= 1 << 298 + 128:
        return math.copysign(math.inf, exact)
    if flush and magnitude < 1 << 298 - 126:
        return math.copysign(0.0, exact)
    return math.copysign(math.ldexp(float(magnitude), -298), exact)


def fma32(a: float, b: float, c: float, flush: bool = True) -> float:
    """a * b + c as the manual's "FP32 FMA with DAZ=FTZ=1, RNE rounding": exact integers, rounded once."""
    if flush:
        a, b, c = flushed(a), flushed(b), flushed(c)
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    if exact := units(a) * units(b) + (units(c) << 149):
        return rounded(exact, flush)
    return a * b + c if a * b == 0 else 0.0  # signed zeros, or terms that cancel


def floats(data: bytes, dtype: torch.dtype) -> list[list[float]]:
    values: list[list[float]] = (
        torch.frombuffer(bytearray(data), dtype=dtype).double().view(-1, 64 // dtype.itemsize).tolist()
    )
    return values


def manual(a: bytes, b: bytes, c: bytes, flush: bool = True, chains: int = 2, sum_first: bool = True) -> bytes:
    """TDPBF16PS as Intel's Software Developer's Manual writes its operation; the options make it something else."""
    x, w, sums = floats(a, BF16), floats(b, BF16), floats(c, torch.float32)
    for m in range(len(x)):
        temp = [0.0] * 32
        for k in range(16):
            for n in range(16):
                odd = 2 * n + chains - 1
                temp[2 * n] = fma32(x[m][2 * k], w[k][2 * n], temp[2 * n], flush)
                temp[odd] = fma32(x[m][2 * k + 1], w[k][2 * n + 1], temp[odd], flush)
        for n in range(16):
            left, right = temp[2 * n], temp[2 * n + 1]
            if sum_first:
                sums[m][n] = fma32(1.0, sums[m][n], fma32(1.0, left, right, flush), flush)
            else:
                sums[m][n] = fma32(1.0, fma32(1.0, sums[m][n], left, flush), right, flush)
    return torch.tensor(sums, dtype=torch.float64).float().numpy().tobytes()


def same(left: bytes, right: bytes) -> bool:
    a, b = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (left, right))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0).view(torch.int32), b.nan_to_num(0).view(torch.int32)
    )


def packed_bytes(x: Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist())


def numbers(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    if kind == "normal":
        return normal.to(dtype)
    if kind == "any bits":  # every exponent, so most sums are infinite or not numbers
        words = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
        return words.view(torch.float32) if dtype == torch.float32 else (words >> 16).short().view(BF16)
    if kind == "specials":
        special = [0.0, -0.0, 1e-40, -1e-40, SMALLEST, 3.3e38, -3.3e38, math.inf, -math.inf, math.nan]
        table = torch.tensor(special)[torch.randint(0, len(special), shape, generator=generator)]
        return torch.where(torch.rand(shape, generator=generator) < 0.05, table, normal).to(dtype)
    # around the smallest normal number, where terms and sums are flushed; ties and sums just below it included
    scale = 2.0**-126 if dtype == torch.float32 else 2.0**-63
    spread = torch.exp2(torch.randint(-13, 3, shape, generator=generator).float())
    return (normal.double() * scale * spread).to(dtype)


@pytest.mark.parametrize("kind", ["normal", "any bits", "specials", "small"])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_software_tiles_are_the_manuals_loop(kind: str, rows: int) -> None:
    for seed in range(3):
        a, b = numbers(kind, (rows, 32), BF16, seed), numbers(kind, (16, 32), BF16, seed + 10)
        operands = packed_bytes(a), packed_bytes(b), packed_bytes(numbers(kind, (rows, 16), torch.float32, seed + 20))
        assert same(_C.amx_tile(*operands), manual(*operands))


# A row of a, a column of b (its even elements meet the even ones of the row), the sum so far, the sum after.
SMALL_SUMS = {
    "a pair": ([2.0, 3.0], [5.0, 7.0], 100.0, 131.0),
    "zeros of two signs": ([0.0], [0.0], -0.0, 0.0),
    "a denormal operand": ([1e-40], [1e38], 1.0, 1.0),
    "a denormal operand, infinity": ([1e-40], [math.inf], 0.0, math.nan),
    "a denormal sum": ([0.0], [0.0], 1e-40, 0.0),
    "a denormal product": ([2.0**-63], [2.0**-64], 0.0, 0.0),
    "denormal products are not kept": ([2.0**-64, 0.0] * 2, [2.0**-64, 0.0, 2.0**-62, 0.0], 0.0, 2.0**-126),
    "2^-126 less 2^-150": ([2.0**-63, 0.0, 2.0**-75], [2.0**-63, 0.0, -(2.0**-75)], 0.0, 0.0),
    "2^-126 less 2^-152 is rounded first": ([2.0**-63, 0.0, 2.0**-76], [2.0**-63, 0.0, -(2.0**-76)], 0.0, 2.0**-126),
    "even products have a sum": ([1.0, 0.0, 2.0**-24], [1.0, 0.0, 1.0], -1.0, 0.0),
    "odd products have another": ([1.0, 2.0**-24, -1.0], [1.0, 1.0, 1.0], 0.0, 2.0**-24),
    "a tie": ([2.0**-24], [1.0], 1.0, 1.0),
    "even and odd are added first": ([2.0**-24, 2.0**-24], [1.0, 1.0], 1.0, 1.0 + 2.0**-23),
}


@pytest.mark.parametrize("case", SMALL_SUMS)
def test_tiles_round_and_flush(case: str) -> None:
    x, w, start, expected = SMALL_SUMS[case]
    a, b = torch.zeros(1, 32), torch.zeros(16, 32)
    a[0, : len(x)] = torch.tensor(x)
    for i, weight in enumerate(w):
        b[i // 2, i % 2] = weight
    operands = packed_bytes(a.to(BF16)), packed_bytes(b.to(BF16)), packed_bytes(torch.full((1, 16), start))
    result = torch.tensor(floats(_C.amx_tile(*operands), torch.float32)[0][:1])
    assert same(packed_bytes(result), packed_bytes(torch.tensor([expected])))
    assert same(_C.amx_tile(*operands), manual(*operands))


def test_software_tiles_leave_the_threads_rounding_as_it_was() -> None:
    _C.set_threads(1)
    linear(torch.ones(1, 32, dtype=BF16), torch.ones(64, 32, dtype=BF16))
    assert torch.tensor([1e-40]).mul(1.0).item() != 0.0


def test_a_tile_of_another_size_is_refused() -> None:
    tile = bytes(1024)
    for operands in [
        (b"", tile, b""),
        (bytes(100), tile, bytes(100)),
        (tile, tile[:-1], tile),
        (tile, tile, tile[:64]),
    ]:
        with pytest.raises(ValueError, match="amx_tile"):
            _C.amx_tile(*operands)


def test_the_check_passes_what_follows_the_definition() -> None:
    assert _C.amx_tiles_agree(_C.amx_tile)
    assert _C.amx_tiles_agree(manual)


def edited(edit: Callable[[Tensor], Tensor]) -> TileProduct:
    def product(a: bytes, b: bytes, c: bytes) -> bytes:
        return packed_bytes(edit(torch.frombuffer(bytearray(_C.amx_tile(a, b, c)), dtype=torch.float32).view(-1, 16)))

    return product


def swapped_pairs(a: bytes, b: bytes, c: bytes) -> bytes:
    swapped = torch.frombuffer(bytearray(b), dtype=BF16).view(16, 16, 2).flip(-1)
    result: bytes = _C.amx_tile(a, packed_bytes(swapped), c)
    return result


WRONG: dict[str, TileProduct] = {
    "one chain of all products": lambda a, b, c: manual(a, b, c, chains=1),
    "even and odd products added one by one": lambda a, b, c: manual(a, b, c, sum_first=False),
    "denormals kept": lambda a, b, c: manual(a, b, c, flush=False),
    "pairs swapped in the weights": swapped_pairs,
    "sums not read": lambda a, b, c: _C.amx_tile(a, b, bytes(len(c))),
    "nothing done": lambda a, b, c: c,
    "NaN made zero": edited(lambda c: c.nan_to_num(0, math.inf, -math.inf)),
    "infinity made the largest number": edited(lambda c: torch.where(c.isinf(), c.sign() * 3.4e38, c)),
    "signs of zeros lost": edited(lambda c: c + 0.0),
    "a last bit wrong": edited(
        lambda c: torch.where(c.isfinite() & (c != 0), (c.view(torch.int32) ^ 1).view(torch.float32), c)
    ),
    "the sixteenth row missing": edited(lambda c: torch.cat([c[:15], 0 * c[15:]])),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_check_refuses_tiles_that_differ(wrong: str) -> None:
    assert not _C.amx_tiles_agree(WRONG[wrong])


def test_amx_is_offered_where_its_status_is_empty_and_software_tiles_never_are() -> None:
    names = _C.instruction_sets()
    assert ("amx" in names) == (_C.amx_status() == "")
    assert "amx_software" not in names and _C.instruction_set() == "amx_software"
    assert {_C.arithmetic(name) for name in ("amx_software", *(name for name in names if name == "amx"))} == {"amx"}
    if "amx" not in names:
        with pytest.raises(ValueError, match="does not run kernels named amx"):
            _C.select("amx")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    result: Tensor = CALLS["linear"](x, CALLS["pack_linear"](weight), bias, out_dtype)
    return result


def in_steps(x: Tensor, weight: Tensor) -> Tensor:
    """x times weight, both [*, K]: a tile product for each 32 elements of K, the last of them padded with zeros."""
    padding = (0, -x.shape[1] % 32)
    x, weight = (torch.nn.functional.pad(t, padding) for t in (x, weight))
    out = torch.zeros(len(x), len(weight))
    for row, column in combinations(range(0, len(x), 16), range(0, len(weight), 16)):
        w = torch.nn.functional.pad(weight[column : column + 16], (0, 0, 0, 16 - len(weight[column : column + 16])))
        sums = torch.zeros(len(x[row : row + 16]), 16)
        for k in range(0, x.shape[1], 32):
            pairs = w[:, k : k + 32].view(16, 16, 2).transpose(0, 1)
            step = _C.amx_tile(packed_bytes(x[row : row + 16, k : k + 32]), packed_bytes(pairs), packed_bytes(sums))
            sums = torch.frombuffer(bytearray(step), dtype=torch.float32).view(-1, 16)
        out[row : row + 16, column : column + 16] = sums[:, : out.shape[1] - column]
    return out


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 16, 32), (3, 70, 1), (17, 65, 31), (40, 130, 333), (2, 64, 512), (150, 5, 67)]
)
def test_the_product_is_a_chain_of_tiles(m: int, n: int, k: int) -> None:
    x, weight = numbers("normal", (m, k), BF16, 1), numbers("normal", (n, k), BF16, 2)
    expected = in_steps(x, weight)
    for name in ("amx_software", *(name for name in _C.instruction_sets() if name == "amx")):
        _C.select(name)
        assert torch.equal(linear(x, weight, out_dtype=torch.float32), expected)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (130, 333), (65, 31), (3, 1000), (200, 129)])
@pytest.mark.parametrize("activation", ["plain", None, "silu", "gelu_tanh"])
def test_rows_have_the_same_bits_for_every_number_of_rows(n: int, k: int, activation: str | None) -> None:
    x, weight, bias = (numbers("normal", shape, BF16, i) for i, shape in enumerate([(300, k), (2 * n, k), (2 * n,)]))
    packed = CALLS["pack_linear" if activation == "plain" else "pack_gated"](weight)

    def call(rows: Tensor) -> Tensor:
        if activation == "plain":
            result: Tensor = CALLS["linear"](rows, packed, bias, torch.float32)
        else:
            result = CALLS["gated_linear"](rows, packed, bias, activation)
        return result

    _C.set_threads(1)
    expected = call(x)
    for size in range(1, 71):
        assert torch.equal(call(x[:size]), expected[:size])
    assert torch.equal(call(x[37:]), expected[37:])
    for threads in (2, 5):
        _C.set_threads(threads)
        assert torch.equal(call(x), expected)
        assert torch.equal(call(x[:1]), expected[:1])


def test_a_row_does_not_see_another_that_is_not_finite() -> None:
    x, weight = numbers("normal", (40, 100), BF16, 1), numbers("normal", (70, 100), BF16, 2)
    expected = linear(x, weight)
    x[3], x[20, 99], x[39, 0] = math.nan, math.inf, -math.inf
    others = [row for row in range(40) if row not in (3, 20, 39)]
    result = linear(x, weight)
    assert torch.equal(result[others], expected[others])
    assert result[3].isnan().all() and not result[[20, 39]].isfinite().any()


def test_strided_rows_are_read_without_what_is_between_them() -> None:
    weight, wide = numbers("normal", (70, 45), BF16, 2), torch.full((40, 90), math.nan, dtype=BF16)
    wide[:, 20:65] = numbers("normal", (40, 45), BF16, 1)
    assert torch.equal(linear(wide[:, 20:65], weight), linear(wide[:, 20:65].contiguous(), weight))


@pytest.mark.parametrize("name", ["linear", "gated_linear"])
def test_the_product_is_close_to_the_reference(name: str) -> None:
    op = OPS[name]
    absolute, relative = op.tolerance[BF16]
    for arguments in samples(op.name, BF16):
        copies = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
        expected = outputs(op.reference(copies[0], OPS[PACKING[name]].reference(copies[1]), *copies[2:]), ())
        for a, e in zip(run(name, arguments)[: len(expected)], expected, strict=True):
            torch.testing.assert_close(a, e, atol=absolute, rtol=relative, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_other_dtypes_have_the_bits_of_fma(dtype: torch.dtype) -> None:
    x, weight = numbers("normal", (40, 333), dtype, 1), numbers("normal", (130, 333), dtype, 2)
    result = linear(x, weight)
    _C.select("portable")
    assert torch.equal(linear(x, weight), result)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_models_logits_do_not_depend_on_chunks(family: str) -> None:
    ops.bind("cpu", {"*": "cpp"})
    try:
        config = tiny_config(family)
        decoder = load_decoder(
            Path("/nowhere"), config, dtype="bfloat16", head_dtype="auto", load_format="dummy", seed=0
        )
        ids = random_ids(75, 320)
        alone, cut = prefill(decoder, ids), Driver(decoder, length=len(ids))
        chunks = [ids[:1], ids[1:18], ids[18:50], *([token] for token in ids[50:])]
        assert torch.equal(torch.cat([cut.step({0: chunk})[0] for chunk in chunks]), alone)
        _C.select("avx512_bf16")
        pairs = prefill(decoder, ids)
        assert not torch.equal(pairs, alone), "too dull a model to show another arithmetic"
        torch.testing.assert_close(alone, pairs, atol=0.1, rtol=0.1)
    finally:
        ops.bind("cpu", {"*": "torch"})


@pytest.mark.skipif(_C.amx_status() != "the processor has no AMX", reason="the instructions would not be refused")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.slow
def test_the_kernel_of_tile_instructions_has_the_bits_of_software_tiles(tmp_path: Path) -> None:
    """Its 8,000 products and all that goes with them, executed one by one by a handler of SIGILL."""
    sources, program = Path(__file__).parents[2] / "csrc", tmp_path / "amx_traps"
    kernel = [*(f"-m{feature}" for feature in FEATURES), "-O3", "-DTOKSERVE_ISA=avx512_bf16", "-ffp-contract=off", "-w"]
    compiler = ["g++", "-std=c++20", "-fno-pie", "-no-pie", f"-I{sources}"]
    subprocess.run([*compiler, *kernel, "-c", sources / "gemm_amx.cpp", "-o", tmp_path / "kernel.o"], check=True)
    # the table names kernels of other files, none of which is called
    link = ["-O1", "-Wl,--unresolved-symbols=ignore-all", "-o", str(program)]
    subprocess.run([*compiler, Path(__file__).parent / "amx_traps.cpp", tmp_path / "kernel.o", *link], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    assert counts["tdpbf16ps"] > 8000 and counts["tileloadd"] > counts["tdpbf16ps"] and counts["tilerelease"] > 0
