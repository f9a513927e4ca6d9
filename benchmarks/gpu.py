"""The GPU targets G1-G3, G6-G8 of one card as a table and a JSON file: decode steps of random weights against the card.

Models have the shapes of Qwen3 with fewer layers where that saves loading time; the roofline is of what was run: the
bytes a step must read, over what a large copy moves on this card.  The runner is driven as the engine drives it at
depth 2.  Run it through scripts/gpu_check.sh.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokserve import ops
from tokserve.config import Config
from tokserve.gpu.cuda import CudaBackend
from tokserve.models import dummy
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import Int32, NewRow, StepPlan
from tokserve.runner.runner import Runner
from tokserve.runner.startup import load_runner
from tokserve.runner.steps import PendingResult

SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8},
}
LAYERS = {"8B": 36, "0.6B": 28}  # of the models with these shapes
VOCAB, HEAD_DIM, CONTEXT, PROMPT, LONG = 151936, 128, 1024, 128, 8192
CHAT = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}  # what Qwen3's chat asks for by default
STEPS, WARM = 60, 10


@dataclass
class Card:
    """What this card was measured to do."""

    name: str
    bytes_per_second: float
    flops: float


def median_seconds(run: Any, repeat: int = 10) -> float:
    """The median time of a call, measured with CUDA events, after two calls that do not count."""
    seconds = []
    for _ in range(repeat + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds[2:])


def measure_card() -> Card:
    """Copy bandwidth, bytes read plus written, and the rate of a large bf16 product on random data."""
    tensors = torch.randn(2, 1 << 29, device="cuda")
    copy = median_seconds(lambda: tensors[0].copy_(tensors[1]))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = median_seconds(lambda: square @ square)
    return Card(torch.cuda.get_device_name(), tensors.nbytes / copy, 2 * 8192**3 / product)


@cache
def few_values(shape: tuple[int, ...], deviation: float) -> torch.Tensor:
    """Random weights, the same for all layers and made on the card: a CPU takes a minute for billions of them."""
    return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * deviation).cpu()


def make(shape: str, layers: int, rows: int, **options: Any) -> Runner:
    """A runner with random weights for `rows` requests of CONTEXT tokens and STEPS more."""
    length = CONTEXT + 4 * (STEPS + WARM)
    hf = SHAPES[shape] | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": shape == "0.6B",
        "dtype": "bfloat16",
        "attention_bias": False,
    }
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(hf))
    config = Config.make(
        model=str(directory),
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        depth=2,
        max_model_len=max(length, LONG + 64),
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        block_size=64,
        **options,
    )
    dummy.values = lambda name, shape, seed, tied: few_values(tuple(shape), shape[-1] ** -0.5)
    runner, _ = load_runner(config)
    while runner.call("capture_next", {}):  # what a server captures while it is idle
        pass
    few_values.cache_clear()
    return runner


def prefill(runner: Runner, rows: int, **sampling: Any) -> float:
    """Fill the slots with random prompts of CONTEXT tokens; tokens per second.  The first call may compile."""
    generator = np.random.default_rng(0)
    width = -(-(CONTEXT + 4 * (STEPS + WARM)) // 64)
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 1} | sampling)
    per_step = max(1, 8192 // CONTEXT)
    began = time.perf_counter()
    for first in range(0, rows, per_step):
        slots = np.arange(first, min(first + per_step, rows), dtype=np.int32)
        new = [
            NewRow(slot, "", generator.integers(0, VOCAB, CONTEXT).astype(np.int32), CONTEXT, params, slot, ())
            for slot in slots.tolist()
        ]
        blocks = [(slot, 0, list(range(slot * width, (slot + 1) * width))) for slot in slots.tolist()]
        full = np.full(len(slots), CONTEXT, np.int32)
        runner.execute(step_plan(0, slots, full, 0 * full, new=new, blocks=blocks))
    return rows * CONTEXT / (time.perf_counter() - began)


def long_prompt(runner: Runner) -> float:
    """Tokens per second of one prompt of LONG tokens, the second time; 0 if the cache has no room for it."""
    pages = LONG // 64
    if runner.backend.layout.num_blocks < pages:
        return 0.0
    tokens, slot, began = np.arange(LONG, dtype=np.int32) % VOCAB, np.zeros(1, np.int32), 0.0
    for _ in range(2):
        began = time.perf_counter()
        new = [NewRow(0, "", tokens, LONG, SamplingParams(temperature=1.0, max_tokens=1), 0, ())]
        plan = step_plan(0, slot, slot + LONG, slot, new=new, blocks=[(0, 0, list(range(pages)))])
        runner.execute(plan)
    return LONG / (time.perf_counter() - began)


def step_plan(step: int, slots: Int32, num_tokens: Int32, num_computed: Int32, **more: Any) -> StepPlan:
    """A step in which every row samples one token."""
    none, one = np.zeros(0, np.int32), np.ones(len(slots), np.int32)
    return StepPlan(step, slots, num_tokens, num_computed, 0 * one, one, none, **more)


def decode(runner: Runner, rows: int, start: int) -> float:
    """Seconds of a decode step, from context length `start` on."""
    slots, one = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    return seconds(runner, lambda step: step_plan(step, slots, one, (start + step) * one))


def with_a_prompt(runner: Runner, rows: int) -> float:
    """Seconds of a step with PROMPT tokens in the first row and one in each of the others."""
    slots, counts = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    counts[0] = PROMPT
    return seconds(runner, lambda step: step_plan(step, slots, counts, 0 * counts + CONTEXT))


def seconds(runner: Runner, plan: Callable[[int], StepPlan]) -> float:
    """The time of a step, with two in flight."""
    in_flight: deque[PendingResult] = deque()
    for step in range(WARM + STEPS):
        if step == WARM:
            torch.cuda.synchronize()
            began = time.perf_counter()
        in_flight.append(runner.sample(runner.forward(plan(step)), None))
        if len(in_flight) == 2:
            in_flight.popleft().result()
    while in_flight:
        in_flight.popleft().result()
    return (time.perf_counter() - began) / STEPS


def step_bytes(runner: Runner, rows: int, layers: int | None = None) -> float:
    """Bytes of weights and of keys and values that a decode step reads; `layers`: if there were so many."""
    spec = runner.model.spec
    parameters = runner.model.parameters_by_name()
    times = 1.0 if layers is None else layers / len(runner.backend.layout.specs)
    read = sum(
        int(np.prod(p.shape)) * p.dtype.itemsize * (times if ".layers." in name else 1.0)
        for name, p in parameters.items()
        if spec.tied or "embed_tokens" not in name
    )
    kv = sum(layer_spec.bytes_per_token() for layer_spec in runner.backend.layout.specs)
    return read + times * rows * kv * (CONTEXT + WARM + STEPS // 2)


def prompt_flops(runner: Runner) -> float:
    """Operations of the projections for a prompt token; attention's come on top."""
    parameters = runner.model.parameters_by_name()
    return 2.0 * sum(int(np.prod(p.shape)) for name, p in parameters.items() if "_proj" in name)


def sampling_seconds(rows: int) -> tuple[float, float]:
    """Seconds of `sample_fused` with the token's logprob, and of top-k and top-p before it."""
    logits, index = torch.randn(rows, VOCAB, device="cuda") * 3, torch.arange(rows, device="cuda")
    ones = torch.ones(rows, device="cuda")
    greedy, top_k, top_p, min_p = index < 0, ones.int() * 20, ones * 0.95, ones * 0.0
    sample = graph_seconds(lambda: ops.sample_fused(logits, index, index, greedy, ones, False, 0))
    return sample, graph_seconds(lambda: ops.filter_logits(logits, top_k, top_p, min_p))


def graph_seconds(run: Callable[[], Any]) -> float:
    """The GPU's time for a call, from a graph of calls: the host's time to launch them is not in it."""
    run()
    graph, count = torch.cuda.CUDAGraph(), 10
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return median_seconds(graph.replay) / count


def measure(shape: str, layers: int, rows: int, card: Card, **options: Any) -> dict[str, Any]:
    """One row of the table, exact and fast."""
    runner = make(shape, layers, rows, **options)
    prefill(runner, rows)
    prompt_rate = prefill(runner, rows)
    exact = decode(runner, rows, CONTEXT)
    prefill(runner, rows, **CHAT)
    chat = decode(runner, rows, CONTEXT)
    long_rate = long_prompt(runner)
    prefill(runner, rows)
    backend = runner.backend
    assert isinstance(backend, CudaBackend) and backend.decode_graphs is not None and backend.prompt_graphs is not None
    graph = backend.decode_graphs.captured[rows, rows, False]
    with torch.inference_mode():
        replay = median_seconds(graph.run)
    mixed = with_a_prompt(runner, rows)
    del graph  # graphs share a workspace of cuBLAS, which goes when one of them does
    backend.prompt_graphs.invalidate()
    launched = with_a_prompt(runner, rows)
    sampling, filtering = sampling_seconds(rows)
    roofline = step_bytes(runner, rows) / card.bytes_per_second
    total = exact * step_bytes(runner, rows, LAYERS[shape]) / step_bytes(runner, rows)
    ops.bind("cuda", exact=False)
    with torch.inference_mode():
        backend.capture(runner.model)
    fast = decode(runner, rows, CONTEXT + STEPS + WARM)
    return {
        "model": f"{shape} shapes, {layers} layers",
        "options": options,
        "rows": rows,
        "prefill_tok_s": round(prompt_rate),
        "prefill_share": prompt_rate * prompt_flops(runner) / card.flops,
        "decode_tok_s": round(rows / exact),
        "step_ms": exact * 1e3,
        "roofline_share": roofline / exact,
        "fast_step_ms": fast * 1e3,
        "exact_costs": exact / fast - 1,
        "graph_ms": replay * 1e3,
        "chat_step_ms": chat * 1e3,
        "long_prompt_tok_s": round(long_rate),
        "sampling_share": sampling / total,
        "top_p_ms": filtering * 1e3,
        "exposed_host_us": (exact - replay - sampling) * 1e6,
        "with_a_prompt_ms": mixed * 1e3,
        "with_a_prompt_launched_ms": launched * 1e3,
    }


def profile(shape: str, layers: int, rows: int, **options: Any) -> list[dict[str, Any]]:
    """Microseconds and launches of each kernel in a decode step, in graphs as they serve; the longest first."""
    runner = make(shape, layers, rows, **options)
    prefill(runner, rows)
    decode(runner, rows, CONTEXT)
    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else None
    with torch.profiler.profile(activities=activities) as profiler:
        decode(runner, rows, CONTEXT + STEPS + WARM)
    steps = STEPS + WARM
    kernels = [
        {
            "kernel": event.key,
            "us": (event.self_device_time_total or event.self_cpu_time_total) / steps,
            "launches": event.count / steps,
        }
        for event in profiler.key_averages()
    ]
    return sorted(kernels, key=lambda kernel: -kernel["us"])


def print_profiles(out: Path) -> None:
    """Profiles of the steps that matter, to the file, and their longest kernels."""
    figures: dict[str, Any] = {"card": torch.cuda.get_device_name(), "profiles": {}}
    for shape, layers, rows in (("0.6B", 28, 1), ("8B", 6, 1), ("0.6B", 28, 256), ("8B", 6, 256)):
        kernels = profile(shape, layers, rows)
        figures["profiles"][f"{shape}, {layers} layers, {rows} rows"] = kernels
        out.write_text(json.dumps(figures, indent=1))
        gc.collect()
        torch.cuda.empty_cache()
        total = sum(kernel["us"] for kernel in kernels)
        print(f"{shape}, {layers} layers, {rows} rows: {total:.0f} us of kernels a step")
        for kernel in kernels[:12]:
            share, name = kernel["us"] / total, kernel["kernel"][:70]
            print(f"  {kernel['us']:9.1f} us {share:6.1%} {kernel['launches']:7.1f} x {name}")


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--profile", action="store_true", help="what each kernel takes of a step, and nothing else")
    arguments = parser.parse_args()
    out = arguments.out
    if arguments.profile:
        print_profiles(out)
        return
    card = measure_card()
    figures: dict[str, Any] = {"card": vars(card), "torch": torch.__version__, "rows": []}
    print(f"{card.name}: copies {card.bytes_per_second / 1e12:.2f} TB/s, bf16 {card.flops / 1e12:.0f} TFLOP/s")
    float8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    cases: list[tuple[str, str, int, int, dict[str, Any]]] = [
        ("G2", "0.6B", 28, 1, {}),
        ("G1", "8B", 6, 1, {}),
        ("G3", "8B", 6, 256, {}),
        ("G3 in float8", "8B", 6, 256, float8),
        ("G3 with 64 rows", "8B", 6, 64, {}),
    ]
    failed = 0
    for target, shape, layers, rows, options in cases:
        try:
            row = {"target": target} | measure(shape, layers, rows, card, **options)
        except Exception:  # the next row may do
            traceback.print_exc()
            failed += 1
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        figures["rows"].append(row)
        out.write_text(json.dumps(figures, indent=1))
        print(
            f"{target}: {row['model']}, {rows} rows: {row['decode_tok_s']} tok/s, {row['roofline_share']:.0%} of"
            f" the roofline; exact costs {row['exact_costs']:+.1%} (G6); sampling {row['sampling_share']:.1%} (G7);"
            f" {row['exposed_host_us']:.0f} us neither in the graph nor in sampling (G8);"
            f" prefill {row['prefill_tok_s']} tok/s, {row['prefill_share']:.0%} of the card;"
            f" {PROMPT} tokens of a prompt in a step {row['with_a_prompt_ms']:.2f} ms,"
            f" {row['with_a_prompt_launched_ms']:.2f} without a graph;"
            f" top-k and top-p {row['top_p_ms']:.2f} ms, a step with them {row['chat_step_ms']:.2f} ms;"
            f" a prompt of {LONG}: {row['long_prompt_tok_s']} tok/s",
            flush=True,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
