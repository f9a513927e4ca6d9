"""The requests of chaos and soak: a pool of different ones, each with one right answer, and bodies that have none."""

from __future__ import annotations

import random
from typing import Any

POOL = 120  # different requests
BAD: tuple[Any, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"token_ids": []}',
    b'{"token_ids": [1, -5]}',
    b'{"token_ids": "x"}',
    b"\xff\xfe",
    b'{"token_ids": [5], "sampling_params": {"temperature": -1}}',
    b'{"token_ids": [5], "nonsense": 1}',
    b'{"token_ids": [999999999]}',
    b"[" * 5000,
    b" " * ((1 << 20) + 1),
)
Answer = tuple[list[int], list[float]]


def request(i: int) -> dict[str, Any]:
    """The i-th request of the pool."""
    rng = random.Random(i)
    prompt = [rng.randrange(3, 250) for _ in range(rng.choice([1, 9, 40, 130, 400]))]
    if i % 3 == 0:
        prompt = list(range(5, 70)) + prompt
    params = {
        "max_tokens": rng.randrange(1, 120),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "seed": i,
        "logprobs": 0,
        "ignore_eos": rng.random() < 0.7,
    }
    return {"token_ids": prompt, "sampling_params": params, "logprobs_format": "arrays"}


class Fault(AssertionError):
    """A request ended in no way that is defined, or with other tokens."""


def tokens(choices: list[Any]) -> Answer:
    """Ids and logprobs, joined."""
    logprobs = [
        value for choice in choices for value in (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    return [token for choice in choices for token in choice["token_ids"]], logprobs
