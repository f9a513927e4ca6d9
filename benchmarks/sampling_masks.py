"""What sampling masks cost: output tokens per second with and without them, in turns, against one server.

    python benchmarks/sampling_masks.py DIR --temperature 0.1 --rounds 5

Closed loop at concurrency 64 on the token route, 128 tokens in, 64 out, top_p 0.95, the drawn token's logprob, format
"arrays".  The temperature decides how many ids a mask has; their mean is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from urllib.parse import urlparse

import closed_loop
import httpx

INPUT, OUTPUT, CONCURRENCY = 128, 64, 64


def bodies(count: int, seed: int, *, masks: bool, args: argparse.Namespace) -> list[bytes]:
    rng = random.Random(seed)
    encoded = []
    for number in range(count):
        params = {
            "temperature": args.temperature,
            "top_p": args.top_p,
            "max_tokens": OUTPUT,
            "ignore_eos": True,
            "seed": number,
            "logprobs": 0,
            "return_sampling_mask": masks,
        }
        prompt = [rng.randrange(args.vocab) for _ in range(INPUT)]
        encoded.append(
            json.dumps({"token_ids": prompt, "sampling_params": params, "logprobs_format": args.format}).encode()
        )
    return encoded


def mean_ids(port: int, body: bytes) -> float:
    """Ids in a mask, of one request; those of masks that are null count as none."""
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"http://127.0.0.1:{port}{closed_loop.ROUTE}", content=body, headers=headers, timeout=60).json()
    mask = reply["choices"][0]["sampling_mask"]
    rows = [max(0, count) for count in mask["counts"]] if isinstance(mask, dict) else [len(row or ()) for row in mask]
    return statistics.fmean(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--format", choices=["arrays", "objects"], default="arrays")
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "tokserve",
        "serve",
        args.model,
        "--tokens-only",
        "--max-model-len",
        "2048",
        "--port",
        "0",
        "--no-enable-prefix-caching",
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "serving on" in line)
        match = re.search(r"serving on (\S+),", line)
        assert match is not None
        port = urlparse(match.group(1)).port
        assert port is not None
        print(f"mean ids in a mask: {mean_ids(port, bodies(1, 1, masks=True, args=args)[0]):.1f}")
        ratios = []
        for number in range(args.rounds):
            rates = {}
            for masks in (True, False) if number % 2 else (False, True):
                sent = bodies(CONCURRENCY + args.requests, number, masks=masks, args=args)
                rates[masks] = closed_loop.output_rate(port, sent, CONCURRENCY, OUTPUT, stream=False)
            ratios.append(rates[True] / rates[False])
            print(f"without {rates[False]:,.0f} with {rates[True]:,.0f} tok/s: {ratios[-1]:.3f}x", flush=True)
        print(f"median {statistics.median(ratios):.3f}x")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
