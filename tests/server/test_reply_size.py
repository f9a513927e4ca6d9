"""Estimates of the size of replies: what rooms add is counted, and named if it is too much."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tokserve.base.errors import RequestError
from tokserve.protocol.columns import ReplyLimits
from tokserve.protocol.params import HiddenStateChoice, SamplingParams
from tokserve.server.replies.reply_size import OBJECT_BYTES, check_reply_size, reply_sizes

LIMITS = ReplyLimits(context=1000, vocab_size=5000, max_items=50, facts={})


def size_of(limits: ReplyLimits = LIMITS, *, stream: bool = False, **params: Any) -> int:
    task = SamplingParams(max_tokens=100, **params)
    return sizes_of(task, limits, stream=stream).total()


def sizes_of(task: SamplingParams, limits: ReplyLimits, *, stream: bool = False) -> Counter[str]:
    return reply_sizes([20], task, limits, stream=stream, score_each=False, entry_bytes=OBJECT_BYTES)


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


STATES = HiddenStateChoice(positions=list(range(100)), layers=[1])


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "n"),
        ({"return_entropy": True}, "return_entropy"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"hidden_states": STATES}, "hidden_states"),
        ({"hidden_states": STATES, "logprobs": 0}, "hidden_states"),
        ({"return_entropy": True, "logprobs": 3}, "logprobs"),
        ({"logprob_token_ids": [4, 5]}, "logprob_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": -1, "logprobs": 3}, "logprobs"),
    ],
)
def test_the_error_names_what_takes_most(params: dict[str, Any], field: str) -> None:
    limits = LIMITS._replace(facts={"hidden_state_bytes": 8192})
    sizes = sizes_of(SamplingParams(max_tokens=100, **params), limits)
    check_reply_size(sizes, sizes.total())
    with pytest.raises(RequestError, match="--max-reply-bytes") as caught:
        check_reply_size(sizes, sizes.total() - 1)
    assert caught.value.field == field and caught.value.code == "reply_too_large"
