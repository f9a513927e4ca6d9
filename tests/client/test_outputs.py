"""Merging deltas gives what an unstreamed request returns."""

from __future__ import annotations

from tests.client.fake_engine import logprobs_for
from tokserve.client.outputs import ChoiceOutput, Column, join_columns, merge
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS


def scored(ids: list[int]) -> dict[str, Column]:
    return {LOGPROBS: logprobs_for(ids)}


def test_merge() -> None:
    end = {"finish_reason": "stop", "stop_reason": 5, "stop_detail": "stop_token", "times": (1.0, 2.0, 3.0)}
    deltas = [
        ChoiceOutput(1, [7], "x", scored([7]), cached_tokens=4, values={PROMPT_LOGPROBS: logprobs_for([1, 2])}),
        ChoiceOutput(0, [1, 2], "ab", scored([1, 2])),
        ChoiceOutput(0, [], "", weight_versions=[("v", 0, 2)], **end),  # type: ignore[arg-type]
        ChoiceOutput(1, [8], "y", scored([8]), finish_reason="length"),
    ]
    first, second = merge(deltas)
    assert first == ChoiceOutput(0, [1, 2], "ab", scored([1, 2]), weight_versions=[("v", 0, 2)], **end)  # type: ignore[arg-type]
    assert (second.index, second.token_ids, second.text, second.finish_reason) == (1, [7, 8], "xy", "length")
    assert second.logprobs == logprobs_for([7, 8]) and second.prompt_logprobs == logprobs_for([1, 2])
    assert second.cached_tokens == 4
    assert merge([]) == []


def test_join_columns() -> None:
    assert join_columns([]) == {}
    parts = [{LOGPROBS: logprobs_for([i], 3)} for i in range(4)]
    assert join_columns(parts) == {LOGPROBS: logprobs_for(range(4), 3)}
