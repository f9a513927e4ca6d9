"""Time and memory of a start: `loading.py CHECKPOINT [--starts N] [options of the server]`.

Starts `tokserve serve` several times with nothing but token routes, and prints of each start the seconds until it
serves, the processor time of the engine until then, and the largest and the present resident memory of the engine,
beside the bytes of the checkpoint's weights.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import psutil


def resident(pid: int) -> dict[str, int]:
    """MiB of a process: VmHWM, the most there has been, VmRSS, RssAnon and RssFile."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name.rstrip(":"): int(size[0]) >> 10 for name, *size in lines if name.startswith(("VmHWM", "VmRSS", "Rss"))}


def weights(checkpoint: Path) -> int:
    """Bytes of a checkpoint's files of weights."""
    files = [checkpoint] if checkpoint.is_file() else checkpoint.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def start(checkpoint: Path, options: list[str]) -> str:
    """A row of the table, of one start."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tokserve", "serve", str(checkpoint), "--port", "0", "--tokens-only", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        assert server.stderr is not None
        log = []
        for line in server.stderr:
            log.append(line)
            if "serving on" in line:
                break
        else:
            sys.exit("".join(log))
        ready = time.perf_counter() - began
        engine = next(p for p in psutil.Process(server.pid).children() if "engine.process" in " ".join(p.cmdline()))
        times, memory = engine.cpu_times(), resident(engine.pid)
        server.terminate()
        server.stderr.read()
    cells = (f"{ready:.1f}", f"{times.user:.1f} + {times.system:.1f}", memory["VmHWM"], memory["VmRSS"])
    return f"| {' '.join(options) or 'as it is'} | {weights(checkpoint) >> 20} | " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--starts", type=int, default=3)
    args, options = parser.parse_known_args()
    print("| options | weights, MiB | ready after, s | engine's processor time, s | most memory, MiB | after, MiB |")
    print("|---|---|---|---|---|---|")
    for _ in range(args.starts):
        print(start(args.checkpoint, options), flush=True)


if __name__ == "__main__":
    main()
