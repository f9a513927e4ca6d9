"""Decoding and prompts of quantized models: `quantized.py CHECKPOINT [--gguf FILE --llama PYTHON]`.

Each option serves the checkpoint offline and is timed in turn; with a GGUF file, the same file by llama.cpp too
(`llama_worker.py`).  Decoding is the time of a step with c requests of short prompts, prompts are 1,024 tokens.
Nothing is speculated: a step makes one token of each request.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from tokserve import LLM, SamplingParams

THREADS = 2
CASES = ((1, 16, 24), (16, 16, 12), (1, 1024, 0))  # requests, tokens of a prompt, decoding steps
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4, head int8": {"quantization": "int4", "quantize_lm_head": True},
}
FLOAT8_OPTIONS: dict[str, dict[str, Any]] = {  # of a checkpoint in float8
    "dequantized": {"quantization": "none"},
    "as stored": {},
    "fp8": {"quantization": "fp8"},
}


def tokens(count: int, seed: int) -> list[int]:
    """A prompt that no other begins with."""
    return [(seed * 7919 + i * 104_729) % 4000 + 10 for i in range(count)]


def tokserve_rates(model: str, options: dict[str, Any], rounds: int) -> list[float]:
    """Milliseconds of a step, or tokens of prompts per second, the best of the rounds, for each case."""
    began = time.perf_counter()
    figures = []
    with LLM(
        model,
        tokens_only=True,
        cpu_threads=THREADS,
        max_model_len=1280,
        enable_prefix_caching=False,
        spec_method="none",
        **options,
    ) as llm:
        engines = psutil.Process().children(recursive=True)
        memory = max(process.memory_full_info().uss for process in engines) / 1e9
        print(f"  started in {time.perf_counter() - began:.1f} s, {memory:.2f} GB", flush=True)
        for requests, length, steps in CASES:
            prompts = [tokens(length, seed) for seed in range(requests)]

            def seconds(count: int, prompts: list[list[int]] = prompts) -> float:
                params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                start = time.perf_counter()
                llm.generate(prompts, [params] * len(prompts), use_tqdm=False)
                return time.perf_counter() - start

            seconds(2)
            first = min(seconds(1) for _ in range(rounds))
            if steps:
                figures.append(1e3 * (min(seconds(1 + steps) for _ in range(rounds)) - first) / steps)
            else:
                figures.append(requests * length / first)
    return figures


def llama(python: str, model: str) -> list[float]:
    """The same by llama.cpp."""
    worker = subprocess.Popen(
        [python, str(Path(__file__).parent / "llama_worker.py"), model, "--threads", str(THREADS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdout.readline()
    figures = []
    for requests, length, steps in CASES:
        worker.stdin.write(json.dumps({"sequences": requests, "prompt": length, "steps": steps}) + "\n")
        worker.stdin.flush()
        figures.append(json.loads(worker.stdout.readline())["value"])
    worker.stdin.close()
    worker.wait()
    return figures


def main() -> None:
    """Time every option, and print a row of a table for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--gguf", action="append", default=[])
    parser.add_argument("--llama", help="a Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", action="append", help="options of these names alone; none: no checkpoint")
    parser.add_argument("--kernels", help="the instruction set of tokserve, avx2 say; by default the best")
    parser.add_argument("--rounded", action="store_true", help="GGUF files with rounded activations too")
    parser.add_argument("--float8", action="store_true", help="the checkpoint is one in float8")
    args = parser.parse_args()
    kernels = {} if args.kernels is None else {"cpu_kernels": args.kernels}
    print("| model | c=1, ms a step | c=16, ms a step | prompts of 1,024, tokens/s |\n|---|---|---|---|", flush=True)
    for name, options in (FLOAT8_OPTIONS if args.float8 else OPTIONS).items():
        if args.only is None or name in args.only:
            row(name, tokserve_rates(args.checkpoint, options | kernels, args.rounds))
    for path in args.gguf:
        row(f"{Path(path).stem}, tokserve", tokserve_rates(path, kernels, args.rounds))
        if args.rounded:
            rounded = kernels | {"quantization_activations": "int8"}
            row(f"{Path(path).stem}, tokserve, rounded", tokserve_rates(path, rounded, args.rounds))
        if args.llama:
            row(f"{Path(path).stem}, llama.cpp", llama(args.llama, path))


def row(name: str, figures: list[float]) -> None:
    """A row of the table."""
    print(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
