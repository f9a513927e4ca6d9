"""Ranks that exchange through a GPU's memory, recorded: two processes on one GPU (scripts/gpu_check.sh --only ranks).

Each sees the GPU as its only one, and maps the other's memory by CUDA IPC, as it would that of another GPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import needs
from tests.e2e.server import Server

pytestmark = [
    pytest.mark.gpu,
    needs.GPU.skips(),
]
OPTIONS = ("demo", "--device", "cuda", "--kv-cache-memory-bytes", str(1 << 28), "--max-num-seqs", "16")


def replies(*options: str) -> list[Any]:
    """Tokens and logprobs of requests one by one, which are those of all together."""
    with Server(*OPTIONS, *options, env={"CUDA_VISIBLE_DEVICES": "0,0"}) as server:

        def ask(number: int) -> Any:
            ids = [5 + (number * 7 + i) % 200 for i in range(3 + number * 19)]
            answer = server.generate(ids, max_tokens=12, temperature=number % 2 * 0.5, seed=number, logprobs=2)
            assert answer["exact"] is True
            return [answer["choices"][0][name] for name in ("token_ids", "logprobs")]

        alone = [ask(number) for number in range(6)]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(6))) == alone
        assert not any("use NCCL" in line for line in server.log)
    return alone


def test_recorded_steps_of_two_ranks_have_the_bits_of_steps_that_are_not() -> None:
    assert replies("-tp", "2") == replies("-tp", "2", "--enforce-eager")


def test_two_stages_have_the_bits_of_one() -> None:
    assert replies("-pp", "2") == replies()
