"""What a server does besides tokens, on a real GPU: sleep, weights under load, adapters, drafts, scores, dtypes, stored
KV blocks and clear refusals (scripts/gpu_check.sh --only features).

Each has run on CPUs and on a simulated device; here memory, streams and graphs are a card's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.adapters import write_adapter
from tests.e2e.server import Server
from tests.e2e.test_cuda_ipc import results, serves, trainer
from tests.ports import free_port
from tests.replies import good
from tests.tiny_models import tiny_config, write_checkpoint
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    needs.GPU.skips(),
]
DEVICE = "cuda"
MEMORY = ("--kv-cache-memory-bytes", str(1 << 30))
FLAGS = ("--device", DEVICE, *MEMORY)


def ask(server: Server, number: int, model: str | None = None, **params: Any) -> Any:
    """Tokens and logprobs of a reply."""
    ids = [5 + (number * 7 + i) % 200 for i in range(3 + number * 13)]
    fields = {"max_tokens": 24, "temperature": number % 3 * 0.5, "seed": number, "logprobs": 2} | params
    answer = generate(server, ids, {} if model is None else {"model": model}, **fields)
    assert answer["exact"] is True
    return [answer["choices"][0][name] for name in ("token_ids", "logprobs")]


def generate(server: Server, ids: list[int], more: dict[str, Any], **params: Any) -> Any:
    """The reply to a request with `more` fields beside its parameters."""
    return good(server.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": params} | more))


def check_alone_and_together(server: Server, count: int = 8, **params: Any) -> list[Any]:
    """Replies of requests one by one, which are those of all at once."""
    alone = [ask(server, number, **params) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(lambda number: ask(server, number, **params), range(count))) == alone
    return alone


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


def test_sleep_gives_the_memory_of_the_cache_back() -> None:
    with Server("demo", *FLAGS) as server:
        before = check_alone_and_together(server)
        awake = free_bytes()
        good(server.post("/sleep?level=1", {}))
        until(lambda: free_bytes() - awake > 0.9 * (1 << 30), "the KV cache is not given back")
        good(server.post("/wake_up", {}))
        until(lambda: free_bytes() - awake < 0.1 * (1 << 30), "the KV cache is not taken again")
        assert check_alone_and_together(server) == before


def test_a_start_finds_what_was_compiled_without_a_gpu(tmp_path: Path) -> None:
    architecture, cache = "sm_{}{}".format(*torch.cuda.get_device_capability()), str(tmp_path)
    words = [sys.executable, "-m", "tokserve", "compile", "demo", "--arch", architecture, *MEMORY]
    without = os.environ | {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(words, env=without, check=True)
    compiled = set(tmp_path.glob("*/*.cubin"))
    with Server("demo", *FLAGS, env={"TRITON_CACHE_DIR": cache}) as server:
        check_alone_and_together(server)
        assert any("most kernels are compiled" in line for line in server.log)
    assert compiled and set(tmp_path.glob("*/*.cubin")) == compiled


def test_weights_that_come_under_load_serve_from_one_token_to_the_next() -> None:
    with Server("demo", *FLAGS) as server, ThreadPoolExecutor(32) as pool:
        running = [pool.submit(ask, server, number % 8, max_tokens=200) for number in range(32)]
        (result,) = results(trainer({}, server.url, 1.125))
        assert result["version"] == "1.125"
        assert all(len(one.result()[0]) == 200 for one in running)
        assert serves(server, 1.125)
        check_alone_and_together(server)


@pytest.mark.parametrize(
    "flags",
    [
        ("--dtype", "float16"),
        ("--dtype", "float32"),
        ("--quantization", "fp8"),
        ("--kv-cache-dtype", "fp8"),
        ("--quantization", "int4"),
        ("--enforce-eager",),
        ("--depth", "1"),
    ],
    ids=" ".join,
)
def test_replies_are_the_same_alone_and_in_a_batch(flags: tuple[str, ...]) -> None:
    with Server("demo", *FLAGS, *flags) as server:
        check_alone_and_together(server)


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "deepseek_v3", "lfm2", "gpt_oss", "phi3", "qwen3_next"])
def test_families_serve_exactly(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(family), seed=1)
    with Server(tmp_path, *FLAGS, "--tokens-only", "--max-model-len", "256") as server:
        check_alone_and_together(server)


def test_adapters_change_no_other_request(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", tiny_config("qwen3"), seed=1)
    paths = {name: write_adapter(tmp_path / name, base, seed=number) for number, name in enumerate("ab", 1)}
    modules = [f"{name}={path}" for name, path in paths.items()]
    flags = ("--tokens-only", "--max-model-len", "256", "--enable-lora", "--lora-modules", *modules)
    with Server(base, *FLAGS, *flags) as server:

        def one(number: int) -> Any:
            return ask(server, number, "ab"[number % 2] if number % 3 else None)

        alone = [one(number) for number in range(9)]
        with ThreadPoolExecutor(9) as pool:
            assert list(pool.map(one, range(9))) == alone
    assert alone[1] != alone[2]


@pytest.mark.parametrize("method", ["ngram", "suffix", "self-int8"])
def test_drafts_change_no_token(method: str) -> None:
    replies = []
    for spec in ("none", method):
        with Server("demo", *FLAGS, "--spec-method", spec) as server:
            replies.append(check_alone_and_together(server, max_tokens=60))
    assert replies[0] == replies[1]


def test_scores_do_not_depend_on_chunks() -> None:
    prompt, scores = [7 + (i * 31) % 230 for i in range(1900)], []
    for tokens in ("64", "8192"):
        with Server("demo", *FLAGS, "--max-num-batched-tokens", tokens) as server:
            scores.append(server.generate(prompt, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"])
    assert scores[0] == scores[1]


def test_prompts_continue_from_stored_blocks(tmp_path: Path) -> None:
    prompt = [9 + (i * 13) % 220 for i in range(400)]

    def outcome(server: Server) -> tuple[Any, int]:
        reply = server.generate(prompt, max_tokens=12, seed=3, temperature=1.0, logprobs=2)
        return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    flags = (*FLAGS, "--kv-offloading-size", "0.5", "--kv-offloading-dir", str(tmp_path))
    with Server("demo", *flags) as server:
        tokens, cached = outcome(server)
        assert cached == 0

        def is_loaded() -> bool:
            good(server.post("/reset_prefix_cache", {}))
            loaded, count = outcome(server)
            assert loaded == tokens
            return count >= 384

        until(is_loaded, "no block is loaded")
    with Server("demo", *flags) as server:  # from files
        assert outcome(server)[0] == tokens


def test_blocks_go_from_one_server_to_another(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    prompt, small = [9 + (i * 13) % 220 for i in range(400)], ("--device", DEVICE, "--kv-cache-memory-bytes", "512M")

    def flags(role: str) -> tuple[str, ...]:
        extra = {"key_file": str(key)}
        config = {
            "kv_connector": "tcp",
            "kv_role": role,
            "kv_port": free_port(),
            "kv_connector_extra_config": extra,
        }
        return (*small, "--kv-transfer-config", json.dumps(config))

    with Server("demo", *flags("kv_producer")) as first, Server("demo", *flags("kv_consumer")) as second:
        expected = first.generate(prompt, max_tokens=12, seed=3)["choices"][0]["token_ids"]
        begun = generate(first, prompt, {"kv_transfer_params": {"do_remote_decode": True}}, max_tokens=1, seed=3)
        more = {"kv_transfer_params": begun["kv_transfer_params"]}
        reply = generate(second, prompt, more, max_tokens=12, seed=3)
        assert reply["choices"][0]["token_ids"] == expected
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 384


def test_a_cache_that_does_not_fit_is_refused_by_name() -> None:
    server = Server("demo", "--device", DEVICE, "--kv-cache-memory-bytes", str(1 << 42))
    assert server.process.wait(240) != 0
    server.stop()
    assert any("memory" in line for line in server.log) and not any("Traceback" in line for line in server.log)
