"""The C++ extension itself: instruction sets, threads, exit, and arguments that must raise instead of crashing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import pages
from tests.ops.packing import PACKING, pack_arguments
from tests.ops.samples import gradients, recurrent
from tests.ops.samples.float8 import by_group
from tests.ops.samples.wna16 import weights
from tests.tiers import slow_cases
from tokserve import ops
from tokserve.ops import registry
from tokserve.ops.registry import OPS

_C = pytest.importorskip("tokserve._C")
registry.load_extension("cpu")
# for devices with their own memory or a library of products, and gradients by torch
NOT_ON_CPU = {"sample_few", "advance_step", "edit_rows", "prepare_step", "attention_work", "accept_library"}
NOT_ON_CPU |= gradients.BY_TORCH
NAMES = [name for name in OPS if not name.startswith("pack_") and name not in NOT_ON_CPU]
CALLS: dict[str, Callable[..., Any]] = {
    name: op.implementations["cpp"].call for name, op in OPS.items() if name not in NOT_ON_CPU
}


SHAPES = [(1, 1, 1), (65, 31, 130), (64, 4096, 2)]  # outputs, columns, rows


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    chosen, threads = _C.instruction_set(), _C.threads()
    yield
    _C.select(chosen)
    _C.set_threads(threads)


def run(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Outputs, and the arguments after the call: some ops write into them."""
    arguments = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
    arguments = pack_arguments(name, "cpp", arguments)
    arguments = pages.arguments_held(name, "cpp", arguments)
    result = CALLS[name](*arguments)
    return outputs(result, pages.arguments_as_rows(name, "cpp", arguments))


def outputs(result: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    returned = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    return returned + [a for a in arguments if isinstance(a, Tensor)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_every_op_has_a_cpp_implementation() -> None:
    assert {name for name, op in OPS.items() if "cpp" not in op.available("cpu")} == NOT_ON_CPU


def test_the_best_kernels_are_chosen_and_others_can_be() -> None:
    names = _C.instruction_sets()
    assert names[-1] == "portable" and len(set(names)) == len(names)
    for name in names:
        _C.select(name)
        assert _C.instruction_set() == name
    with pytest.raises(ValueError, match="z80"):
        _C.select("z80")


FMA = [name for name in _C.instruction_sets() if _C.arithmetic(name) == "fma"]


def test_the_last_kernels_run_anywhere_and_multiply_with_fma() -> None:
    assert FMA[-1] == "portable" == _C.instruction_sets()[-1]
    assert {_C.arithmetic(name) for name in _C.instruction_sets()} <= {"fma", "pairs", "amx"}


@pytest.mark.parametrize("name", ["linear", "linear_int8"])
@pytest.mark.parametrize("isa", _C.instruction_sets())
def test_linear_rows_have_the_same_bits_in_any_tile(isa: str, name: str) -> None:
    _C.select(isa)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, packed = randn(40, 301, dtype=dtype), CALLS[PACKING[name]](randn(130, 301, dtype=dtype, seed=1))
        result = CALLS[name](x, packed, None, torch.float32)
        for size in range(1, 40):
            assert torch.equal(CALLS[name](x[:size], packed, None, torch.float32), result[:size])


@pytest.mark.parametrize(("rows", "columns", "tokens"), slow_cases([(200, 1027, 300), *SHAPES], *SHAPES))
def test_int8_has_the_bits_of_the_reference_on_every_instruction_set(rows: int, columns: int, tokens: int) -> None:
    """Odd shapes, more than one block of rows; a weight packed by one set is good for the others."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((tokens, columns), (rows, columns), (rows,)))
        expected = OPS["linear_int8"].reference(x, OPS["pack_linear_int8"].reference(weight), bias, None)
        _C.select(_C.instruction_sets()[0])
        packed = CALLS["pack_linear_int8"](weight)
        for isa in _C.instruction_sets():
            _C.select(isa)
            for threads in (1, 2):
                _C.set_threads(threads)
                assert torch.equal(CALLS["pack_linear_int8"](weight).packed, packed.packed)
                assert torch.equal(CALLS["linear_int8"](x, packed, bias), expected)
                if rows % 2 == 0:
                    gated = CALLS["pack_gated_int8"](weight)
                    assert torch.equal(CALLS["gated_linear_int8"](x, gated, bias, None), expected)
                    result = CALLS["gated_linear_int8"](x, gated, bias, "silu")
                    assert torch.equal(result, CALLS["silu_mul"](expected))


@pytest.mark.parametrize("isa", _C.instruction_sets())
def test_attention_of_the_last_query_has_the_bits_of_the_whole(isa: str) -> None:
    _C.select(isa)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        caches = randn(2, 9, 2, 16, 40, dtype=dtype)
        q, tables = randn(140, 6, 40, dtype=dtype, seed=1), torch.randperm(9)[None].int()
        for window in (0, 30):
            result = attend(q, caches, tables, 140, window)
            for size in (1, 2, 31, 139):
                assert torch.equal(attend(q[-size:], caches, tables, 140, window), result[-size:])


@pytest.mark.parametrize("isa", _C.instruction_sets())
def test_a_row_with_a_nan_logit(isa: str) -> None:
    """The first logit is in the lane of the one that is not a number: the row's maximum does not see it."""
    _C.select(isa)
    logits = torch.zeros(1, 256)
    logits[0, 0], logits[0, 64] = 90.0, float("nan")
    settings = torch.tensor([0], dtype=torch.int32), torch.tensor([0.5]), torch.tensor([0.0])
    assert CALLS["filter_logits"](logits, *settings).isnan().nonzero().tolist() == [[0, 64]]
    token, _, _, top = CALLS["logprobs"](logits, torch.tensor([3]), 2, None, None)
    assert token.isnan().all() and top.isnan().all()


def attend(q: Tensor, caches: Tensor, tables: Tensor, length: int, window: int) -> Tensor:
    starts, lens = torch.tensor([0, len(q)], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    result: Tensor = CALLS["paged_attention"](
        q, caches[0], caches[1], tables, starts, lens, q.shape[-1] ** -0.5, window
    )
    return result


def mixture(dtype: torch.dtype) -> tuple[Any, ...]:
    """Some experts with no rows, one with more than a block of rows, others with few."""
    ids = torch.tensor([[2, 5 if token % 3 else 0] for token in range(300)], dtype=torch.int32)
    x, weights = randn(300, 128, dtype=dtype), randn(300, 2).abs()
    up, down = randn(8, 192, 128, dtype=dtype) / 11, randn(8, 128, 96, dtype=dtype) / 10
    return x, ids, weights, up, randn(8, 192, dtype=dtype), down, None, "silu", x.flip(1), randn(300, 1)


def integer_mixture(dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of `mixture`, with weights of every kind; the expert with many rows has one of float8."""
    x, ids, chosen, *_, shared, gate = mixture(dtype)
    ids, bias = torch.where(ids == 2, 8, ids).int(), randn(9, 192, dtype=dtype)
    up: list[Any] = [[kind] for kind in weights(192, 128)]
    up[0], up[5] = [weights(96, 128)[3], weights(96, 128)[7]], randn(192, 128, dtype=dtype) / 11
    return x, ids, chosen, up, bias, [[kind] for kind in weights(128, 96)], None, "silu", shared, gate


@cache
def large_cases() -> dict[str, tuple[Any, ...]]:
    """Arguments large enough that the work is given to threads."""
    bf16 = torch.bfloat16
    logits = randn(9, 20000) * 4
    history = torch.randint(0, 20000, (9, 300), generator=torch.Generator().manual_seed(0)).int()
    lens = torch.full((9,), 300, dtype=torch.int32)
    caches = randn(2, 160, 1, 16, 64, dtype=bf16)
    index = torch.arange(9)
    table = randn(600, 64)
    return {
        "gated_delta": (
            randn(70, 384 + 128, dtype=bf16), randn(70, 8, dtype=bf16), randn(4, 384), randn(4), randn(4),
            randn(32), 1e-6, False, randn(9, 4, 64, 32), randn(9, 6, 392, dtype=bf16),
            *recurrent.columns(((50, 50, 0, 50), (20, 30, 8, 28)), ((0, 16, 5), (1, 20, 6))),
        ),
        "short_conv": (
            randn(70, 3 * 512, dtype=bf16), randn(4, 512), None, randn(9, 6, 512, dtype=bf16),
            *recurrent.columns(((50, 50, 0, 50), (20, 30, 8, 28)), ((0, 16, 5), (1, 20, 6))),
        ),
        "scan_states": recurrent.large_scan(), "gate_heads": (randn(70, 4, 8, dtype=bf16), randn(70, 99, dtype=bf16)),
        "rms_norm": (randn(300, 512, dtype=bf16), randn(512, dtype=bf16), 1e-6),
        "add_rms_norm": (randn(300, 512), randn(300, 512, seed=1), randn(512), 1e-6),
        "layer_norm": (randn(300, 512, dtype=bf16), randn(512, dtype=bf16), randn(512, dtype=bf16), 1e-6),
        "add_layer_norm": (randn(300, 512), randn(300, 512, seed=1), randn(512), None, 1e-6, 0.3),
        "add_residual": (randn(300, 512), randn(300, 512, seed=1), 0.3),
        "scale_by_position": (randn(300, 4, 128), torch.arange(300) * 50, 0.1, 1000),
        "scale_rows": (randn(300, 512), randn(300)), "norm_values": (randn(300, 512, dtype=bf16), 2, 64, 1e-6, True),
        "gate_inputs": (randn(300, 512), randn(300, 1024), 1, "gelu"), "activate": (randn(300, 512), "gelu"),
        "silu_mul": (randn(300, 1024, dtype=bf16),), "gelu_mul": (randn(300, 1024),),
        "cap": (randn(300, 512), 2.0, 3.0), "scale_choices": (randn(300, 8), torch.zeros(300, 8).int(), randn(6)),
        "rope": (randn(300, 8, 64), randn(300, 2, 64), table, torch.arange(300)),
        "store_kv": (*randn(2, 2000, 1, 64, dtype=bf16).unbind(), *caches.unbind(), torch.randperm(2560)[:2000]),
        "linear": (randn(300, 512, dtype=bf16), randn(700, 512, dtype=bf16), randn(700, dtype=bf16), None),
        "linear_int8": (randn(300, 512, dtype=bf16), randn(700, 512, dtype=bf16), randn(700, dtype=bf16), None),
        "quantize_rows": (randn(300, 512, dtype=bf16),), "quantize_int4": (randn(300, 500, dtype=bf16), 64),
        "packed_positions": (CALLS["pack_linear"](randn(700, 512, dtype=bf16)), 3, torch.arange(0, 690 * 512, 7)),
        "activation_gradients": (randn(300, 512), randn(300, 1024, seed=1), "gelu_tanh", True),
        "norm_gradients": (randn(700, 512), randn(700, 512, seed=1), randn(512), 1e-6),
        "matrix_product": (randn(300, 512, dtype=bf16), randn(512, 700, dtype=bf16), torch.float32),
        "attention_gradients": (  # 300 tokens, and 60 that share the first 200 of them
            *randn(2, 360, 8, 64, dtype=bf16).unbind(), *randn(2, 360, 2, 64, dtype=bf16).unbind(),
            torch.tensor([0, 200, 300, 360]),
            torch.cat([torch.arange(200), torch.arange(300), torch.arange(200), torch.arange(300, 360)]),
            torch.tensor([0, 200, 500, 760]), 0.125, 0,
        ),
        "paged_attention": (  # one decode row with a long context: its splits go to different threads
            randn(1, 4, 64, dtype=bf16), *caches.unbind(), torch.arange(160, dtype=torch.int32)[None],
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2500], dtype=torch.int32), 0.125, 0,
        ),
        "gated_linear": (randn(300, 512, dtype=bf16), randn(700, 512, dtype=bf16), randn(700, dtype=bf16), "silu"),
        "linear_float8": (randn(300, 512, dtype=bf16), by_group(randn(700, 512)), None, None),
        "gated_linear_float8": (randn(300, 512, dtype=bf16), randn(700, 512, dtype=bf16), None, "gelu_tanh"),
        "gated_linear_int8": (randn(300, 512, dtype=bf16), randn(700, 512, dtype=bf16), None, "gelu_tanh"),
        "linear_wna16": (randn(300, 512, dtype=bf16), [*weights(350, 512)[:2]], None, None),
        "gated_linear_wna16": (randn(300, 512, dtype=bf16), weights(700, 512)[2:3], randn(700, dtype=bf16), "silu"),
        "embedding_wna16": (torch.arange(300) * 7 % 700, weights(700, 512)[3:4], bf16),
        "add_lora": (
            randn(300, 700, dtype=bf16), randn(300, 512, dtype=bf16), (torch.arange(300) // 7 % 4 - 1).int(),
            randn(3, 2, 16, 512, dtype=bf16), randn(3, 16, 700, dtype=bf16),
            torch.tensor([[16, 7], [5, 16], [0, 0]], dtype=torch.int32), torch.tensor([[0.5, 2.0], [1.0, 0.7], [1, 1]]),
            (600, 100),
        ),
        "route": (randn(300, 64), randn(64, seed=1), 6, True, 8, 4, True, True, 1e-6, 2.5),
        "experts": mixture(bf16), "experts_int8": mixture(torch.float32),
        "experts_float8": mixture(bf16),
        "experts_wna16": integer_mixture(bf16),
        "linear_heads": (randn(300, 4, 160, dtype=bf16), list(randn(4, 200, 128, dtype=bf16))),
        "store_rows": (randn(300, 320), randn(40, 16, 320), torch.randperm(640)[:300]),
        "latent_rope_store": (
            randn(300, 8, 96), randn(300, 320), randn(256), 1e-6, table, torch.arange(300), randn(40, 16, 320),
            torch.randperm(640)[:300], True,
        ),
        "latent_attention": (  # as that of paged_attention
            randn(1, 4, 64, dtype=bf16), randn(1, 4, 16, dtype=bf16), randn(160, 16, 80, dtype=bf16),
            torch.arange(160, dtype=torch.int32)[None], torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([2500], dtype=torch.int32), 0.125,
        ),
        "embedding": (torch.arange(300) * 7 % 700, randn(700, 512, dtype=bf16), 22.5),
        "norm_rope_store": (
            randn(300, 12 * 64, dtype=bf16), *randn(2, 64, dtype=bf16).unbind(), 1e-6, table, torch.arange(300),
            *randn(2, 40, 2, 16, 64, dtype=bf16).unbind(), torch.randperm(640)[:300],
        ),
        "sample_fused": (logits, index * 977, index, index % 3 == 0, 0.5 + index * 0.25, True, 7),
        "sample": (logits, index * 977, index, index % 3 == 0),
        "filter_logits": (logits, index.int() * 20, 1 - index * 0.1, index % 2 * 0.01),
        "sampling_mask": (
            logits, logits.masked_fill(logits < index[:, None] * 0.4, float("-inf")), logits.argmax(-1), index == 4,
            0.5 + index * 0.25, 900,
        ),
        "penalize": (logits, history, lens // 2, lens, torch.ones(9), torch.ones(9), torch.full((9,), 1.1)),
        "logprobs": (logits, index, 20, index[:, None], 0.5 + index * 0.25),
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_threads(name: str) -> None:
    arguments = large_cases()[name]
    _C.set_threads(1)
    alone = run(name, arguments)
    for threads in (2, 3, 5):
        _C.set_threads(threads)
        for _ in range(3):
            for a, b in zip(run(name, arguments), alone, strict=True):
                assert torch.equal(a, b)


def test_many_more_threads_than_cores_give_the_same_bits() -> None:
    """Threads that come late, lists with fewer tasks than threads, threads on one CPU."""
    x = randn(64, 512)
    weights = [CALLS["pack_linear"](randn(rows, 512, seed=rows)) for rows in (200, 2048)]
    _C.set_threads(1)
    alone = [CALLS["linear"](x, packed, None) for packed in weights]
    cpus = sorted(os.sched_getaffinity(0))
    for bound in ([], [cpus[i % len(cpus)] for i in range(64)]):
        assert _C.set_threads(64, bound)
        for _ in range(20):
            for packed, expected in zip(weights, alone, strict=True):
                assert torch.equal(CALLS["linear"](x, packed, None), expected)
    assert not _C.set_threads(2, [cpus[0], 60000])
    for wrong in ([0], [0, -1]):
        with pytest.raises(ValueError, match="set_threads"):
            _C.set_threads(2, wrong)


def test_splits_on_threads_are_splits_in_one_tile() -> None:
    caches = randn(2, 160, 1, 16, 64, dtype=torch.bfloat16)
    tables, q = torch.arange(160, dtype=torch.int32)[None], randn(1, 4, 64, dtype=torch.bfloat16)
    for window in (0, 700, 1600):
        _C.set_threads(1)
        alone = attend(q, caches, tables, 2560, window)
        _C.set_threads(4)
        assert torch.equal(attend(q, caches, tables, 2560, window), alone)


def test_calls_from_several_python_threads() -> None:
    _C.set_threads(2)
    x, packed = randn(64, 256), CALLS["pack_linear"](randn(640, 256, seed=1))
    expected = CALLS["linear"](x, packed, None)
    wrong: list[int] = []

    def many() -> None:
        wrong.extend(i for i in range(50) if not torch.equal(CALLS["linear"](x, packed, None), expected))

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_threads_sleep_and_the_process_exits() -> None:
    code = """
import resource, time, torch
from tokserve import ops
ops.bind("cpu")
from tokserve.ops.cpu import kernels
kernels.set_threads(4)
x = torch.randn(64, 512)
packed = ops.pack_linear(torch.randn(512, 512))
ops.linear(x, packed, None)
time.sleep(0.05)
before = resource.getrusage(resource.RUSAGE_SELF)
time.sleep(0.5)
after = resource.getrusage(resource.RUSAGE_SELF)
assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


WIDE = [("linear", torch.float32), ("linear_int8", torch.float32)]
WIDE += [(name, torch.bfloat16) for name in ("linear", "linear_wna16", "linear_float8")]


@pytest.mark.parametrize(("name", "dtype"), WIDE)
def test_rows_that_exceed_the_shared_cache_are_multiplied_in_groups(name: str, dtype: torch.dtype) -> None:
    """400 rows of 16,384 values: four blocks of rows, in groups by their bytes, 26, 13 and 7 MB."""
    x = randn(400, 16384).to(dtype)
    packed = CALLS[PACKING[name]](weights(70, 16384)[:1] if "wna16" in name else randn(70, 16384).to(dtype))
    result = CALLS[name](x, packed, None)
    assert result.isfinite().all()
    for rows in (slice(0, 1), slice(127, 129), slice(250, 400)):
        assert torch.equal(result[rows], CALLS[name](x[rows].contiguous(), packed, None))


def test_bind_sets_the_threads_every_time() -> None:
    bound = {name: getattr(ops, name) for name in OPS}
    for count in (3, 1, 2):
        ops.bind("cpu", threads=count)
        assert _C.threads() == count
    ops.bind("cpu")
    assert _C.threads() == 2
    for name, call in bound.items():
        setattr(ops, name, call)


def test_empty_inputs() -> None:
    none = torch.empty(0, 64)
    assert CALLS["rms_norm"](none, torch.ones(64), 1e-6).shape == (0, 64)
    assert CALLS["silu_mul"](none).shape == (0, 32)
    for name in ("linear", "linear_int8", "linear_float8"):
        assert CALLS[name](none, CALLS[PACKING[name]](randn(10, 64)), None).shape == (0, 10)
    assert CALLS["quantize_rows"](none)[0].shape == (0, 64) and CALLS["quantize_rows"](none)[1].shape == (0,)
    zero, tables = torch.zeros(1, dtype=torch.int32), torch.empty(0, 3, dtype=torch.int32)
    q, caches = torch.empty(0, 2, 32), randn(2, 3, 1, 16, 32)
    assert CALLS["paged_attention"](q, *caches.unbind(), tables, zero, zero[:0], 1.0, 0).shape == (0, 2, 32)
    logits, index = torch.empty(0, 50), torch.empty(0, dtype=torch.int64)
    assert CALLS["sample"](logits, index, index, index.bool()).shape == (0,)
    assert CALLS["logprobs"](logits, index, 3, None, None)[2].shape == (0, 3)


def test_rows_of_a_split_projection_may_be_strided() -> None:
    both = randn(5, 2 * 4 * 32)
    q, k = (part.view(5, 4, 32) for part in both.split(128, -1))
    table, positions = randn(9, 32), torch.arange(5)
    turned = CALLS["rope"](q, k, table, positions)
    dense = CALLS["rope"](q.contiguous(), k.contiguous(), table, positions)
    assert all(torch.equal(a, b) for a, b in zip(turned, dense, strict=True))
    half = both[:, 128:]
    for name in ("linear", "linear_int8", "linear_float8"):
        packed = CALLS[PACKING[name]](randn(20, 128))
        assert torch.equal(CALLS[name](half, packed, None), CALLS[name](half.contiguous(), packed, None))
    pairs = zip(CALLS["quantize_rows"](half), CALLS["quantize_rows"](half.contiguous()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("rows", [1, 7, 65])
def test_packed_weights_are_those_of_torch_for_odd_shapes(rows: int) -> None:
    for columns in (1, 2, 31, 129):
        weight, x = randn(rows, columns, dtype=torch.bfloat16), randn(3, columns, dtype=torch.bfloat16, seed=1)
        result = CALLS["linear"](x, CALLS["pack_linear"](weight), None, torch.float32)
        torch.testing.assert_close(result, x.float() @ weight.float().T, atol=1e-4, rtol=1e-4)


INT, LONG = torch.int32, torch.int64


def wrong_calls() -> dict[str, tuple[str, tuple[Any, ...]]]:
    x, w = randn(3, 64), torch.ones(64)
    packed, eight = CALLS["pack_linear"](randn(10, 64)), CALLS["pack_linear_int8"](randn(10, 64))
    heads, caches = randn(3, 2, 32), randn(2, 4, 1, 16, 32).unbind()
    table, two, five = torch.arange(4, dtype=INT)[None], torch.tensor([0, 3], dtype=INT), torch.tensor([5], dtype=INT)
    logits, ids = randn(2, 50), torch.zeros(2, dtype=LONG)
    count = torch.full((2,), 3, dtype=INT)
    one = torch.ones(2)
    qkv, at, angles = randn(3, 4 * 32), torch.arange(3), randn(4, 32)
    head, cut = (heads, heads, *randn(2, 3, 1, 32).unbind()), torch.tensor([0, 3])
    slots, ranks = torch.zeros(3, dtype=INT), torch.full((2, 2), 4, dtype=INT)
    mixed: tuple[Any, ...] = (
        x, torch.tensor([[0, 1], [2, 0], [1, 2]], dtype=INT), torch.ones(3, 2),
        [CALLS["pack_gated"](randn(10, 64))] * 3, None, [CALLS["pack_linear"](randn(64, 5))] * 3, None, "silu", None,
        None,
    )  # fmt: skip
    of_integers: tuple[Any, ...] = (
        *mixed[:3], [CALLS["pack_gated_wna16"](weights(16, 64)[:1])] * 3, None,
        [CALLS["pack_wna16"](weights(64, 8)[:1])] * 3, *mixed[6:],
    )  # fmt: skip
    line = (heads, randn(3, 52), randn(20), 1e-6, angles, at, randn(4, 16, 52), at, True)
    attended = (randn(3, 2, 20), heads, randn(4, 16, 52), table, two, torch.tensor([64], dtype=INT), 0.1)
    lora = (randn(2, 2, 4, 64), randn(2, 4, 9), ranks, torch.ones(2, 2), (4, 5))
    delta: tuple[Any, ...] = (
        randn(5, 24), randn(5, 4), randn(2, 16), randn(2), randn(2), randn(4), 1e-6, False, randn(3, 2, 4, 4),
        randn(3, 4, 20), *recurrent.columns(((2, 6, 4, 6), (3, 3, 0, 2)), ((0, 5, 2),)),
    )  # fmt: skip
    conv: tuple[Any, ...] = (
        randn(5, 24), randn(2, 8), randn(8), randn(3, 4, 8),
        *recurrent.columns(((2, 6, 4, 6), (3, 3, 0, 2)), ((0, 5, 2),)),
    )  # fmt: skip
    start, end = torch.tensor([6, 0], dtype=INT), torch.tensor([6, 4], dtype=INT)
    wrong_deltas: tuple[tuple[str, int, Any], ...] = (
        ("width", 0, randn(5, 23)), ("dtype", 0, delta[0].half()), ("tokens", 0, randn(6, 24)),
        ("rates", 1, randn(5, 5)), ("channels", 2, randn(2, 15)), ("taps", 2, randn(5, 16)),
        ("heads", 3, randn(3)), ("bias", 4, randn(2).double()), ("norm", 5, randn(5)),
        ("state", 8, randn(3, 3, 4, 4)), ("ring", 9, randn(3, 4, 19)), ("rings", 9, randn(2, 4, 20)),
        ("int64", 11, delta[11].long()), ("a row outside", 12, torch.tensor([0, 3])), ("a state ahead", 13, start),
        ("a state behind", 13, start - 5), ("an end past the row", 14, end), ("an end before the state", 14, end - 3),
        ("a save outside", 15, torch.tensor([[0, 5, 3]], dtype=INT)),
        ("a save not passed", 15, torch.tensor([[0, 4, 2]], dtype=INT)),
        ("a save onto itself", 15, torch.tensor([[0, 5, 0]], dtype=INT)),
    )  # fmt: skip
    return {
        **{
            f"delta: {what}": ("gated_delta", (*delta[:at], wrong, *delta[at + 1 :]))
            for what, at, wrong in wrong_deltas
        },
        **{f"scan: {what}": ("scan_states", arguments) for what, arguments in recurrent.wrong_scans()},
        **{
            f"short conv: {what}": ("short_conv", (*conv[:at], wrong, *conv[at + 1 :]))
            for what, at, wrong in (
                ("width", 0, randn(5, 23)),
                ("weight", 1, randn(2, 8).half()),
                ("bias", 2, randn(7)),
                ("ring", 3, randn(3, 1, 8)),
                ("a state ahead", 7, start),
                ("a row outside", 6, torch.tensor([5, 0])),
            )
        },
        "gates: too few": ("gate_heads", (randn(3, 2, 8), randn(3, 31))),
        "gates: rows": ("gate_heads", (randn(3, 2, 8), randn(2, 32))),
        **{
            f"experts of integers: {what}": ("experts_wna16", (*of_integers[:at], wrong, *of_integers[at + 1 :]))
            for what, at, wrong in (
                ("width", 0, x[:, :63]),
                ("negative id", 1, mixed[1] - 3),
                ("gate", 3, of_integers[3][:2]),
                ("gate's shape", 3, [CALLS["pack_gated_wna16"](weights(14, 64)[:1])] * 3),
                ("floats' shape", 3, [of_integers[3][0], CALLS["pack_gated"](randn(200, 64)), of_integers[3][0]]),
                ("floats' dtype", 3, [of_integers[3][0], CALLS["pack_gated"](randn(16, 64).half()), of_integers[3][0]]),
                ("not gated", 5, [CALLS["pack_gated_wna16"](weights(64, 8)[:1])] * 3),
                ("bias", 4, torch.zeros(3, 9)),
            )
        },
        "experts of integers: two parts": (
            "experts_wna16",
            (
                *of_integers[:3],
                [CALLS["pack_gated_wna16"](weights(8, 64)[:2])] * 3,
                None,
                of_integers[5],
                None,
                "clamped_swiglu",
                None,
                None,
            ),
        ),
        "norm: short weight": ("rms_norm", (x, w[:63], 1e-6)),
        "norm: strided rows": ("rms_norm", (randn(64, 3).t(), w, 1e-6)),
        "norm: integers": ("rms_norm", (x.int(), w, 1e-6)),
        "norm: float64": ("rms_norm", (x.double(), w, 1e-6)),
        "norm: one dimension": ("rms_norm", (x[0], w, 1e-6)),
        "norm: other residual": ("add_rms_norm", (x, x[:2], w, 1e-6)),
        "norm: other bias": ("layer_norm", (x, w, w[:63], 1e-6)),
        "residual: other rows": ("add_residual", (x, x[:2])),
        "cap: a negative limit": ("cap", (x, 1.0, -1.0)),
        "cap: strided rows": ("cap", (randn(64, 3).t(), 1.0, 1.0)),
        "activate: another name": ("activate", (x, "tanh")),
        "activate: odd width": ("activate", (x[:, :63].contiguous(), "silu", True)),
        "store: a norm of some heads": ("norm_rope_store", (qkv, w[:48], w[:32], 1e-6, angles, at, *caches, at)),
        "gate: odd width": ("silu_mul", (randn(3, 7),)),
        "rope: position past the table": ("rope", (heads, heads, randn(4, 32), torch.tensor([0, 1, 4]))),
        "rope: negative position": ("rope", (heads, heads, randn(4, 32), torch.tensor([0, -1, 3]))),
        "rope: too many angles": ("rope", (heads, heads, randn(4, 64), torch.tensor([0, 1, 2]))),
        "rope: tokens differ": ("rope", (heads, heads[:2], randn(4, 32), torch.tensor([0, 1, 2]))),
        "linear: other width": ("linear", (x[:, :63], packed, None)),
        "linear: other dtype": ("linear", (x.bfloat16(), packed, None)),
        "linear: short bias": ("linear", (x, packed, torch.ones(9))),
        "linear: bias dtype": ("linear", (x, packed, torch.ones(10).half())),
        "linear: out dtype": ("linear", (x, packed, None, torch.float16)),
        "gated: odd rows": ("pack_gated", (randn(9, 64),)),
        "gated: activation": ("gated_linear", (x, CALLS["pack_gated"](randn(10, 64)), None, "relu")),
        "gated: short bias": ("gated_linear", (x, CALLS["pack_gated"](randn(10, 64)), torch.ones(5), "silu")),
        "lora: other width": ("add_lora", (x[:, :9].clone(), x[:, :63], slots, *lora)),
        "lora: other dtype": ("add_lora", (x[:, :9].half(), x.half(), slots, *lora)),
        "lora: outputs": ("add_lora", (x[:, :8].clone(), x, slots, *lora)),
        "lora: slot": ("add_lora", (x[:, :9].clone(), x, slots + 2, *lora)),
        "lora: rank": ("add_lora", (x[:, :9].clone(), x, slots, *lora[:2], ranks + 4, *lora[3:])),
        "lora: negative rank": ("add_lora", (x[:, :9].clone(), x, slots, *lora[:2], ranks - 5, *lora[3:])),
        "lora: sizes": ("add_lora", (x[:, :9].clone(), x, slots, *lora[:4], (4, 4))),
        "lora: negative size": ("add_lora", (x[:, :9].clone(), x, slots, *lora[:4], (10, -1))),
        "lora: shards": ("add_lora", (x[:, :9].clone(), x, slots, *lora[:4], (9,))),
        "lora: int64": ("add_lora", (x[:, :9].clone(), x, slots.long(), *lora)),
        "lora: scales": ("add_lora", (x[:, :9].clone(), x, slots, *lora[:3], lora[3].half(), (4, 5))),
        "route: too many": ("route", (logits, None, 51, False, 1, 1, False, True, 0.0, 1.0)),
        "route: none": ("route", (logits, None, 0, False, 1, 1, False, True, 0.0, 1.0)),
        "route: groups": ("route", (logits, None, 2, False, 3, 1, False, True, 0.0, 1.0)),
        "route: groups kept": ("route", (logits, None, 2, False, 5, 6, False, True, 0.0, 1.0)),
        "route: groups of one": ("route", (logits, None, 2, True, 50, 20, True, True, 0.0, 1.0)),
        "route: bias": ("route", (logits, torch.zeros(49), 2, True, 1, 1, False, True, 0.0, 1.0)),
        "route: float64": ("route", (logits.double(), None, 2, True, 1, 1, False, True, 0.0, 1.0)),
        **{
            f"experts: {what}": ("experts", (*mixed[:at], wrong, *mixed[at + 1 :]))
            for what, at, wrong in (
                ("width", 0, x[:, :63]),
                ("dtype", 0, x.half()),
                ("int64", 1, mixed[1].long()),
                ("id", 1, mixed[1] + 3),
                ("negative id", 1, mixed[1] - 3),
                ("weights", 2, mixed[2][:2]),
                ("gate", 3, mixed[3][:2]),
                ("gate's shape", 3, [CALLS["pack_gated"](randn(12, 64))] * 3),
                ("bias", 4, torch.zeros(3, 9)),
                ("down's shape", 5, [CALLS["pack_linear"](randn(64, 7))] * 3),
                ("down's bias", 6, torch.zeros(2, 64)),
                ("activation", 7, "relu"),
                ("shared", 8, x[:2]),
                ("shared gate", 9, torch.zeros(3)),
            )
        },
        **{
            f"heads: {what}": ("linear_heads", arguments)
            for what, arguments in (
                ("narrow", (heads, [packed] * 2)),
                ("count", (randn(3, 2, 64), [packed] * 3)),
                ("dtype", (randn(3, 2, 64).half(), [packed] * 2)),
            )
        },
        **{
            f"row: {what}": ("latent_rope_store", (*line[:at], wrong, *line[at + 1 :]))
            for what, at, wrong in (
                ("width", 1, randn(3, 53)),
                ("dtype", 1, randn(3, 52).half()),
                ("norm", 2, randn(21)),
                ("odd angles", 4, randn(4, 31)),
                ("wide angles", 4, randn(4, 34)),
                ("position", 5, torch.arange(3) + 2),
                ("cache", 6, randn(4, 16, 50)),
                ("slot", 7, torch.arange(3) + 62),
            )
        },
        **{
            f"latent: {what}": ("latent_attention", (*attended[:at], wrong, *attended[at + 1 :]))
            for what, at, wrong in (
                ("strided", 0, randn(3, 20, 2).transpose(1, 2)),
                ("odd", 0, randn(3, 2, 19)),
                ("rotated", 1, randn(3, 2, 30)),
                ("tokens", 1, randn(2, 2, 32)),
                ("dtype", 2, randn(4, 16, 52).half()),
                ("cache", 2, randn(4, 16, 50)),
                ("page", 3, table + 1),
                ("short table", 5, torch.tensor([65], dtype=INT)),
                ("start", 4, torch.tensor([0, 2], dtype=INT)),
            )
        },
        "embedding: id past the end": ("embedding", (torch.tensor([10]), packed)),
        "embedding: negative id": ("embedding", (torch.tensor([-1]), packed)),
        "embedding: int32": ("embedding", (torch.tensor([1], dtype=INT), packed)),
        "store: one norm": ("norm_rope_store", (qkv, w[:32], None, 1e-6, angles, at, *caches, at)),
        "store: a slot outside": ("norm_rope_store", (qkv, None, None, 1e-6, angles, at, *caches, at + 62)),
        "store: a position outside": ("norm_rope_store", (qkv, None, None, 1e-6, angles, at + 2, *caches, at)),
        "store: width": ("norm_rope_store", (qkv[:, :97], None, None, 1e-6, angles, at, *caches, at)),
        "sample_fused: k over V": ("sample_fused", (logits, ids, ids, ids == 0, None, False, 51)),
        "sample_fused: short temperature": ("sample_fused", (logits, ids, ids, ids == 0, one[:1], False, -1)),
        "pack: one dimension": ("pack_linear", (w,)),
        "int8: other width": ("linear_int8", (x[:, :63], eight, None)),
        "int8: short bias": ("linear_int8", (x, eight, torch.ones(9))),
        "int8: bias dtype": ("linear_int8", (x, eight, torch.ones(10).half())),
        "int8: out dtype": ("linear_int8", (x, eight, None, torch.float16)),
        "int8: float64": ("linear_int8", (x.double(), eight, None)),
        "int8: short scales": ("linear_int8", (x, replace(eight, scales=eight.scales[:9]), None)),
        "int8: too many rows": ("linear_int8", (x, replace(eight, rows=65, scales=torch.ones(65)), None)),
        "int8: sums could overflow": ("pack_linear_int8", (torch.ones(1, 131073),)),
        "int8: pack integers": ("pack_linear_int8", (x.int(),)),
        "int8: pack odd gated rows": ("pack_gated_int8", (randn(9, 64),)),
        "int8: activation": ("gated_linear_int8", (x, CALLS["pack_gated_int8"](randn(10, 64)), None, "relu")),
        "int8: short gated bias": (
            "gated_linear_int8",
            (x, CALLS["pack_gated_int8"](randn(10, 64)), torch.ones(5), "silu"),
        ),
        "quantize: integers": ("quantize_rows", (x.int(),)),
        "quantize: strided rows": ("quantize_rows", (randn(64, 3).t(),)),
        "store: row past the end": ("store_rows", (randn(2, 8), randn(3, 4, 8), torch.tensor([0, 12]))),
        "store: rows of another width": ("store_rows", (randn(2, 8), randn(3, 4, 9), torch.tensor([0, 1]))),
        "store: rows of another dtype": ("store_rows", (randn(2, 8), randn(3, 4, 8).half(), torch.tensor([0, 1]))),
        "store: slot past the end": ("store_kv", (heads[:, :1], heads[:, :1], *caches, torch.tensor([0, 1, 64]))),
        "store: negative slot": ("store_kv", (heads[:, :1], heads[:, :1], *caches, torch.tensor([0, 1, -1]))),
        "store: heads": ("store_kv", (heads, heads, *caches, torch.tensor([0, 1, 2]))),
        "gradients: another activation": ("activation_gradients", (x, x, "tanh")),
        "gradients: a gate of odd width": (
            "activation_gradients",
            (x[:, :31].contiguous(), x[:, :63].contiguous(), "silu", True),
        ),
        "gradients: other width": ("activation_gradients", (randn(3, 31), x, "silu", True)),
        "gradients: short weight": ("norm_gradients", (x, x, w[:63], 1e-6)),
        "gradients: other rows": ("norm_gradients", (x[:2], x, w, 1e-6)),
        "gradients: a bfloat16 gradient": ("norm_gradients", (x.bfloat16(), x, w, 1e-6)),
        "gradients: carried rows": ("norm_gradients", (x, x, w, 1e-6, x[:2])),
        "gradients: more queries than positions": ("attention_gradients", (*head, cut, at[1:], cut - 1, 1.0, 0)),
        "gradients: starts do not end at T": ("attention_gradients", (*head, cut - 1, at, cut, 1.0, 0)),
        "gradients: paths that are not all used": ("attention_gradients", (*head, cut, at, cut - 1, 1.0, 0)),
        "gradients: a path past the end": ("attention_gradients", (*head, cut, at + 1, cut, 1.0, 0)),
        "gradients: a path backwards": ("attention_gradients", (*head, cut, at.flip(0), cut, 1.0, 0)),
        "gradients: other heads": ("attention_gradients", (*head[:3], randn(3, 2, 32), cut, at, cut, 1.0, 0)),
        "gradients: other dtype": ("attention_gradients", (head[0].half(), *head[1:], cut, at, cut, 1.0, 0)),
        "gradients: int32 starts": ("attention_gradients", (*head, cut.int(), at, cut, 1.0, 0)),
        "attention: page past the end": ("paged_attention", (heads, *caches, table + 4, two, five, 1.0, 0)),
        "attention: negative page": ("paged_attention", (heads, *caches, table - 1, two, five, 1.0, 0)),
        "attention: longer than its table": ("paged_attention", (heads, *caches, table, two, five * 13, 1.0, 0)),
        "attention: more queries than keys": ("paged_attention", (heads, *caches, table, two, five - 3, 1.0, 0)),
        "attention: starts do not end at T": ("paged_attention", (heads, *caches, table, two - 1, five, 1.0, 0)),
        "attention: dtype": ("paged_attention", (heads.half(), *caches, table, two, five, 1.0, 0)),
        "attention: sinks": ("paged_attention", (heads, *caches, table, two, five, 1.0, 0, 1.0, 0.0, torch.ones(3))),
        "attention: flags": ("paged_attention", (heads, *caches, table, two, five, 1.0, 0, 1.0, 0.0, None, two > 0)),
        "attention: int64 table": ("paged_attention", (heads, *caches, table.long(), two, five, 1.0, 0)),
        "sample: seeds": ("sample", (logits, ids[:1], ids, ids == 0)),
        "sample: bfloat16": ("sample", (logits.bfloat16(), ids, ids, ids == 0)),
        "sample: no vocabulary": ("sample", (logits[:, :0], ids, ids, ids == 0)),
        "logprobs: id outside": ("logprobs", (logits, ids + 50, 0, None, None)),
        "logprobs: k over V": ("logprobs", (logits, ids, 51, None, None)),
        "logprobs: named outside": ("logprobs", (logits, ids, 0, ids[:, None] - 1, None)),
        "mask: processed": ("sampling_mask", (logits, logits[:, 1:], ids, ids == 0, one, 5)),
        "mask: id outside": ("sampling_mask", (logits, logits, ids + 50, ids == 0, one, 5)),
        "mask: greedy": ("sampling_mask", (logits, logits, ids, ids, one, 5)),
        "filter: int64 k": ("filter_logits", (logits, ids, one, one)),
        "penalize: id outside": ("penalize", (logits, torch.full((2, 4), 50, dtype=INT), count, count, one, one, one)),
        "penalize: too long": ("penalize", (logits, torch.zeros(2, 2, dtype=INT), count, count, one, one, one)),
    }


@pytest.mark.parametrize("case", wrong_calls())
def test_wrong_arguments_raise(case: str) -> None:
    name, arguments = wrong_calls()[case]
    with pytest.raises((ValueError, IndexError, TypeError)):
        CALLS[name](*arguments)


def test_what_is_not_a_tensor_raises() -> None:
    with pytest.raises(TypeError):
        _C.silu_mul([[1.0, 2.0]], torch.empty(1, 1))
    with pytest.raises(TypeError):
        _C.silu_mul(torch.empty(1, 2, device="meta"), torch.empty(1, 1))
    with pytest.raises(ValueError, match="1 to 1024"):
        _C.set_threads(0)


def test_16_bit_conversions_are_torch() -> None:
    """Every bit pattern read as float32, and every float32 boundary written, by each instruction set."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)[None]
    for isa in _C.instruction_sets():
        _C.select(isa)
        for dtype in (torch.bfloat16, torch.float16):
            values = patterns.view(dtype)
            zeros = torch.zeros_like(values)
            _, total = CALLS["add_rms_norm"](values, zeros, torch.ones(values.shape[1], dtype=dtype), 1e-6)
            assert torch.equal((values + zeros).nan_to_num(), total.nan_to_num())
            assert torch.equal(values.isnan(), total.isnan())
            other = values.flip(-1).contiguous()
            _, total = CALLS["add_rms_norm"](values, other * 0.37, torch.ones(values.shape[1], dtype=dtype), 1e-6)
            assert torch.equal((values + other * 0.37).nan_to_num(), total.nan_to_num())
