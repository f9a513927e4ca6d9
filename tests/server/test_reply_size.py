"""Estimates of the size of replies: what rooms add is counted, and named if it is too much."""

from __future__ import annotations

from typing import Any

import pytest

from tokserve.base.errors import RequestError
from tokserve.protocol.columns import ReplyLimits
from tokserve.protocol.params import HiddenStateChoice, SamplingParams
from tokserve.server.replies.reply_size import OBJECT_BYTES, check_reply_size, reply_bytes

LIMITS = ReplyLimits(context=1000, vocab_size=5000, max_items=50, facts={})


def size_of(limits: ReplyLimits = LIMITS, *, stream: bool = False, **params: Any) -> int:
    task = SamplingParams(max_tokens=100, **params)
    return reply_bytes([20], task, limits, stream=stream, score_each=False, entry_bytes=OBJECT_BYTES)


@pytest.mark.parametrize(
    ("params", "bytes_of_token"),
    [
        ({"logprobs": 3}, 4 * OBJECT_BYTES),
        ({"return_entropy": True}, 24),
        ({"return_sampling_mask": True}, 2 * 24 + 50 * 4),
        ({"return_sampling_mask": True, "top_k": 7}, 2 * 24 + 7 * 4),
        ({"return_sampling_mask": True, "temperature": 0.0}, 2 * 24 + 4),
    ],
)
def test_values_of_each_token(params: dict[str, Any], bytes_of_token: int) -> None:
    assert size_of(**params) - size_of() == 100 * bytes_of_token
    assert size_of(**params, n=3) == 3 * size_of(**params)
    assert size_of(**params, stream=True) == 0


def test_values_of_a_choice_count_in_a_stream_too() -> None:
    experts = LIMITS._replace(facts={"routed_bytes": 6})
    assert size_of(experts) - size_of() == size_of(experts, stream=True) == 120 * 6 * 4 // 3
    states = LIMITS._replace(facts={"hidden_state_bytes": 300})
    chosen = HiddenStateChoice(positions=[0, 5], layers=[1, 2, 3])
    assert size_of(states, hidden_states=chosen) - size_of() == 6 * 300 * 4 // 3
    assert size_of(states, hidden_states=chosen, stream=True, n=2) == 2 * 6 * 300 * 4 // 3
    assert size_of(states, stream=True) == 0


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "n"),
        ({"return_entropy": True}, "return_entropy"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"hidden_states": HiddenStateChoice(positions=[0], layers=[1])}, "hidden_states"),
        ({"return_entropy": True, "logprobs": 3}, "logprobs"),
    ],
)
def test_the_error_names_what_makes_the_reply_large(params: dict[str, Any], field: str) -> None:
    check_reply_size(1 << 20, 1 << 20, SamplingParams(**params))
    with pytest.raises(RequestError, match="2 MiB, above the limit of 1") as caught:
        check_reply_size(2 << 20, 1 << 20, SamplingParams(**params))
    assert caught.value.field == field and caught.value.code == "reply_too_large"
