#!/usr/bin/env python3
"""More questions to a GPU, numbered on from gpu_probe.py: bits and microseconds of kernels that have not run on one.

    python scripts/gpu_probe2.py [--out FILE.json] [--only 13,20]

Answers take about three minutes with an empty compile cache.  A question that fails says so and costs the others
nothing.  Where there is no GPU it says that, and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_probe
import numpy as np
import torch
import triton
import triton.language as tl
from gpu_probe import Answer, Shapes, attention_inputs, each_product, linear, random, seconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.tools.tensor_descriptor import TensorDescriptor

from tokserve import ops
from tokserve.gpu import candidates
from tokserve.gpu.block_copies import DeviceBlocks
from tokserve.gpu.kernels import attention
from tokserve.gpu.kernels.launch import EXACT
from tokserve.gpu.kernels.ranks.exchange import Inboxes, inbox_bytes
from tokserve.gpu.peers import PeerGroup
from tokserve.ops.registry import OPS
from tokserve.protocol.kv_spec import KVLayout, KVSpec
from tokserve.runner import device

TILE = (128, 128, 64)  # rows, outputs, inputs of the warp-specialised product


@dataclass(frozen=True)
class More(Shapes):
    """What is asked about, beside `Shapes`: `steps` are rows of products, `state` heads and width of a delta rule,
    `latent` heads, width and rotated width, `experts` of a layer, their width, and how many a token takes."""

    steps: tuple[int, ...] = (1, 16, 64, 256)
    state: tuple[int, int] = (32, 128)
    state_tokens: tuple[int, ...] = (1024, 8192)
    latent: tuple[int, int, int] = (128, 512, 64)
    latent_contexts: tuple[tuple[int, int, int], ...] = ((1, 8192, 4096), (64, 1024, 4096), (64, 1024, 131072))
    experts: tuple[int, int, int] = (128, 768, 8)
    blocks: int = 64


@triton.jit
def specialised_kernel(
    x, weight, out_ptr, rows, outputs, inputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr
):
    """x times weight transposed by descriptors, loaded by warps that do nothing else."""
    tiles = tl.cdiv(rows, ROWS)
    row, output = tl.program_id(0) % tiles * ROWS, tl.program_id(0) // tiles * OUTPUTS
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for k in tl.range(0, inputs, STEP, warp_specialize=True):
        acc = tl.dot(x.load([row, k]), weight.load([output, k]).T, acc, input_precision="ieee")
    r, c = row + tl.arange(0, ROWS)[:, None], output + tl.arange(0, OUTPUTS)[None, :]
    tl.store(out_ptr + r * outputs + c, acc, mask=(r < rows) & (c < outputs))


def specialised(x: Tensor, weight: Tensor) -> Tensor:
    """float32, one chain."""
    (rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs, dtype=torch.float32)
    descriptors = (
        TensorDescriptor.from_tensor(x, [TILE[0], TILE[2]]),
        TensorDescriptor.from_tensor(weight, [TILE[1], TILE[2]]),
    )
    grid = (triton.cdiv(rows, TILE[0]) * triton.cdiv(outputs, TILE[1]),)
    specialised_kernel[grid](*descriptors, out, rows, outputs, inputs, *TILE, num_warps=4, num_stages=4, **EXACT)
    return out


def with_candidates(names: list[str], run: Callable[[], Any]) -> Any:
    """The result while these candidates are in use."""
    before = candidates.in_use()
    candidates.use(names)
    try:
        return run()
    finally:
        candidates.use(before)


def compare_candidate(name: str, shapes: More) -> Answer:
    """Whether decode attention has the same bits with it, for heads of three sizes and three groups, and times."""
    heads, _, dim = shapes.heads
    cases = [(heads, heads // group, dim) for group in (1, 4, 8) if heads % group == 0 and heads >= group]
    cases += [(heads, max(1, heads // 4), other) for other in (64, 256)] if dim == 128 else []
    unequal, parts = [], []
    for case in cases:
        inputs = attention_inputs(replace(shapes, heads=case), 3, shapes.contexts[0][1], 1)
        outputs = [with_candidates(names, lambda i=inputs: attend(i)) for names in ([], [name])]
        unequal += [] if torch.equal(*outputs) else ["{}/{}x{}".format(*case)]
    for rows, keys in shapes.contexts:
        inputs = attention_inputs(shapes, rows, keys, 1)
        times = [with_candidates(names, lambda i=inputs: seconds(lambda: attend(i), 5)) for names in ([], [name])]
        parts.append(f"{rows}x{keys}: {times[0] * 1e6:.1f} -> {times[1] * 1e6:.1f} us")
    return not unequal, " ".join([*(f"differs: {case}" for case in unequal), ", ".join(parts)])


def attend(inputs: tuple[Any, ...]) -> Tensor:
    """Decode attention of a step, whose work is divided before, as in a server."""
    q, k_cache, _, tables, starts, lengths, _, window = inputs
    work = OPS["attention_work"].implementations["triton"].call(q, k_cache, tables, starts, lengths, window)
    return attention.attend_rows(*inputs, work=work)


def low_tiles(shapes: More) -> Answer:
    return compare_candidate("decode_tile", shapes)


def early_decode(shapes: More) -> Answer:
    return compare_candidate("decode_early", shapes)


def specialised_products(shapes: More) -> Answer:
    answer = each_product(shapes, lambda x, weight: torch.equal(specialised(x, weight), linear(x, weight)))
    outputs, inputs = shapes.products[-1]
    weight, parts = random(outputs, inputs, dtype=shapes.dtype, seed=1), []
    for rows in shapes.rows:
        x = random(rows, inputs, dtype=shapes.dtype)
        times = [seconds(run, 5) * 1e6 for run in (lambda: specialised(x, weight), lambda: linear(x, weight))]  # noqa: B023
        library = seconds(lambda: x @ weight.t(), 5) * 1e6  # noqa: B023
        parts.append(f"{rows}: {times[0]:.0f}/{times[1]:.0f}/{library:.0f}")
    text = f"differs (those of several chains must): {answer[1]}; " if answer[1] else ""
    return answer[0], f"{text}us by rows, specialised/served/library: {', '.join(parts)}"


def prompt_attention(shapes: More) -> Answer:
    heads, kv_heads, dim = shapes.heads
    parts = []
    for tokens in (shapes.prompt, 8 * shapes.prompt):
        inputs = attention_inputs(shapes, 1, tokens, tokens)
        q, k, v = (random(1, n, tokens, dim, dtype=shapes.dtype) for n in (heads, kv_heads, kv_heads))
        served = seconds(lambda: attention.attend_rows(*inputs), 2)  # noqa: B023
        backend = SDPBackend.CUDNN_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH
        with sdpa_kernel(backend):
            other = seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 2)  # noqa: B023
        flops = 2 * tokens * tokens * heads * dim
        parts.append(f"{tokens}: {flops / served / 1e12:.0f} beside {flops / other / 1e12:.0f}")
    return None, f"TFLOP/s by tokens, served and cuDNN's: {', '.join(parts)}"


def library_in_graphs(shapes: More) -> Answer:
    if not torch.cuda.is_available():
        return None, "for a card"

    def same(x: Tensor, weight: Tensor) -> bool:
        outside, graph = x @ weight.t(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = x @ weight.t()
        graph.replay()
        return torch.equal(outside, inside)

    return each_product(shapes, same)


def quantized_products(shapes: More) -> Answer:
    outputs, inputs = shapes.products[-1]
    home = ops.torch_device
    call = {name: op.implementations["triton"].call for name, op in OPS.items() if "triton" in op.implementations}
    weight = random(outputs, inputs, dtype=shapes.dtype)
    whole = ops.PackedInt8(outputs, inputs, (weight.float() * 30).to(torch.int8), torch.ones(outputs, device=home))
    fours = call["pack_int4"](weight, 64 if inputs % 64 == 0 else inputs)
    kinds: list[tuple[str, Callable[[Tensor], object]]] = [
        ("bf16", lambda x: linear(x, weight)),
        ("int8", lambda x: call["linear_int8"](x, whole, None)),
        ("int4", lambda x: call["linear_wna16"](x, fours, None)),
    ]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        scales = torch.ones(1, outputs, device=home)
        eights = ops.PackedFloat8(outputs, inputs, weight.to(torch.float8_e4m3fn), scales, inputs)
        kinds.append(("fp8", lambda x: call["linear_float8"](x, eights, None)))
    parts = []
    for rows in shapes.steps:
        x = random(rows, inputs, dtype=shapes.dtype)
        times = [f"{name} {seconds(lambda r=run: r(x), 5) * 1e6:.1f}" for name, run in kinds]  # noqa: B023
        parts.append(f"{rows}: {' '.join(times)}")
    return None, f"us of {outputs}x{inputs} by rows: {'; '.join(parts)}"


def delta_rule(shapes: More) -> Answer:
    heads, dim = shapes.state
    channels, taps, home = 2 * heads * dim, 4, ops.torch_device
    run_rule, parts = OPS["gated_delta"].implementations["triton"].call, []
    for rows, tokens in ((1, 1), (64, 1), *((1, count) for count in shapes.state_tokens)):
        ends = torch.full((rows,), tokens, dtype=torch.int32, device=home)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=home) * tokens
        columns = starts, ends, torch.arange(rows, device=home), torch.zeros_like(ends), ends
        vector, x = torch.ones(heads, device=home), random(rows * tokens, channels + heads * dim, dtype=shapes.dtype)
        arguments = (
            x,
            random(rows * tokens, 2 * heads, dtype=shapes.dtype),
            torch.ones(taps, channels, device=home),
            vector,
            vector,
            torch.ones(dim, device=home),
            1e-6,
            True,
            torch.zeros(rows, heads, dim, dim, device=home),
            torch.zeros(rows, 36, channels + 2 * heads, dtype=shapes.dtype, device=home),
            *columns,
            torch.zeros(0, 3, dtype=torch.int32, device=home),
        )
        parts.append(f"{rows}x{tokens}: {seconds(lambda a=arguments: run_rule(*a), 2) * 1e6:.0f}")
    return None, f"us of a layer by rows x tokens: {', '.join(parts)}"


def latent(shapes: More) -> Answer:
    heads, width, rotated = shapes.latent
    home, parts = ops.torch_device, []
    attend_latent = OPS["latent_attention"].implementations["triton"].call
    for rows, keys, longest in shapes.latent_contexts:
        pages = -(-keys // 64)
        lines = random(rows * pages, 64, width + rotated, dtype=shapes.dtype)
        tables = torch.zeros(rows, -(-max(keys, longest) // 64), dtype=torch.int32, device=home)
        tables[:, :pages] = torch.arange(rows * pages, dtype=torch.int32, device=home).view(rows, pages)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=home)
        lengths = torch.full((rows,), keys, dtype=torch.int32, device=home)
        queries = random(rows, heads, width, dtype=shapes.dtype), random(rows, heads, rotated, dtype=shapes.dtype)
        took = seconds(lambda q=queries, r=(lines, tables, starts, lengths): attend_latent(*q, *r, 0.1), 3)
        parts.append(f"{rows}x{keys} of {longest}: {took * 1e6:.0f}")
    return None, f"us by rows x keys of max_model_len: {', '.join(parts)}"


def mixture(shapes: More) -> Answer:
    (count, inner, chosen), hidden, home = shapes.experts, shapes.products[0][1], ops.torch_device
    ups = [packed(2 * inner, hidden, shapes, seed) for seed in range(count)]
    downs = [packed(hidden, inner, shapes, seed) for seed in range(count)]
    run_experts, parts = OPS["experts"].implementations["triton"].call, []
    generator = torch.Generator(home).manual_seed(0)
    for rows in shapes.steps:
        x, weights = random(rows, hidden, dtype=shapes.dtype), torch.ones(rows, chosen, device=home) / chosen
        ids = torch.rand(rows, count, generator=generator, device=home).topk(chosen).indices.int()
        took = seconds(lambda a=(x, ids, weights): run_experts(*a, ups, None, downs, None, "silu", None), 3)
        parts.append(f"{rows}: {took * 1e6:.0f}")
    return None, f"us of {count} experts {hidden} to {inner}, {chosen} a token, by rows: {', '.join(parts)}"


def packed(outputs: int, inputs: int, shapes: More, seed: int) -> ops.PackedWeight:
    """A random weight."""
    return ops.PackedWeight(outputs, inputs, shapes.dtype, random(outputs, inputs, dtype=shapes.dtype, seed=seed))


def exchange_alone(shapes: More) -> Answer:
    """One rank by itself: what a launch costs beside the way to other GPUs."""
    programs, capacity, parts = 64, 16384, []
    memory = torch.zeros(inbox_bytes(1, programs, capacity) // 16 + 1, 2, dtype=torch.int64, device=ops.torch_device)
    addresses = torch.tensor([memory.data_ptr()], device=ops.torch_device)
    group, equal = PeerGroup(Inboxes(0, 1, addresses, programs, capacity)), True
    for rows in shapes.steps:
        part = random(rows, shapes.products[-1][0], dtype=torch.float32)
        equal = equal and torch.equal(group.add(part), part)
        parts.append(f"{part.nbytes >> 10} KB {seconds(lambda p=part: group.add(p), 20) * 1e6:.1f} us")
    return equal, ", ".join(parts)


def block_copies(shapes: More) -> Answer:
    """KV blocks to pinned memory and back, as `--kv-offloading-size` copies them."""
    if not torch.cuda.is_available():
        return None, "for a card"
    _, kv_heads, dim = shapes.heads
    layout = KVLayout(tuple(KVSpec(kv_heads, dim, "bfloat16") for _ in range(36)), shapes.blocks, 64, None)
    shape = (shapes.blocks, kv_heads, 64, dim)
    kv = [tuple(random(*shape, dtype=torch.bfloat16, seed=n) for n in (2 * i, 2 * i + 1)) for i in range(36)]
    slot_bytes = layout.bytes() // shapes.blocks
    slots, backend = np.zeros((shapes.blocks, slot_bytes), np.uint8), SimpleNamespace(layout=layout, kv=kv)
    blocks, copies = list(range(shapes.blocks)), DeviceBlocks(backend, device.Cuda(), slots)  # type: ignore[arg-type]
    before = [cache.clone() for caches in kv for cache in caches]
    rates = []
    for run in (copies.read, copies.write):
        run(blocks, list(slots))
        took = gpu_probe.host_us(lambda r=run: r(blocks, list(slots)), 3) / 1e6  # type: ignore[misc]
        rates.append(f"{slots.nbytes / took / 1e9:.1f}")
    equal = all(torch.equal(old, new) for old, new in zip(before, (c for caches in kv for c in caches), strict=True))
    return equal, f"{rates[0]} GB/s out, {rates[1]} GB/s in, {slot_bytes >> 10} KB a block"


QUESTIONS: list[tuple[int, str, Callable[[More], Answer]]] = [
    (13, "does decode attention in tiles of 16 rows have the bits of 64, and what does it gain?", low_tiles),
    (
        14,
        "do products whose loads have warps of their own have the same bits, and how fast are they?",
        specialised_products,
    ),
    (15, "how fast is attention of prompts beside cuDNN's?", prompt_attention),
    (16, "does cuBLASLt in a graph compute the bits of outside?", library_in_graphs),
    (17, "does early decode attention have the same bits, and what does it gain?", early_decode),
    (20, "how long do products of bf16, int8, int4 and fp8 weights take?", quantized_products),
    (21, "how long does a delta rule take?", delta_rule),
    (22, "how long does latent attention take, by the longest possible row?", latent),
    (23, "how long does a layer of experts take?", mixture),
    (24, "what does an exchange of ranks cost besides the way?", exchange_alone),
    (25, "how fast do KV blocks leave and come back, unchanged?", block_copies),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", default="", help="numbers of questions, with commas")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was asked")
        return
    ops.bind("cuda")
    answers = gpu_probe.ask(More(), {int(number) for number in options.only.split(",") if number}, QUESTIONS)
    if options.out is not None:
        options.out.write_text(json.dumps({"card": torch.cuda.get_device_name(), "answers": answers}, indent=1))
    sys.exit(any(answer["answer"] == "FAILED" for answer in answers))


if __name__ == "__main__":
    main()
