"""Ranks beside one process with as many threads: `python benchmarks/ranks.py MODEL --sizes 1 2`.

MODEL is a checkpoint, or one of `random_checkpoint.py`.  Every size gets the same processor threads, divided among its
ranks.  Figures: seconds to start, milliseconds of a decode step with 1 and 16 rows (the median of steps between the
first and the last token), prompt tokens per second, and memory of each process of the engine (proportional set size).
Sizes are measured one after the other, so the machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import psutil

from tokserve import LLM, SamplingParams

ROWS = (1, 16)
OUTPUT, PROMPT = 64, 512


def decode_ms(llm: LLM, rows: int) -> float:
    """Milliseconds of a step that generates a token for each of so many rows."""
    seconds = []
    for count in (8, 8 + OUTPUT):
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        prompts = [[100 + row, *range(5, 20)] for row in range(rows)]
        began = time.perf_counter()
        llm.generate(prompts, [params] * rows, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return 1e3 * (seconds[1] - seconds[0]) / OUTPUT


def prompt_rate(llm: LLM) -> float:
    """Prompt tokens per second, of four prompts that have nothing in common."""
    prompts = [[200 + number, *(number * PROMPT + i + 1000 for i in range(PROMPT - 1))] for number in range(4)]
    began = time.perf_counter()
    llm.generate(prompts, [SamplingParams(max_tokens=1)] * len(prompts), use_tqdm=False)
    return len(prompts) * PROMPT / (time.perf_counter() - began)


def memory() -> list[float]:
    """MB of each process that holds a model, the largest first."""
    processes = psutil.Process().children(recursive=True)
    models = [one for one in processes if "features.ranks.worker" in " ".join(one.cmdline())] or processes
    return sorted((round(one.memory_full_info().pss / 1e6, 1) for one in models), reverse=True)


def measure(model: str, size: int, threads: int, dtype: str) -> dict[str, Any]:
    """All figures of one size."""
    began = time.perf_counter()
    with LLM(
        model,
        tensor_parallel_size=size,
        cpu_threads=threads,
        dtype=dtype,
        tokens_only=True,
        max_model_len=2048,
        max_num_seqs=max(ROWS),
        enable_prefix_caching=False,
        spec_method="none",
        log_level="warning",
    ) as llm:
        figures: dict[str, Any] = {"ranks": size, "threads": threads, "start_s": round(time.perf_counter() - began, 1)}
        for rows in ROWS:
            decode_ms(llm, rows)  # warm
            figures[f"decode_ms_{rows}"] = round(min(decode_ms(llm, rows) for _ in range(3)), 2)
        figures["prompt_tokens_per_s"] = round(max(prompt_rate(llm) for _ in range(2)), 1)
        figures["memory_mb"] = memory()
    return figures


def main() -> None:
    """Print a line of JSON for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    for size in options.sizes:
        print(json.dumps(measure(options.model, size, options.threads, options.dtype)), flush=True)


if __name__ == "__main__":
    main()
