"""Time and bytes of `client.push`: all weights against the elements that changed, over HTTP, at Qwen3-0.6B's shapes.

    python benchmarks/delta_push.py --share 0.01

A server with random bfloat16 weights and a trainer in this process, with float32 masters (`--masters bfloat16`: those).
Before each delta a random share of the elements of every tensor is changed so that bfloat16 shows it.  A push is timed
from the call to its return: rounding, comparing, sending, staging, checking and the commit.  The first delta after a
full push, for which the server computes its checksum, is printed apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from weight_push import CONFIG, tensors

from tokserve.rl import PushResult, TokserveClient


def changed(masters: dict[str, torch.Tensor], share: float) -> None:
    """One step: that share of each tensor grows by a thirty-second part, which bfloat16 shows."""
    for tensor in masters.values():
        flat = tensor.view(-1)
        chosen = torch.randint(len(flat), (max(1, int(len(flat) * share)),))
        flat[chosen] *= 1 + 2**-5


async def timed(client: TokserveClient, masters: dict[str, torch.Tensor], *, delta: bool) -> tuple[float, PushResult]:
    start = time.monotonic()
    result = await client.push(masters, delta=delta)
    return time.monotonic() - start, result


async def scene(client: TokserveClient, args: argparse.Namespace) -> None:
    masters = {name: tensor.to(getattr(torch, args.masters)) for name, tensor in tensors(args.layers).items()}
    generator = torch.Generator().manual_seed(1)
    for tensor in masters.values():
        tensor.normal_(0, 0.02, generator=generator)
    rows: dict[str, list[float]] = {"full": [], "full, kept": [], "first delta": [], "delta": []}
    sizes: dict[str, int] = {}

    async def push(kind: str, *, delta: bool) -> None:
        seconds, result = await timed(client, masters, delta=delta)
        expected = "delta" if kind.endswith("delta") else "full"
        if result.mode != expected:
            raise SystemExit(f"{kind} was a {result.mode} push: {result.reason}")
        rows[kind].append(seconds)
        sizes[kind] = result.num_bytes
        print(
            json.dumps(
                {
                    "push": kind,
                    "s": round(seconds, 3),
                    "MB": round(result.num_bytes / 1e6, 1),
                    "changed": result.num_changed,
                }
            ),
            flush=True,
        )

    await push("full", delta=False)  # warms up both ends
    rows["full"].clear()
    for _ in range(args.rounds):
        await push("full", delta=False)
        await push("full, kept", delta=True)
        for number in range(3):
            changed(masters, args.share)
            await push("delta" if number else "first delta", delta=True)
    summary = {kind: round(statistics.median(seconds), 3) for kind, seconds in rows.items()}
    ratios = {"time": round(summary["delta"] / summary["full"], 4), "bytes": round(sizes["delta"] / sizes["full"], 4)}
    print(json.dumps({"seconds": summary, "delta/full": ratios}))


async def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory, socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        sock.close()
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": args.layers}))
        command = [
            sys.executable,
            "-m",
            "tokserve",
            "serve",
            directory,
            "--tokens-only",
            "--load-format",
            "dummy",
            "--port",
            str(port),
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            "4",
        ]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            async with TokserveClient(f"http://127.0.0.1:{port}") as client:
                await client.wait_ready()
                await scene(client, args)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="of the model. Default: 28, as Qwen3-0.6B has.")
    parser.add_argument("--rounds", type=int, default=2, help="of a full push and three deltas. Default: 2.")
    parser.add_argument("--share", type=float, default=0.01, help="of elements that a step changes. Default: 0.01.")
    parser.add_argument("--masters", default="float32", choices=("float32", "bfloat16"), help="the trainer's weights.")
    asyncio.run(main(parser.parse_args()))
