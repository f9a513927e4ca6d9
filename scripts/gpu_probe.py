#!/usr/bin/env python3
"""Twelve questions to a GPU, answered in about a minute with yes or no and microseconds: what docs/gpu-checklist.md
takes for granted, and what decides which of the kernels' next forms are worth building.

    python scripts/gpu_probe.py [--out FILE.json] [--only 1,2,7]

A question that fails says so and costs the others nothing.  Where there is no GPU it says that, and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")  # torch reads both when it is imported: no split of K
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve import ops
from tokserve.gpu.kernels import attention, launch
from tokserve.layers.attention import AttentionSpec
from tokserve.layers.options import LayerOptions
from tokserve.layers.rope import NO_ROPE
from tokserve.ops.registry import OPS
from tokserve.runner import device, exactness

EXACT = launch.EXACT
ROWS = (1, 2, 16, 17, 64, 65, 128, 129, 256, 257)
Answer = tuple[bool | None, str]
Questions = list[tuple[int, str, Callable[[Any], Answer]]]


@dataclass(frozen=True)
class Shapes:
    """What is asked about: `products` are (outputs, inputs), `contexts` (rows, keys of each)."""

    products: tuple[tuple[int, int], ...] = ((4096, 1024), (1024, 3072), (6144, 4096), (24576, 4096), (4096, 12288))
    rows: tuple[int, ...] = (1, 64, 300, 2048)
    heads: tuple[int, int, int] = (32, 8, 128)  # of queries, of keys, elements of one
    contexts: tuple[tuple[int, int], ...] = ((1, 8192), (64, 1024), (256, 1024))
    prompt: int = 1000
    vocabulary: int = 151936
    dtype: torch.dtype = torch.bfloat16


@triton.jit
def product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """x [rows, inputs] times weight [outputs, inputs] transposed, in ascending order; SWAPPED: as (weight x^T)^T."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32) if SWAPPED else tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, STEP):
        k = start + tl.arange(0, STEP)[None, :]
        x = tl.load(x_ptr + row * inputs + k, mask=(row < rows) & (k < inputs), other=0.0)
        weight = tl.load(weight_ptr + output * inputs + k, mask=(output < outputs) & (k < inputs), other=0.0)
        if SWAPPED:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    acc = tl.trans(acc) if SWAPPED else acc
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    tl.store(out_ptr + row * outputs + column, acc, mask=(row < rows) & (column < outputs))


@triton.jit
def empty_kernel(out_ptr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + tl.program_id(0), 1.0)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(ops.torch_device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=ops.torch_device).to(dtype)


def product(x: Tensor, weight: Tensor, tile: tuple[int, int], *, swapped: bool = False) -> Tensor:
    """float32, by a kernel of this program."""
    (rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs, dtype=torch.float32)
    grid = (triton.cdiv(rows, tile[0]), triton.cdiv(outputs, tile[1]))
    product_kernel[grid](x, weight, out, rows, outputs, inputs, *tile, 64, swapped, num_warps=4, **EXACT)
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """float32, by the kernel that serves."""
    packed = ops.PackedWeight(len(weight), weight.shape[1], weight.dtype, weight)
    product: Tensor = OPS["linear"].implementations["triton"].call(x, packed, None, torch.float32)
    return product


def seconds(run: Callable[[], object], count: int = 20) -> float:
    """The time of one run; on a GPU from a graph of runs, which the host does not slow down."""
    run()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def host_us(run: Callable[[], object], count: int = 50) -> float:
    """Microseconds of the host for one call."""
    run()
    began = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - began) / count * 1e6


def each_product(shapes: Shapes, same: Callable[[Tensor, Tensor], bool]) -> Answer:
    unequal = []
    for outputs, inputs in shapes.products:
        x = random(max(shapes.rows), inputs, dtype=shapes.dtype)
        weight = random(outputs, inputs, dtype=shapes.dtype, seed=1)
        if not same(x, weight):
            unequal.append(f"{outputs}x{inputs}")
    return not unequal, " ".join(unequal)


def tiles_are_equal(shapes: Shapes) -> Answer:
    def same(x: Tensor, weight: Tensor) -> bool:
        all_rows = linear(x, weight)
        return all(torch.equal(linear(x[:rows], weight), all_rows[:rows]) for rows in ROWS if rows <= len(x))

    return each_product(shapes, same)


def library_is_equal(shapes: Shapes) -> Answer:
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    by_rows = {}
    for rows in shapes.rows:

        def same(x: Tensor, weight: Tensor, rows: int = rows) -> bool:
            return torch.equal(x[:rows] @ weight.t(), linear(x[:rows], weight).to(x.dtype))

        by_rows[rows] = each_product(shapes, same)
    unequal = [f"{rows} rows: {answer[1]}" for rows, answer in by_rows.items() if not answer[0]]
    return not unequal, "; ".join(unequal)


def swapped_is_equal(shapes: Shapes) -> Answer:
    return each_product(
        shapes, lambda x, w: torch.equal(product(x[:16], w, (16, 64), swapped=True), product(x[:16], w, (64, 64)))
    )


def small_tiles_are_equal(shapes: Shapes) -> Answer:
    return each_product(shapes, lambda x, w: torch.equal(product(x[:16], w, (16, 64)), product(x[:16], w, (64, 64))))


def attention_inputs(shapes: Shapes, rows: int, keys: int, queries: int) -> tuple[Any, ...]:
    heads, kv_heads, dim = shapes.heads
    pages, home = -(-keys // 64), ops.torch_device
    caches = random(2, rows * pages, kv_heads, 64, dim, dtype=shapes.dtype).unbind()
    tables = torch.arange(rows * pages, dtype=torch.int32, device=home).view(rows, pages)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=home) * queries
    lengths = torch.full((rows,), keys, dtype=torch.int32, device=home)
    q = random(rows * queries, heads, dim, dtype=shapes.dtype, seed=1)
    return q, *caches, tables, starts, lengths, dim**-0.5, 0


def large_tiles_are_equal(shapes: Shapes) -> Answer:
    inputs, attend = attention_inputs(shapes, 1, shapes.prompt, shapes.prompt), attention.attend_rows
    large, large_time = attend(*inputs), seconds(lambda: attend(*inputs), 3)
    before = attention.PROMPT_TILE
    try:
        attention.PROMPT_TILE = attention.TILE
        small, small_time = attend(*inputs), seconds(lambda: attend(*inputs), 3)
    finally:
        attention.PROMPT_TILE = before
    return torch.equal(small, large), f"64 rows {small_time * 1e6:.0f} us, 128 rows {large_time * 1e6:.0f} us"


def attention_is_equal(shapes: Shapes) -> Answer:
    heads, kv_heads, dim = shapes.heads
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, NO_ROPE)
    layer = spec.layer(heads * dim, LayerOptions(shapes.dtype))
    pages = torch.empty(2, 1, kv_heads, 64, dim, dtype=shapes.dtype, device=ops.torch_device).unbind()
    return exactness.attends_alike(layer.probe(), pages[0]), "step, chunk and prompt"


def dependent_launch_pays(shapes: Shapes) -> Answer:
    if not torch.cuda.is_available():
        return None, "for a card"
    out, microseconds = torch.zeros(1, device="cuda"), []
    for flag in (False, True):
        microseconds.append(
            seconds(lambda d=flag: empty_kernel[(1,)](out, d, num_warps=4, launch_pdl=d), 300) * 1e6  # type: ignore[misc]
        )
    plain, dependent = microseconds
    return dependent < 0.8 * plain, f"{plain:.2f} us a kernel, {dependent:.2f} with dependent launch"


def decode_speed(shapes: Shapes) -> Answer:
    entry = attention.tuned("attention", ops.torch_device.index, row_bytes=2 * shapes.heads[2], group=4)
    before, parts = entry["programs"], []
    for rows, keys in shapes.contexts:
        inputs = attention_inputs(shapes, rows, keys, 1)
        size, speeds = inputs[1].nbytes + inputs[2].nbytes, []
        for programs in (1, 2, 3):
            try:
                entry["programs"] = programs
                speeds.append(f"{size / seconds(lambda i=inputs: attention.attend_rows(*i), 5) / 1e9:.0f}")  # type: ignore[misc]
            finally:
                entry["programs"] = before
        parts.append(f"{rows} x {keys}: {'/'.join(speeds)} GB/s")
    return None, ", ".join(parts)


def product_speed(shapes: Shapes) -> Answer:
    parts = []
    for outputs, inputs in shapes.products:
        x = random(max(shapes.rows) * 4, inputs, dtype=shapes.dtype)
        weight = random(outputs, inputs, dtype=shapes.dtype, seed=1)
        one, rate = linear_seconds(x[:1], weight), 2 * x.numel() * outputs / linear_seconds(x, weight)
        parts.append(f"{outputs}x{inputs}: {rate / 1e12:.0f}, {one * 1e6:.1f} us")
    return None, "TFLOP/s of a prompt, and one row: " + ", ".join(parts)


def linear_seconds(x: Tensor, weight: Tensor) -> float:
    return seconds(lambda: linear(x, weight), 5)


def draw(logits: Tensor) -> Callable[[], object]:
    """What draws a token of each row, with its logprob."""
    index = torch.arange(len(logits), device=logits.device)
    greedy, ones = index < 0, torch.ones(len(logits), device=logits.device)
    call = OPS["sample_fused"].implementations["triton"].call
    return lambda: call(logits, index, index, greedy, ones, False, 0)


def filtered(logits: Tensor, top_k: int) -> Callable[[], object]:
    """What leaves of each row the best `top_k` (0: all), and of these 0.95 of the mass."""
    ones = torch.ones(len(logits), device=logits.device)
    columns = ones.int() * top_k, ones * 0.95, ones * 0.0
    call = OPS["filter_logits"].implementations["triton"].call
    return lambda: call(logits, *columns)


def sampling_speed(shapes: Shapes) -> Answer:
    parts = []
    for rows in (1, shapes.contexts[-1][0]):
        logits = random(rows, shapes.vocabulary, dtype=torch.float32) * 3
        calls = draw(logits), filtered(logits, 20), filtered(logits, 0)
        times = [f"{seconds(call, 3) * 1e6:.0f}" for call in calls]
        parts.append(f"{rows} rows: draw {times[0]}, top-k and top-p {times[1]}, top-p alone {times[2]} us")
    return None, ", ".join(parts)


def host_speed(shapes: Shapes) -> Answer:
    if not torch.cuda.is_available():
        return None, "for a card"
    gpu, array = device.Cuda(), np.zeros(1024, np.int32)
    token, logits = torch.zeros(1, device="cuda"), random(1, shapes.vocabulary, dtype=torch.float32)
    put, back = host_us(lambda: gpu.put([array])), host_us(lambda: gpu.fetch([token]).arrays())
    return None, f"4 KB to the card {put:.0f} us, draw {host_us(draw(logits)):.0f} us, a token back {back:.0f} us"


def scaled_product_is_equal(shapes: Shapes) -> Answer:
    if not torch.cuda.is_available():
        return None, "for a card"
    outputs, inputs = shapes.products[-1]
    x, weight = (random(n, inputs, dtype=torch.float32).to(torch.float8_e4m3fn) for n in (2048, outputs))
    scales, columns = torch.rand(2048, 1, device="cuda"), torch.rand(1, outputs, device="cuda")

    def scaled(rows: int) -> Tensor:
        product: Tensor = torch._scaled_mm(
            x[:rows], weight.t(), scale_a=scales[:rows], scale_b=columns, out_dtype=torch.bfloat16
        )
        return product

    all_rows = scaled(2048)
    unequal = [str(rows) for rows in (1, 64) if not torch.equal(scaled(rows), all_rows[:rows])]
    return not unequal, f"differs at {' '.join(unequal)} rows" if unequal else ""


QUESTIONS: list[tuple[str, Callable[[Shapes], Answer]]] = [
    ("do products have the same bits in every tile?", tiles_are_equal),
    ("are cuBLASLt's, without a split of K, the same as Triton's?", library_is_equal),
    ("do swapped operands (16 rows) give the same bits?", swapped_is_equal),
    ("does mma.sync (tiles of 16 rows) give the bits of wgmma?", small_tiles_are_equal),
    ("does prompt attention in tiles of 128 rows give the bits of 64?", large_tiles_are_equal),
    ("does attention give a step, a chunk and a prompt the same bits?", attention_is_equal),
    ("does programmatic dependent launch pay?", dependent_launch_pays),
    ("how fast is decode attention with 1/2/3 programs a multiprocessor?", decode_speed),
    ("how fast are products?", product_speed),
    ("how long do drawing and filters take?", sampling_speed),
    ("what does the host take around a step?", host_speed),
    ("is torch._scaled_mm by rows batch invariant?", scaled_product_is_equal),
]


def ask(shapes: Any, only: set[int], questions: Questions | None = None) -> list[dict[str, Any]]:
    """Ask those of the questions (None: of this file) with these numbers, of which none means all, and print each
    answer."""
    answers = []
    for number, question, run in questions or [(number, *one) for number, one in enumerate(QUESTIONS, 1)]:
        if only and number not in only:
            continue
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                answer, text = run(shapes)
            word = {True: "yes", False: "NO", None: "--"}[answer]
        except Exception as error:  # the next question may have an answer
            answer, word, text = None, "FAILED", f"{type(error).__name__}: {str(error)[:200]}"
        took = time.perf_counter() - began
        print(f"{number:2d} {word:6s} {question} {text} [{took:.1f} s]", flush=True)
        answers.append({"number": number, "question": question, "answer": word, "text": text, "seconds": took})
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", default="", help="numbers of questions, with commas")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was asked")
        return
    ops.bind("cuda")
    answers = ask(Shapes(), {int(number) for number in options.only.split(",") if number})
    if options.out is not None:
        options.out.write_text(json.dumps({"card": torch.cuda.get_device_name(), "answers": answers}, indent=1))
    sys.exit(any(answer["answer"] == "FAILED" for answer in answers))


if __name__ == "__main__":
    main()
