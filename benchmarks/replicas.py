"""Engines behind one port beside one engine, under a closed loop: `python benchmarks/replicas.py MODEL --engines 1 2`.

MODEL is a checkpoint, or one of `random_checkpoint.py`.  The engines of a server share the machine's processor threads,
and the load generator needs some too.  Figures: tokens per second, times, and the processor time of the front end, of
all engines and of the load generator.  Servers are measured one after the other, so the machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import peer_servers as servers
import psutil

FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "completed")


def processor_seconds(process: psutil.Process) -> float:
    """The processor time of a process, all threads."""
    times = process.cpu_times()
    return times.user + times.system


def measure(model: str, engines: int, load: list[str], flags: list[str]) -> dict[str, Any]:
    """The figures of a server with so many engines."""
    with tempfile.TemporaryDirectory() as directory:
        flags = ["-dp", str(engines), "--tokens-only", *flags]
        server = servers.tokserve(model, 1, flags, Path(directory) / "log")
        try:
            server.wait_ready()
            front_end = psutil.Process(server.pid)
            processes = [front_end, *front_end.children(recursive=True)]
            before = [processor_seconds(process) for process in processes]
            result = Path(directory) / "result.json"
            generator = [sys.executable, "-m", "tokserve", "bench", "serve", "--base-url", server.url]
            earlier = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            subprocess.run([*generator, *load, "--no-progress", "--result-json", str(result)], check=True)
            generated = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - earlier
            spent = [processor_seconds(one) - start for one, start in zip(processes, before, strict=True)]
        finally:
            server.stop()
        result_fields = json.loads(result.read_text())
    seconds = {"front_end": spent[0], "engines": sum(spent[1:]), "load_generator": generated}
    figures = {name: round(result_fields[name], 2) for name in FIGURES}
    return {"engines": engines} | figures | {f"{name}_cpu_s": round(value, 2) for name, value in seconds.items()}


def main() -> None:
    """Print a line of JSON for each number of engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=192)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="each number of engines is measured so often, in turns")
    options, flags = parser.parse_known_args()
    load = [
        "--max-concurrency",
        str(options.concurrency),
        "--num-prompts",
        str(options.num_prompts),
        "--input-len",
        str(options.input_len),
        "--output-len",
        str(options.output_len),
        "--warmup",
        "4",
    ]
    for _ in range(options.rounds):
        for engines in options.engines:
            print(json.dumps(measure(options.model, engines, load, flags)), flush=True)


if __name__ == "__main__":
    main()
