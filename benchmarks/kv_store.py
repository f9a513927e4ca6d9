"""Time to the first token of a long prompt: computed, from memory, and from files after a restart.

python benchmarks/kv_store.py MODEL [--tokens 4096] [--dtype bfloat16] [--repeats 3]
(MODEL: a checkpoint directory, e.g. one that random_checkpoint.py wrote)

Each of several prompts is sent three times: to a fresh server, after its prefix cache was emptied, and after a restart
with the same directory.  The tokens must be equal; the table has the median times, and the fewest cached tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any


class BenchmarkServer:
    """A `tokserve serve` process with a KV store in a directory."""

    def __init__(self, model: str, tokens: int, directory: str, flags: list[str]) -> None:
        command = [
            sys.executable,
            "-m",
            "tokserve",
            "serve",
            model,
            "--port",
            "0",
            "--tokens-only",
            "--load-format",
            "auto",
            "--max-model-len",
            str(tokens + 64),
            "--kv-offloading-size",
            "4",
            "--kv-offloading-dir",
            directory,
            *flags,
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        began, self.url = time.monotonic(), ""
        for line in self.process.stderr:
            if match := re.search(r"serving on (\S+),", line):
                self.url = match[1]
                break
        if not self.url:
            raise SystemExit("the server did not start")
        self.start_seconds = time.monotonic() - began

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The reply's JSON."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as reply:
            return json.loads(reply.read() or b"null")

    def first_token(self, prompt: list[int]) -> tuple[float, int, int]:
        """Seconds, the token, and the prompt tokens that were cached."""
        began = time.monotonic()
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "temperature": 0, "ignore_eos": True}}
        reply = self.post("/inference/v1/generate", body)
        seconds = time.monotonic() - began
        return seconds, reply["choices"][0]["token_ids"][0], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stop(self) -> None:
        """End it; what waits to be written is given time."""
        time.sleep(3)
        self.process.terminate()
        self.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=280, help="prompts use ids below this")
    args, flags = parser.parse_known_args()
    prompts = [
        [(index * 7 + number * 31) % (args.vocabulary - 40) + 40 for index in range(args.tokens)]
        for number in range(args.repeats)
    ]
    times: dict[str, list[tuple[float, int, int]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        server = BenchmarkServer(args.model, args.tokens, directory, flags)
        server.first_token(prompts[0][::-1])  # pages are touched, and rates measured
        times["computed"] = [server.first_token(prompt) for prompt in prompts]
        time.sleep(1)  # the last blocks are copied beside the steps
        server.post("/reset_prefix_cache", {})
        times["from memory"] = [server.first_token(prompt) for prompt in prompts]
        server.stop()
        server = BenchmarkServer(args.model, args.tokens, directory, flags)
        times["from files, after a restart"] = [server.first_token(prompt) for prompt in prompts]
        server.stop()
    tokens = [[token for _, token, _ in row] for row in times.values()]
    if any(row != tokens[0] for row in tokens):
        raise SystemExit("the tokens differ")
    print(f"| prompt of {args.tokens} tokens | time to first token | cached tokens |\n|---|---|---|")
    for name, row in times.items():
        print(
            f"| {name} | {statistics.median(seconds for seconds, _, _ in row):.3f} s "
            f"| {min(cached for _, _, cached in row)} |"
        )


main()
