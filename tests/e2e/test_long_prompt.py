"""Logprobs of a prompt of 32k tokens: bounded memory in both processes, and the same cold and warm."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.e2e.server import Server
from tests.tiny_models import tiny_config, write_checkpoint

LENGTH, VOCAB = 32768, 16384  # all logits at once would take 2 GiB
LIMIT = 300 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("long")
    write_checkpoint(path, tiny_config("qwen3", vocab_size=VOCAB, max_position_embeddings=LENGTH + 8))
    with Server(path, "--tokens-only", "--max-num-seqs", "4") as running:
        running.generate(list(range(3, 2000)), max_tokens=2, prompt_logprobs=5, logprobs=5)
        yield running


def resident(process: psutil.Process, line: str) -> int:
    """Bytes in memory now (VmRSS) or at most (VmHWM)."""
    actual = dict(entry.split(":", 1) for entry in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return int(actual[line].split()[0]) << 10


def prompt_of(seed: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(seed).integers(3, VOCAB, LENGTH).tolist()
    return prompt


def ask(server: Server, top: int, form: str, salt: str) -> Any:
    params = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": top, "logprobs": top}
    body = {"token_ids": prompt_of(top), "sampling_params": params, "logprobs_format": form, "cache_salt": salt}
    answer = server.post("/inference/v1/generate", body)
    assert answer.status_code == 200, answer.text[:500]
    return answer.json()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("top", "form"), [(0, "objects"), (5, "objects"), (5, "base64")])
def test_logprobs_of_32k_tokens(server: Server, top: int, form: str) -> None:
    processes = [psutil.Process(server.process.pid), server.engine()]
    before = [resident(process, "VmRSS") for process in processes]
    for process in processes:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # resets the peak
    cold = ask(server, top, form, f"{form}{top}")
    extra = [resident(process, "VmHWM") - old for process, old in zip(processes, before, strict=True)]
    print(f"prompt_logprobs {top}, {form}: server +{extra[0] >> 20} MiB, engine +{extra[1] >> 20} MiB at most")
    assert sum(extra) < LIMIT
    again = {"token_ids": prompt_of(top), "sampling_params": {"max_tokens": 1}, "cache_salt": f"{form}{top}"}
    hit = server.post("/inference/v1/generate", again).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hit > LENGTH - 64, "the cache is not warm"
    warm = ask(server, top, form, f"{form}{top}")
    assert cold["prompt_logprobs"] == warm["prompt_logprobs"] and cold["choices"] == warm["choices"]
    if form == "objects":
        assert len(cold["prompt_logprobs"]) == LENGTH and cold["prompt_logprobs"][0] is None
