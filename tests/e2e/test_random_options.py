"""Servers with random options: each starts or refuses with one line, and options that are not about arithmetic change
no bit of a reply.

`TOKSERVE_OPTION_SEEDS=100-200 python -m pytest -m slow tests/e2e/test_random_options.py` tries others.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.replies import good
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.checkpoint import DEMO_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FAMILIES = (
    "qwen3",
    "llama",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_next",
    "lfm2",
    "gpt_oss",
    "phi3",
)
Options = dict[str, str]
ARITHMETIC: dict[str, tuple[str, ...]] = {  # options on which bits depend; "": left out
    "--dtype": ("float32", "bfloat16"),
    "--quantization": ("", "", "int8", "int4"),
    "--head-dtype": ("", "", "float32"),
    "-tp": ("", "", "2"),
}
OTHERS: dict[str, tuple[str, ...]] = {
    "--block-size": ("5", "8", "16", "32", "64"),
    "--no-enable-prefix-caching": ("",),
    "--max-num-seqs": ("1", "2", "5", "16"),
    "--max-num-batched-tokens": ("16", "33", "64", "512"),
    "--max-chunk": ("1", "8", "64"),
    "--scheduling-policy": ("fcfs", "priority"),
    "--depth": ("1", "2"),
    "--speculative-config": (
        '{"method": "ngram", "num_speculative_tokens": 4}',
        '{"method": "suffix", "num_speculative_tokens": 6}',
        '{"method": "self", "num_speculative_tokens": 3}',
    ),
    "--enforce-eager": ("",),
    "--cpu-threads": ("1", "2"),
    "-pp": ("2", "3"),
    "-dp": ("2",),
    "-asc": ("2",),
    "--kv-offloading-size": ("0.01",),
    "--state-snapshot-interval": ("16", "64"),
    "--enable-lora": ("",),
    "--return-sampling-mask": ("",),
    "--weight-staging": ("beside", "in_place"),
    "--weight-checksums": ("",),
    "--restart-engine": ("1",),
    "--log-requests": ("",),
    "--strict": ("",),
    "--fair-clients": ("",),
    "--no-exact": ("",),
    "--sglang-api": ("",),
    "--no-vllm-metric-names": ("",),
    "--tokens-only": ("",),
    "--per-request-spec-decode-metrics": ("summary", "detailed"),
    "--kv-cache-memory-bytes": ("200K", "1M", "64M"),
    "--max-model-len": ("64", "200", "512"),
    "--log-format": ("json",),
    "--check-weights": ("off",),
    "--gpu-memory-utilization": ("0.01", "0.5"),
    "--control-lease": ("5",),
    "--client-header": ("x-client",),
    "--grammar-cache-bytes": ("1000000",),
    "--max-requests-per-client": ("8",),
    "--stream-stall-timeout": ("5",),
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"top_p": 0.8, "top_k": 12},
    {"repetition_penalty": 1.2, "min_p": 0.02},
    {"n": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.2, "logit_bias": {"50": 3.0}},
]
_plain: dict[str, list[Any]] = {}  # replies by family and arithmetic


def seeds() -> range:
    first, _, last = os.environ.get("TOKSERVE_OPTION_SEEDS", "0-16").partition("-")
    return range(int(first), int(last))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    for family in FAMILIES:
        hf = tiny_config(family, vocab_size=4096, max_position_embeddings=512)
        directories[family] = write_checkpoint(tmp_path_factory.mktemp(family), hf)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_DIR / name, directories[family])
    return directories


def flags(options: Options) -> list[str]:
    return [part for name, value in options.items() for part in (name, value) if part]


def replies(server: Server) -> list[Any]:
    """Choices and prompt logprobs of requests that run together."""
    generator = random.Random(5)
    bodies = []
    for number, params in enumerate(SAMPLING):
        length = generator.choice((3, 17, 40))
        ids = [generator.randrange(5, 250) for _ in range(length)] if number % 3 else [7, 8, 9, 10] * (length // 4 + 1)
        sampling = {"seed": number, "max_tokens": 18, "logprobs": 1, "ignore_eos": True} | params
        bodies.append({"token_ids": ids, "sampling_params": sampling})

    def generate(body: dict[str, Any]) -> Any:
        reply = good(server.post("/inference/v1/generate", body))
        choices = [[choice["token_ids"], choice["logprobs"]] for choice in reply["choices"]]
        return choices, reply.get("prompt_logprobs")

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(generate, bodies))


def refusal(server: Server) -> str | None:
    """The last line of a server that did not start; None: it serves."""
    try:
        _ = server.url
    except AssertionError:
        log = "\n".join(server.log)
        assert server.process.wait(120) != 0 and "Traceback" not in log, log
        assert "error" in server.log[-1], log
        return server.log[-1]
    return None


@pytest.mark.parametrize("seed", seeds())
def test_options_that_are_not_about_arithmetic_change_no_bit(seed: int, checkpoints: dict[str, Path]) -> None:
    generator = random.Random(seed)
    family = generator.choice(FAMILIES)
    arithmetic = {name: value for name, values in ARITHMETIC.items() if (value := generator.choice(values))}
    chosen = generator.sample(sorted(OTHERS), generator.randint(2, 6))
    others = {name: generator.choice(OTHERS[name]) for name in chosen}
    server = Server(checkpoints[family], *flags(arithmetic), *flags(others))
    try:
        if refusal(server) is not None:
            return
        actual = replies(server)
        for path in ("/metrics", "/server_info", "/v1/models", "/openapi.json", "/health"):
            assert server.get(path).status_code == 200, path
        assert server.stop() == 0
    finally:
        server.stop(signal.SIGKILL)
    assert "Traceback" not in "\n".join(server.log)
    key = " ".join([family, *flags(arithmetic)])
    if key not in _plain:
        with Server(checkpoints[family], *flags(arithmetic)) as plain:
            _plain[key] = replies(plain)
    assert actual == _plain[key], flags(others)
