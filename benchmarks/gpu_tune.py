"""Measure launch parameters on this card and write them as entries of the table that the launchers read.

    python benchmarks/gpu_tune.py --out OUT.json [--write] [--hidden 4096 --inner 12288 --heads 32 --kv-heads 8]
    python benchmarks/gpu_tune.py --out OUT.json --candidates [--seconds 500]

Matrix products by rows and outputs (of a layer, and of one a quarter as wide, for small models), attention by head
size; a candidate whose bits differ from the present one's is left out, as is one that does not fit the card.  All are
compiled first, by `--jobs` processes.  `--write` puts the entries before the others in tuning.json.  Takes `--seconds`;
where they end, the best so far stands.

`--candidates` decides on the switches of kernels on trial (`tokserve/gpu/candidates.py`), one after the other: with and
without a candidate, besides those chosen before it, the cases that it concerns are captured as graphs, their results
compared, and timed in turns.  One that differs, fails, or does not gain is left out.  The names of the others go to the
user's file, which starts read; the figures to OUT.json, and as a table to the output.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

from tokserve import ops
from tokserve.gpu import candidates
from tokserve.gpu.kernels import dense, launch
from tokserve.ops import registry
from tokserve.ops.registry import OPS

TILES = {  # by rows
    16: ((16, 16), (16, 32), (16, 64), (64, 32), (64, 16)),
    64: ((64, 64), (64, 32), (64, 128)),
    128: ((64, 64), (128, 64), (128, 128)),
    256: ((128, 64), (128, 128), (128, 256)),
    2048: ((128, 256), (128, 128), (256, 128)),
}
STEPS, STAGES = (64, 128, 256), (8, 6, 4, 3)
FETCHED_BYTES = (60_000, 225_000)  # of shared memory, what a candidate takes at least and at most
SUMS = 4096  # of a warp at most: 128 registers of a thread
CACHE_BYTES = 1 << 30  # inputs are taken in turn from so much memory that they are not in the card's cache
BF16 = torch.bfloat16
Entry = dict[str, Any]


def call(name: str) -> Callable[..., Any]:
    """The Triton implementation of an op."""
    implementation: Callable[..., Any] = OPS[name].implementations["triton"].call
    return implementation


def best(
    kernel: str, candidates: list[Entry], run: Callable[[], list[torch.Tensor]], until: float
) -> tuple[Entry | None, float, float]:
    """The fastest candidate, its seconds and those of the present entry.  `run`: several calls, on several inputs."""
    present = launch.table()[kernel]
    expected, before = run()[0], seconds_of(run)
    fastest: tuple[Entry | None, float] = (None, before)
    for candidate in candidates:
        launch.table()[kernel] = [candidate]
        launch.tuned.cache_clear()
        try:
            if time.monotonic() < until and torch.equal(run()[0], expected):
                seconds = seconds_of(run)
                fastest = min(fastest, (candidate, seconds), key=lambda item: item[1])
        except OutOfResources:
            pass
    launch.table()[kernel] = present
    launch.tuned.cache_clear()
    return *fastest, before


def seconds_of(run: Callable[[], object]) -> float:
    """The time of one run as a graph, which the host does not slow down."""
    return float(do_bench_cudagraph(run, rep=4, return_mode="median")) / 1e3


def fitting(rows: int, chains: int = 1) -> list[Entry]:
    """What is tried for that many rows, of a weight with so many chains."""
    entries = [
        {"tile": list(tile), "step": step, "warps": warps, "stages": stages}
        for tile, step, warps, stages in itertools.product(TILES[rows], STEPS, (4, 8), STAGES)
        if FETCHED_BYTES[0] <= BF16.itemsize * stages * step * sum(tile) <= FETCHED_BYTES[1]
        and (warps == 4 or math.prod(tile) >= 64 * 128)
        and (step == 256) <= (tile[0] == 16)
        and math.prod(tile) <= warps * SUMS
    ]
    return (
        entries
        if chains == 1 or rows > 256
        else [entry | {"apart": apart} for apart in (True, False) for entry in entries]
    )


def cases_of(shapes: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """Numbers of rows, and outputs and inputs."""
    return list(itertools.product(TILES, sorted(shapes)))


def compile_products(shapes: list[tuple[int, int]], first: int, jobs: int) -> None:
    """Run every `jobs`-th candidate once from number `first` on, so that Triton's cache on disk has it."""
    assert registry.load_extension("cuda") is None
    work = [
        (rows, shape, candidate)
        for rows, shape in cases_of(shapes)
        for candidate in fitting(rows, dense.chains(*shape))
    ]
    for rows, (outputs, inputs), candidate in work[first::jobs]:
        launch.table()["linear"] = [candidate]
        launch.tuned.cache_clear()
        weight = torch.empty(outputs, inputs, device="cuda", dtype=BF16)
        x = torch.empty(rows, inputs, device="cuda", dtype=BF16)
        with contextlib.suppress(OutOfResources):
            call("linear")(x, ops.PackedWeight(outputs, inputs, BF16, weight), None)


def products(shapes: list[tuple[int, int]], until: float) -> Iterator[Entry]:
    """An entry for each number of rows and of outputs that is asked for."""
    cases = cases_of(shapes)
    for number, (rows, (outputs, inputs)) in enumerate(cases):
        copies = max(1, min(16, CACHE_BYTES // (2 * outputs * inputs)))
        weights = torch.randn(copies, outputs, inputs, device="cuda", dtype=BF16)
        packed = [ops.PackedWeight(outputs, inputs, BF16, weight) for weight in weights]
        x = torch.randn(rows, inputs, device="cuda", dtype=BF16)

        def run(x: torch.Tensor = x, packed: list[ops.PackedWeight] = packed) -> list[torch.Tensor]:
            return [call("linear")(x, weight, None) for weight in packed]

        share = (until - time.monotonic()) / (len(cases) - number)
        entry, seconds, before = best(
            "linear", fitting(rows, dense.chains(outputs, inputs)), run, time.monotonic() + share
        )
        if entry is None:  # the present one is the fastest of those tried
            sizes = {"rows": rows, "outputs": outputs, "bytes": BF16.itemsize}
            config = launch.tuned("linear", torch.cuda.current_device(), **sizes)
            entry = {name: config[name] for name in ("tile", "step", "warps", "stages", "apart") if name in config}
        report(f"linear {rows} x {outputs} x {inputs}", entry, seconds / copies, before / copies, 2 * outputs * inputs)
        bounds = {"rows": rows, "outputs": outputs}
        largest = {"rows": max(TILES), "outputs": max(shapes)[0]}  # stands for all that is larger
        where = {name: most for name, most in bounds.items() if most < largest[name]}
        yield {"arch": architecture(), "bytes": BF16.itemsize} | where | entry


def attention(heads: int, kv_heads: int, dim: int, until: float) -> Entry:
    """One entry: decode of 256 rows of 1000 keys and of one of 8000, and a prompt of 2000, weighed alike."""
    cases = [(256, 1000, 1), (1, 8000, 1), (1, 2000, 2000)]
    inputs = []
    for rows, length, queries in cases:
        width = -(-length // 64)
        caches = torch.randn(2, rows * width, kv_heads, 64, dim, device="cuda", dtype=BF16).unbind()
        tables = torch.randperm(rows * width, device="cuda").int().view(rows, width)
        q = torch.randn(rows * queries, heads, dim, device="cuda", dtype=BF16)
        starts = torch.arange(rows + 1, device="cuda").int() * queries
        inputs.append((q, *caches, tables, starts, torch.full((rows,), length, device="cuda").int(), dim**-0.5, 0))
    candidates: list[Entry] = [  # 3 fetches one tile of keys ahead, 5 two, 7 three; between them nothing changes
        {"decode_stages": decode, "prefill_stages": prefill, "programs": programs}
        for programs, decode, prefill in itertools.product((2, 1, 3), (5, 3, 7), (5, 3, 2))
    ]

    def run() -> list[torch.Tensor]:
        return [torch.cat([call("paged_attention")(*case).flatten() for case in inputs])]

    entry, seconds, before = best("attention", candidates, run, until)
    if entry is None:
        config = launch.tuned("attention", torch.cuda.current_device(), row_bytes=2 * dim, group=heads // kv_heads)
        entry = {name: config[name] for name in candidates[0]}
    report(f"attention {heads} heads, {kv_heads} KV heads of {dim}", entry, seconds, before, 0)
    return {"arch": architecture(), "row_bytes": 2 * dim, "group": heads // kv_heads} | entry


@dataclass(frozen=True)
class Step:
    """Attention layers of a step of `rows` requests with `keys` tokens each, and the norms before them."""

    rows: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    cache: torch.dtype = BF16

    def __str__(self) -> str:
        kind = "" if self.cache == BF16 else f", cache of {str(self.cache).removeprefix('torch.')}"
        return f"step of {self.rows} x {self.keys}, heads {self.heads}/{self.kv_heads} of {self.dim}{kind}"

    def prepare(self, device: torch.device, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """LAYERS layers, each with weights and keys of its own, so that neither are in the card's cache.  The returned
        function runs them: the sums before each norm."""
        width, page, hidden = -(-self.keys // 64), 64, self.heads * self.dim
        sizes = ((self.heads + 2 * self.kv_heads) * self.dim, hidden), (hidden, hidden)
        weights = [[random_weight(*size, device, dtype) for size in sizes] for _ in range(LAYERS)]
        shape = (LAYERS, 2, self.rows * width, self.kv_heads, page, self.dim)
        caches = torch.randn(shape, device=device, dtype=dtype).to(dtype if self.cache == BF16 else self.cache)
        tables = torch.randperm(self.rows * width, device=device).int().view(self.rows, width)
        starts = torch.arange(self.rows + 1, device=device).int()
        lengths = torch.full((self.rows,), self.keys, device=device).int()
        positions = lengths.long() - 1
        slots = tables[:, -1].long() * page + positions % page
        angles, norm = torch.randn(self.keys, self.dim, device=device), torch.ones(self.dim, device=device, dtype=dtype)
        x, gain = torch.randn(self.rows, hidden, device=device, dtype=dtype), norm.new_ones(hidden)
        batch = (tables, starts, lengths)

        def run() -> list[Tensor]:
            q = x.view(self.rows, self.heads, self.dim)
            work = call("attention_work")(q, caches[0, 0], *batch, 0)
            results, y, total = [], x, x
            for (qkv, out), (k, v) in zip(weights, caches, strict=True):
                y, total = call("add_rms_norm")(y, total, gain, 1e-6)
                results.append(total)
                projected = call("linear")(y, qkv, None)
                q = call("norm_rope_store")(projected, norm, norm, 1e-6, angles, positions, k, v, slots)
                mixed = call("paged_attention")(q, k, v, *batch, self.dim**-0.5, 0, 1.0, 0.0, None, None, work)
                y = call("linear")(mixed.view(self.rows, hidden), out, None)
            return [*results, *call("add_rms_norm")(y, total, gain, 1e-6)]

        return run


@dataclass(frozen=True)
class Prompts:
    """Attention layers of a step of `rows` prompts with `queries` tokens each, the last of `keys`."""

    rows: int
    queries: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int = 0

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        heads = f"heads {self.heads}/{self.kv_heads} of {self.dim}{window}"
        return f"prompts, {self.rows} x {self.queries} of {self.keys}, {heads}"

    def prepare(self, device: torch.device, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Prepare keys of LAYERS layers; the returned function attends to each."""
        width, page = -(-self.keys // 64), 64
        shape = (LAYERS, 2, self.rows * width, self.kv_heads, page, self.dim)
        caches = torch.randn(shape, device=device, dtype=dtype)
        tables = torch.randperm(self.rows * width, device=device).int().view(self.rows, width)
        starts = torch.arange(self.rows + 1, device=device).int() * self.queries
        batch = (tables, starts, torch.full((self.rows,), self.keys, device=device).int())
        q = torch.randn(self.rows * self.queries, self.heads, self.dim, device=device, dtype=dtype)

        def run() -> list[Tensor]:
            work = call("attention_work")(q, caches[0, 0], *batch, self.window)
            scale = self.dim**-0.5
            return [
                call("paged_attention")(q, *layer, *batch, scale, self.window, 1.0, 0.0, None, None, work)
                for layer in caches
            ]

        return run


@dataclass(frozen=True)
class Chat:
    """Sampling of `rows` requests with a small top-k and a top-p, as `runner/sampler.py` does it."""

    rows: int
    vocabulary: int = 151936

    def __str__(self) -> str:
        return f"top-k and top-p of {self.rows} x {self.vocabulary}"

    def prepare(self, device: torch.device, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Prepare logits; the returned function draws: ids, and whether rows are finite."""
        logits = 3 * torch.randn(self.rows, self.vocabulary, device=device)
        index = torch.arange(self.rows, device=device)
        noise = (index * 7919, index * 3, index < 0)
        ones = torch.ones(self.rows, device=device)
        temperature, top_k, top_p, min_p = 0.6 * ones, (20 * ones).int(), 0.95 * ones, 0 * ones

        def run() -> list[Tensor]:
            if candidates.is_on("sample_few"):
                return list(call("sample_few")(logits, *noise, temperature, top_k, top_p, min_p, False, -1)[:2])
            finite = logits.amax(1).isfinite()
            logits.masked_fill_(~finite[:, None], 0.0)
            cut = call("filter_logits")(logits / temperature[:, None], top_k, top_p, min_p, True)
            return [call("sample")(cut, *noise), finite]

        return run


@dataclass(frozen=True)
class Products:
    """The products of two layers, 8B's unless said, of `rows` rows."""

    rows: int
    hidden: int = 4096
    inner: int = 12288
    queries: int = 4096  # outputs; those of keys and values are a quarter each
    float8: bool = False

    def __str__(self) -> str:
        return f"products of {self.rows} rows, hidden {self.hidden}{', float8' if self.float8 else ''}"

    def prepare(self, device: torch.device, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Prepare weights of two layers; the returned function multiplies by all: qkv, out, gate and up, down."""
        sizes = (
            (self.queries * 3 // 2, self.hidden),
            (self.hidden, self.queries),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )
        weights = [[random_weight(*size, device, dtype) for size in sizes] for _ in range(2)]
        pack = call("pack_linear_float8")
        of_float8 = [pack(weight.packed) for layer in weights for weight in layer] if self.float8 else []
        widths = (self.hidden, self.queries, self.hidden, self.inner)
        inputs = [torch.randn(self.rows, width, device=device, dtype=dtype) for width in widths]

        def run() -> list[Tensor]:
            results: list[Tensor] = []
            if self.float8:
                return [
                    call("linear_float8")(inputs[number % 4], weight, None) for number, weight in enumerate(of_float8)
                ]
            for qkv, out, gate_up, down in weights:
                results += [call("linear")(x, weight, None) for x, weight in zip(inputs[:2], (qkv, out), strict=True)]
                results += [
                    call("gated_linear")(inputs[2], gate_up, None, "silu"),
                    call("linear")(inputs[3], down, None),
                ]
            return results

        return run


@dataclass(frozen=True)
class FeedForward:
    """LAYERS feed-forward layers with the norms before them, 8B's unless said, of `rows` rows."""

    rows: int
    hidden: int = 4096
    inner: int = 12288
    float8: bool = False

    def __str__(self) -> str:
        return f"norms and feed-forward of {self.rows} rows, hidden {self.hidden}{', float8' if self.float8 else ''}"

    def prepare(self, device: torch.device, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Prepare the layers' weights; the returned function runs one after the other: the sums before each norm."""
        sizes = ((2 * self.inner, self.hidden), (self.hidden, self.inner))
        weights = [[random_weight(*size, device, dtype) for size in sizes] for _ in range(LAYERS)]
        pack, kind = call("pack_linear_float8"), "_float8" if self.float8 else ""
        layers = [[pack(weight.packed) for weight in layer] for layer in weights] if self.float8 else weights
        norm = torch.ones(self.hidden, device=device, dtype=dtype)
        first = torch.randn(self.rows, self.hidden, device=device, dtype=dtype)

        def run() -> list[Tensor]:
            results, x, total = [], first, first
            for gate_up, down in layers:
                normed, total = call("add_rms_norm")(x, total, norm, 1e-6)
                results.append(total)
                x = call(f"linear{kind}")(call(f"gated_linear{kind}")(normed, gate_up, None, "silu"), down, None)
            return [*results, *call("add_rms_norm")(x, total, norm, 1e-6)]

        return run


@dataclass(frozen=True)
class Mixture:
    """Two layers of a mixture of experts, 30B-A3B's unless said, of `rows` rows."""

    rows: int
    experts: int = 128
    k: int = 8
    hidden: int = 2048
    inner: int = 768

    def __str__(self) -> str:
        return f"experts of {self.rows} rows, {self.k} of {self.experts}, hidden {self.hidden}"

    def prepare(self, device: torch.device, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Prepare the layers; the returned function routes and computes each, the second after the first."""
        sizes = ((2 * self.inner, self.hidden), (self.hidden, self.inner))
        layers = [
            (
                random_weight(self.experts, self.hidden, device, dtype),
                *([random_weight(*size, device, dtype) for _ in range(self.experts)] for size in sizes),
            )
            for _ in range(2)
        ]
        x = torch.randn(self.rows, self.hidden, device=device, dtype=dtype)

        def run() -> list[Tensor]:
            results, y = [], x
            for router, gate_up, down in layers:
                logits = call("linear")(y, router, None, torch.float32)
                chosen = call("route")(logits, None, self.k, False, 1, 1, False, True, 0.0, 1.0)
                y = call("experts")(y, *chosen, gate_up, None, down, None, "silu")
                results.append(y)
            return results

        return run


def random_weight(outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> ops.PackedWeight:
    """A weight whose products are about as large as what it multiplies."""
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype) * inputs**-0.5
    return ops.PackedWeight(outputs, inputs, dtype, weight)


Case = Step | Prompts | Chat | Products | FeedForward | Mixture
STEPS_OF_8B = tuple(Step(rows, keys) for rows, keys in ((1, 1024), (1, 8192), (16, 1024), (64, 1024), (256, 1024)))
OTHER_STEPS = (
    Step(1, 1024, 16, 8),  # of 0.6B
    Step(64, 1024, cache=torch.float8_e4m3fn),
    Step(64, 1024, 8, 4, 256),
    Step(64, 1024, 64, 8),
)
CASES: dict[str, Sequence[Case]] = {  # by candidate
    "decode_tile": STEPS_OF_8B + OTHER_STEPS,
    "decode_early": STEPS_OF_8B + OTHER_STEPS,
    "sample_few": (Chat(1), Chat(64), Chat(256)),
    "linear_tma": (*map(Products, (80, 128, 256, 512, 2048)), Products(256, 1024, 3072, 2048)),
    "prompt_groups": (
        Prompts(8, 1024, 1024),
        Prompts(1, 8192, 8192),
        Prompts(1, 2048, 8192),
        Prompts(8, 300, 300),
        Prompts(1, 8192, 8192, 16, 8),  # of 0.6B
        Prompts(1, 4096, 4096, 28, 4),
        Prompts(1, 8192, 8192, 64, 8, 64, 128),
    ),
    "products_early": (
        Step(1, 1024),
        Step(1, 1024, 16, 8),
        Step(16, 1024),
        Products(1),
        Products(1, 1024, 3072, 2048),
        Products(4),
        Products(16),
        Products(16, 1024, 3072, 2048),
    ),
    "experts_gated": tuple(map(Mixture, (1, 4, 16, 64, 256, 2048))),
    "experts_dependent": tuple(map(Mixture, (1, 4, 16, 64, 256, 2048))),
    "dependents_early": (
        Step(1, 1024),
        Step(1, 1024, 16, 8),
        Step(64, 1024),
        Products(1),
        Products(1, 1024, 3072, 2048),
        Products(64),
    ),
    "chains_next": (
        Step(1, 1024),
        Step(1, 1024, 16, 8),
        Step(16, 1024),
        Step(16, 1024, 16, 8),
        FeedForward(1),
        FeedForward(1, 1024, 3072),
        FeedForward(16),
        FeedForward(16, 1024, 3072),
    ),
    "float8_rows": tuple(FeedForward(rows, float8=True) for rows in (1, 16, 64, 256, 2048)),
    "float8_tma": tuple(Products(rows, float8=True) for rows in (80, 128, 256, 512, 2048)),
}
LAYERS = 4
ROUNDS, REPEATS = 9, 8  # turns, and runs of a case in each
GAIN, LOSS = 0.995, 1.02  # what the mean of the cases' ratios must be below, and each of them
ERRORS = (TritonError, RuntimeError, ValueError, AssertionError)


def in_turns(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each of these, which take turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for times, run in zip(seconds, runs, strict=True):
            times.append(elapsed(run))
    return [sorted(times)[len(times) // 2] for times in seconds]


def captured(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], object], list[list[Tensor]]]:
    """The launches of REPEATS runs as a graph, and their results after a replay; without a GPU the run alone."""
    if not torch.cuda.is_available():
        return run, []
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run() for _ in range(REPEATS)]
    return graph.replay, results


def elapsed(run: Callable[[], object]) -> float:
    """Seconds of a run."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / REPEATS


def compile_cases(cases: Sequence[Case], first: int, jobs: int) -> None:
    """Run every `jobs`-th case from number `first` on, with all candidates and with none, so that Triton's cache on
    disk has their kernels."""
    assert registry.load_extension("cuda") is None
    for names in ((), tuple(candidates.BY_NAME)):
        candidates.use(names)
        for case in cases[first::jobs]:
            with contextlib.suppress(*ERRORS):
                case.prepare(torch.device("cuda"), BF16)()


def compare(case: Case, base: list[str], name: str, device: torch.device) -> tuple[bool, list[float]]:
    """Whether the case has the same bits with and without the candidate, and the seconds of both: without, with."""
    torch.manual_seed(0)
    run = case.prepare(device, BF16 if device.type == "cuda" else torch.float16)

    def use_and_run(names: list[str]) -> Callable[[], list[Tensor]]:
        def call_with() -> list[Tensor]:
            candidates.use(names)
            return run()

        return call_with

    both = [use_and_run(base), use_and_run([*base, name])]
    expected = both[0]()
    if not all(map(torch.equal, expected, both[1]())):
        return False, []
    graphs = [captured(one) for one in both]
    seconds = in_turns([replay for replay, _ in graphs])
    later = [results for _, repeated in graphs for results in repeated]
    return all(all(map(torch.equal, expected, results)) for results in later), seconds


def decide(until: float, device: torch.device) -> tuple[list[str], dict[str, Any]]:
    """The names of the candidates to use, and what was measured of each."""
    chosen: list[str] = []
    report: dict[str, Any] = {}
    for number, name in enumerate(CASES):
        share = time.monotonic() + (until - time.monotonic()) / (len(CASES) - number)
        rows: dict[str, Any] = {}
        equal, error = True, ""
        for case in CASES[name]:
            if time.monotonic() > share and rows:
                break
            try:
                same, seconds = compare(case, chosen, name, device)
            except ERRORS as failure:
                error = f"{case}: {type(failure).__name__}: {str(failure)[:200]}"
                break
            equal &= same
            rows[str(case)] = [round(one * 1e6, 2) for one in seconds] if same else "bits differ"
            print(f"{name}: {case}: {rows[str(case)]}", flush=True)
        ratios = [times[1] / times[0] for times in rows.values() if times != "bits differ"]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.inf
        gains = equal and not error and mean < GAIN and max(ratios) < LOSS
        chosen += [name] if gains else []
        report[name] = {"equal": equal, "error": error, "ratio": mean, "chosen": gains, "us": rows}
    candidates.use(())
    return chosen, report


def decide_candidates(out: Path, until: float, jobs: int) -> None:
    """Measure all candidates; print the table, write the figures and the user's file."""
    assert registry.load_extension("cuda") is None
    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if has_gpu else "interpreter"
    cases = list(dict.fromkeys(case for group in CASES.values() for case in group))
    if has_gpu:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for job in [pool.submit(compile_cases, cases, first, jobs) for first in range(jobs)]:
                job.result()
        print(f"compiled, {until - time.monotonic():.0f} s are left", flush=True)
    chosen, report = decide(until, torch.device("cuda" if has_gpu else "cpu"))
    out.write_text(json.dumps({"gpu": gpu, "chosen": chosen, "candidates": report}, indent=1) + "\n")
    path = candidates.store(gpu, chosen)
    print("| candidate | bits | time | decision |\n|---|---|---|---|")
    for name, row in report.items():
        bits = "equal" if row["equal"] else "DIFFER"
        decision = "on" if row["chosen"] else f"off {row['error']}".rstrip()
        print(f"| {name} | {bits} | {row['ratio']:.3f} | {decision} |")
    print(f"{gpu} will use {', '.join(chosen) or 'none'}: {path}", flush=True)


def architecture() -> str:
    """The GPU's architecture, as the table names it."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def report(what: str, entry: Entry, seconds: float, before: float, weight_bytes: int) -> None:
    """A line."""
    rate = f", {weight_bytes / seconds / 1e12:.2f} TB/s of weights" if weight_bytes else ""
    print(f"{what}: {seconds * 1e6:.1f} us, was {before * 1e6:.1f}{rate}; {entry}", flush=True)


def merged(entries: list[Entry]) -> list[Entry]:
    """Ascending, so that the first that fits is the nearest; without those that say what the next one says."""
    ordered = sorted(entries, key=lambda entry: [entry.get(name, math.inf) for name in ("rows", "outputs")])
    kept: list[Entry] = []
    for entry in reversed(ordered):
        if not kept or {**entry, "outputs": 0} != {**kept[-1], "outputs": 0}:
            kept.append(entry)
    return kept[::-1]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the entries")
    parser.add_argument("--write", action="store_true", help="put them into tokserve/gpu/kernels/tuning.json too")
    for name, default in (("hidden", 4096), ("inner", 12288), ("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--candidates", action="store_true", help="decide on kernels on trial instead")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")
    args = parser.parse_args(arguments)
    until = time.monotonic() + args.seconds
    if args.candidates:
        decide_candidates(args.out, until, args.jobs)
        return
    assert registry.load_extension("cuda") is None
    qkv = (args.heads + 2 * args.kv_heads) * args.head_dim
    shapes = [
        (qkv, args.hidden),
        (args.hidden, args.heads * args.head_dim),
        (2 * args.inner, args.hidden),
        (args.hidden // 4, args.inner // 4),
    ]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(compile_products, shapes, first, args.jobs) for first in range(args.jobs)]:
            job.result()
    print(f"compiled, {until - time.monotonic():.0f} s are left", flush=True)
    halfway = time.monotonic() + (until - time.monotonic()) / 4
    entries = {"attention": [attention(args.heads, args.kv_heads, args.head_dim, halfway)]}
    entries["linear"] = merged(list(products(shapes, until)))
    args.out.write_text(json.dumps(entries, indent=1) + "\n")
    if args.write:
        write(entries)


def write(new_entries: dict[str, list[Entry]]) -> None:
    """Put the entries in place of those that the table has for this card and for operands of this size."""
    table = json.loads(launch.TABLE.read_text())
    for kernel, entries in new_entries.items():
        kept = [
            entry
            for entry in table[kernel]
            if entry.get("arch") != architecture() or entry.get("bytes") != entries[0].get("bytes")
        ]
        smaller = [entry for entry in kept if entry.get("bytes", math.inf) < entries[0].get("bytes", 0)]
        table[kernel] = smaller + entries + [entry for entry in kept if entry not in smaller]
    lines = ",\n".join(
        f' "{kernel}": [\n' + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n ]"
        for kernel, entries in table.items()
        if kernel != "about"
    )
    launch.TABLE.write_text(f'{{\n "about": {json.dumps(table["about"])},\n{lines}\n}}\n')


if __name__ == "__main__":
    main()
