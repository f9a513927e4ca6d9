"""Measure launch parameters on this card and write them as entries of the table that the launchers read.

    python benchmarks/gpu_tune.py --out OUT.json [--write] [--hidden 4096 --inner 12288 --heads 32 --kv-heads 8]

Matrix products by rows and outputs, attention by head size; a candidate whose bits differ from the present one's is
left out, as is one that does not fit the card.  `--write` puts the entries before the others in tuning.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

from tokserve import ops
from tokserve.ops import registry
from tokserve.ops.registry import OPS
from tokserve.ops.triton import launch

ROWS = (16, 64, 128, 256, 2048)
TILES = ((64, 16), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256))
CACHE_BYTES = 1 << 30  # inputs are taken in turn from so much memory that they are not in the card's cache
BF16 = torch.bfloat16
Entry = dict[str, Any]


def call(name: str) -> Callable[..., Any]:
    """The Triton implementation of an op."""
    found: Callable[..., Any] = OPS[name].implementations["triton"].call
    return found


def best(kernel: str, candidates: Iterator[Entry], run: Callable[[], list[torch.Tensor]]) -> tuple[Entry, float, float]:
    """The fastest candidate, its seconds and those of the present entry.  `run`: several calls, on several inputs."""
    present = launch.table()[kernel]
    expected, before = run()[0], do_bench_cudagraph(run) / 1e3
    found: tuple[Entry, float] | None = None
    for candidate in candidates:
        launch.table()[kernel] = [candidate]
        launch.tuned.cache_clear()
        try:
            if torch.equal(run()[0], expected):
                seconds = do_bench_cudagraph(run) / 1e3
                found = min(found or (candidate, seconds), (candidate, seconds), key=lambda each: each[1])
        except OutOfResources:
            pass
    launch.table()[kernel] = present
    launch.tuned.cache_clear()
    assert found is not None
    return *found, before


def products(shapes: list[tuple[int, int]]) -> Iterator[Entry]:
    """An entry for each number of rows and of outputs that is asked for."""
    for rows, (outputs, inputs) in itertools.product(ROWS, sorted(shapes)):
        copies = max(1, min(16, CACHE_BYTES // (2 * outputs * inputs)))
        weights = torch.randn(copies, outputs, inputs, device="cuda", dtype=BF16)
        packed = [ops.PackedWeight(outputs, inputs, BF16, weight) for weight in weights]
        x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
        candidates = (
            {"tile": list(tile), "warps": warps, "stages": stages}
            for tile, warps, stages in itertools.product(TILES, (4, 8), (3, 4, 5, 6))
            if 2 * stages * 64 * sum(tile) <= 220_000 and (warps == 4) == (tile[0] * tile[1] <= 64 * 128)
        )

        def run(x: torch.Tensor = x, packed: list[ops.PackedWeight] = packed) -> list[torch.Tensor]:
            return [call("linear")(x, each, None) for each in packed]

        entry, seconds, before = best("linear", candidates, run)
        report(f"linear {rows} x {outputs} x {inputs}", entry, seconds / copies, before / copies, 2 * outputs * inputs)
        bounds = {"rows": rows, "outputs": outputs}
        largest = {"rows": ROWS[-1], "outputs": max(shapes)[0]}  # stands for all that is larger
        yield {"arch": architecture()} | {name: most for name, most in bounds.items() if most < largest[name]} | entry


def attention(heads: int, kv_heads: int, dim: int) -> Entry:
    """One entry: decode of 64 rows of 1000 keys and of one of 8000, and a prompt of 2000, weighed alike."""
    cases = [(64, 1000, 1), (1, 8000, 1), (1, 2000, 2000)]
    made = []
    for rows, length, queries in cases:
        width = -(-length // 64)
        caches = torch.randn(2, rows * width, kv_heads, 64, dim, device="cuda", dtype=BF16).unbind()
        tables = torch.randperm(rows * width, device="cuda").int().view(rows, width)
        q = torch.randn(rows * queries, heads, dim, device="cuda", dtype=BF16)
        starts = torch.arange(rows + 1, device="cuda").int() * queries
        made.append((q, *caches, tables, starts, torch.full((rows,), length, device="cuda").int(), dim**-0.5, 0))
    candidates = (
        {"decode_stages": decode, "prefill_stages": prefill, "programs": programs}
        for decode, prefill, programs in itertools.product((2, 3, 4), (2, 3), (1, 2, 4))
    )

    def run() -> list[torch.Tensor]:
        return [torch.cat([call("paged_attention")(*case).flatten() for case in made])]

    entry, seconds, before = best("attention", candidates, run)
    report(f"attention {heads} heads, {kv_heads} KV heads of {dim}", entry, seconds, before, 0)
    return {"arch": architecture(), "row_bytes": 2 * dim, "group": heads // kv_heads} | entry


def architecture() -> str:
    """As the table names it."""
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


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the entries")
    parser.add_argument("--write", action="store_true", help="put them into tokserve/ops/triton/tuning.json too")
    for name, default in (("hidden", 4096), ("inner", 12288), ("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    assert registry.load_extension("cuda") is None
    qkv = (asked.heads + 2 * asked.kv_heads) * asked.head_dim
    shapes = [
        (qkv, asked.hidden), (asked.hidden, asked.heads * asked.head_dim), (2 * asked.inner, asked.hidden),
    ]  # fmt: skip
    found = {
        "attention": [attention(asked.heads, asked.kv_heads, asked.head_dim)],
        "linear": merged(list(products(shapes))),
    }
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.write:
        table = json.loads(launch.TABLE.read_text())
        for kernel, entries in found.items():
            table[kernel] = entries + [entry for entry in table[kernel] if entry.get("arch") != architecture()]
        launch.TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
