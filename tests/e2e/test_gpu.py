"""A real server on a real GPU: replies are equal alone and in a batch.  scripts/gpu_check.sh runs this."""

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


def test_replies_are_the_same_alone_and_in_a_batch() -> None:
    with Server("demo", "--device", "cuda", "--depth", "2") as server:

        def ask(number: int) -> Any:
            ids = [5 + (number * 7 + i) % 200 for i in range(3 + number * 9)]
            answer = server.generate(ids, max_tokens=40, temperature=number % 3 * 0.5, seed=number, logprobs=2)
            assert answer["exact"] is True
            return [answer["choices"][0][name] for name in ("token_ids", "logprobs")]

        alone = [ask(number) for number in range(12)]
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(ask, range(12))) == alone
