"""Time, memory and stall of a weight push: a server with random weights at Qwen3-0.6B's shapes generates one stream
while a trainer in this process pushes a full set of tensors, over HTTP and over gloo.

    python benchmarks/weight_push.py --port 8051

The stall is the longest gap between two tokens during the push, compared with the gaps before it; the commit's own
share is the longest gap around `finish_weight_update`.  Memory is the engine's resident set, sampled every 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import torch

from tokserve.models.load import build
from tokserve.models.registry import decoder_spec
from tokserve.rl import TokserveClient

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}


def tensors(layers: int) -> dict[str, torch.Tensor]:
    """A full set, small random numbers."""
    spec = decoder_spec(CONFIG | {"num_hidden_layers": layers})
    parameters = build(spec, dtype="bfloat16", head_dtype="auto", max_model_len=1).parameters_by_name()
    return {name: torch.full(parameter.shape, 0.01, dtype=torch.bfloat16) for name, parameter in parameters.items()}


class Watch:
    """Token times of one endless stream, and the engine's memory."""

    def __init__(self, url: str, engine: psutil.Process) -> None:
        self.url, self.engine = url, engine
        self.times: list[float] = []
        self.rss: list[tuple[float, int]] = []

    async def tokens(self) -> None:
        body = {"token_ids": [1, 2, 3], "stream": True, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
        address = self.url + "/inference/v1/generate"
        async with httpx.AsyncClient(timeout=None) as http, http.stream("POST", address, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.monotonic())

    async def memory(self) -> None:
        while True:
            self.rss.append((time.monotonic(), self.engine.memory_info().rss))
            await asyncio.sleep(0.02)

    def gaps(self, start: float, end: float) -> np.ndarray:
        """Milliseconds between tokens, of gaps that touch the interval."""
        times = np.array(self.times)
        gaps = np.diff(times) * 1e3
        return gaps[(times[1:] >= start) & (times[:-1] <= end)]

    def peak(self, start: float, end: float) -> float:
        return max(rss for when, rss in self.rss if start <= when <= end) / 2**20


async def push(client: TokserveClient, watch: Watch, named: dict[str, torch.Tensor], name: str) -> None:
    start = time.monotonic()
    await asyncio.sleep(5)
    began = time.monotonic()
    await client.update_weights(named.items())
    ended = time.monotonic()
    await asyncio.sleep(1)
    quiet, busy, commit = watch.gaps(start, began), watch.gaps(began, ended), watch.gaps(ended - 0.2, ended)
    size = sum(t.numel() * t.element_size() for t in named.values())
    row = {
        "way": name,
        "GiB": round(size / 2**30, 2),
        "push_s": round(ended - began, 2),
        "GiB/s": round(size / 2**30 / (ended - began), 2),
        "gap_before_ms": [round(float(np.percentile(quiet, p)), 1) for p in (50, 100)],
        "gap_during_ms": [round(float(np.percentile(busy, p)), 1) for p in (50, 99, 100)],
        "gap_at_commit_ms": round(float(commit.max()), 1) if len(commit) else None,
        "rss_before_MiB": round(watch.peak(start, began)),
        "rss_peak_MiB": round(watch.peak(began, ended + 1)),
        "rss_after_MiB": round(watch.rss[-1][1] / 2**20),
    }
    print(json.dumps(row), flush=True)


async def main(args: argparse.Namespace) -> None:
    named = tensors(args.layers)
    with tempfile.TemporaryDirectory() as directory:
        config = CONFIG | {"num_hidden_layers": args.layers}
        (Path(directory) / "config.json").write_text(json.dumps(config))
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
            str(args.port),
            "--max-model-len",
            "4096",
            "--max-num-seqs",
            "4",
        ]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{args.port}"
        try:
            async with TokserveClient(url) as client:
                await client.wait_ready()
                watch = Watch(url, psutil.Process(server.pid).children()[0])
                tasks = [asyncio.ensure_future(watch.tokens()), asyncio.ensure_future(watch.memory())]
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", 0))
                    port = sock.getsockname()[1]
                async with TokserveClient(url) as grouped:
                    await grouped.join("gloo", "127.0.0.1", port)
                    for _ in range(args.rounds):
                        await push(client, watch, named, "http")
                        await push(grouped, watch, named, "gloo")
                for task in tasks:
                    task.cancel()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8051, help="of the server that is started. Default: 8051.")
    parser.add_argument("--layers", type=int, default=28, help="of the model. Default: 28, as Qwen3-0.6B has.")
    parser.add_argument("--rounds", type=int, default=2, help="pushes of each way. Default: 2.")
    asyncio.run(main(parser.parse_args()))
