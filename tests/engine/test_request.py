"""One request: its limits, the order of its stops, its outputs, and reuse of its prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.solo import engine_request, rows_of
from tests.outputs import Output, unpack
from tokserve.base.errors import RequestError
from tokserve.engine.output.columns import StepColumns, StepRows
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.request import Request
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS, ColumnRows
from tokserve.protocol.logprobs import Logprobs, width_of
from tokserve.protocol.messages import Finish, StepStats
from tokserve.protocol.params import PoolingParams, RepetitionDetection, SamplingParams

LIMITS = Limits(32, 50, (1, 2), "raw")


def make(
    prompt: list[int] | bytes = b"",
    *,
    stream: bool = True,
    limits: Limits = LIMITS,
    task: PoolingParams | None = None,
    **params: Any,
) -> Request:
    spec = engine_request("r", prompt or [10, 11, 12, 13, 14, 15], task or SamplingParams(**params), 7, stream=stream)
    return Request(spec, owner=b"A", number=3, received=100.0, limits=limits)


def emitted(request: Request) -> Output:
    step = StepColumns()
    request.emit(step)
    [output] = unpack(step.step(StepStats()))
    return output


def step_of(records: Any) -> dict[str, StepRows]:
    """The columns of a step with these records of logprobs."""
    return {LOGPROBS: StepRows(ColumnRows(records))}


def feed(request: Request, *tokens: int) -> Finish | None:
    for token in tokens:
        assert request.finish is None
        request.on_computed("v")
        request.append([token], {}, 0, 101.0)
    return request.finish


def ended(request: Request, *tokens: int) -> tuple[str, str, object]:
    finish = feed(request, *tokens)
    assert finish is not None
    return finish.reason, finish.detail, finish.stop


def test_eos_ends_and_is_kept() -> None:
    request = make(max_tokens=5)
    assert ended(request, 20, 2) == ("stop", "eos", None)
    assert emitted(request).token_ids == [20, 2]


def test_ignored_eos_is_a_token_like_others() -> None:
    assert ended(make(max_tokens=3, ignore_eos=True), 1, 2, 1) == ("length", "max_tokens", None)


def test_stop_tokens_and_sequences_are_reported() -> None:
    assert ended(make(stop_token_ids=[30, 31]), 20, 31) == ("stop", "stop_token", 31)
    sequences = [[4, 5], [20, 4]]
    assert ended(make(stop_token_sequences=sequences), 5, 20, 4) == ("stop", "stop_sequence", [20, 4])


def test_stop_sequences_look_at_output_only() -> None:
    request = make([10, 11], stop_token_sequences=[[11, 20]], max_tokens=9)
    assert feed(request, 20) is None
    assert ended(request, 11, 20) == ("stop", "stop_sequence", [11, 20])


def test_order_of_stops() -> None:
    """Each condition wins over all after it."""
    circles = RepetitionDetection(max_pattern_size=1, min_count=2)
    conditions: dict[str, Any] = {"stop_token_ids": [2], "stop_token_sequences": [[2]], "max_tokens": 2}
    limits = Limits(8, 50, (2,), "raw")
    details = []
    for removed in ["", "eos", "stop_token_ids", "stop_token_sequences", "max_tokens", "context"]:
        conditions.pop(removed, None)
        conditions["ignore_eos"] = removed != ""
        request = make(
            limits=LIMITS if removed == "context" else limits, repetition_detection=circles, min_tokens=2, **conditions
        )
        details.append(ended(request, 2, 2)[1])
    assert details == ["eos", "stop_token", "stop_sequence", "max_tokens", "context", "repetition"]


def test_an_eos_that_is_asked_for_as_stop_token_stops_even_if_eos_is_ignored() -> None:
    assert ended(make(ignore_eos=True, stop_token_ids=[2]), 2) == ("stop", "stop_token", 2)


def test_below_min_tokens_no_sequence_stops() -> None:
    request = make(min_tokens=3, stop_token_sequences=[[20]])
    assert feed(request, 20, 20) is None
    assert ended(request, 20)[1] == "stop_sequence"


@pytest.mark.parametrize(
    ("limits", "output", "pattern"),
    [
        ((1, 0, 3), [5, 6, 6, 6], [6]),
        ((3, 0, 2), [5, 6, 7, 6, 7], [6, 7]),
        ((3, 3, 2), [6, 7, 6, 7, 6, 7, 8, 6, 7, 8], [6, 7, 8]),
        ((4, 2, 2), [7, 7, 7, 7], [7, 7]),
        ((2, 0, 2), [15, 15], [15]),
    ],
)
def test_an_output_that_repeats_ends(limits: tuple[int, int, int], output: list[int], pattern: list[int]) -> None:
    """The prompt ends in 15: what it holds is no part of the output's pattern."""
    circles = RepetitionDetection(max_pattern_size=limits[0], min_pattern_size=limits[1], min_count=limits[2])
    assert ended(make(repetition_detection=circles), *output) == ("repetition", "repetition", pattern)


def test_repetition_ends_at_the_first_token_that_completes_the_pattern() -> None:
    """Counting a token at a time finds what comparing the tail's patterns finds, for many outputs."""
    generator = np.random.default_rng(5)
    for _ in range(200):
        output = generator.integers(20, 23, 24).tolist()
        last, times = int(generator.integers(1, 6)), int(generator.integers(2, 4))
        first = int(generator.integers(0, last + 1))
        expected = next(
            (
                (count, size)
                for count in range(1, 25)
                for size in range(max(first, 1), last + 1)
                if size * times <= count
                and output[count - size * times : count] == output[count - size : count] * times
            ),
            None,
        )
        circles = RepetitionDetection(max_pattern_size=last, min_pattern_size=first, min_count=times)
        request = make(repetition_detection=circles)
        while request.finish is None and request.num_output < 24:
            request.append([output[request.num_output]], {}, 0, 101.0)
        actual = None if request.finish is None else (request.num_output, len(request.finish.stop))  # type: ignore[arg-type]
        assert actual == expected


def test_below_min_tokens_repetition_does_not_end() -> None:
    request = make(min_tokens=3, repetition_detection=RepetitionDetection(max_pattern_size=2, min_count=2))
    assert feed(request, 20, 20) is None
    assert ended(request, 20) == ("repetition", "repetition", [20])


def test_repetition_detection_with_its_defaults_is_off() -> None:
    assert feed(make(repetition_detection=RepetitionDetection(), max_tokens=20), *[20] * 19) is None


def test_stop_ids_for_the_sampler() -> None:
    assert make(stop_token_ids=[9, 2]).stop_ids == (1, 2, 9)
    assert make(stop_token_ids=[9, 2], ignore_eos=True).stop_ids == (1, 2, 9)  # min_tokens keeps it from being drawn


def test_limit_is_max_tokens_or_the_context() -> None:
    assert make(max_tokens=5).limit == 11
    assert make(max_tokens=500).limit == make().limit == 32


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(b"abc", "int32"), ([10, 50], "50"), ([10, -1], "-1"), ([10] * 32, "32 tokens")],
)
def test_impossible_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(prompt)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one"):
        Request(engine_request("r", b""), owner=b"A", number=0, received=0.0, limits=LIMITS)


def test_the_longest_prompt_is_served() -> None:
    assert ended(make([10] * 31, max_tokens=4), 9) == ("length", "context", None)


def test_output_is_reported_once() -> None:
    request = make(max_tokens=3, ignore_eos=True)
    feed(request, 20)
    assert emitted(request).token_ids == [20]
    feed(request, 21, 22)
    last = emitted(request)
    assert last.token_ids == [21, 22]
    assert last.finish is not None and last.spans == [("v", 0, 3)]


def test_held_output_comes_at_the_end() -> None:
    request = make(max_tokens=2, ignore_eos=True, stream=False)
    feed(request, 20)
    feed(request, 21)
    assert emitted(request).token_ids == [20, 21]


def test_spans_follow_the_weight_version() -> None:
    request = make(max_tokens=5, ignore_eos=True)
    for version in ["v1", "v1", "v2", "v3", "v3"]:
        request.on_computed(version)
        request.append([20], {}, 0, 101.0)
    assert emitted(request).spans == [("v1", 0, 2), ("v2", 2, 3), ("v3", 3, 5)]


def test_times_are_seconds_since_receipt() -> None:
    request = make(max_tokens=2, ignore_eos=True)
    request.history.admitted = 100.5
    request.append([20], {}, 0, 102.0)
    request.append([20], {}, 0, 104.0)
    assert request.finish is not None
    assert (request.finish.queued, request.finish.first_token, request.finish.total) == (0.5, 2.0, 4.0)
    never = make()
    never.end("abort", "abort_user", 101.0)
    assert never.finish is not None
    assert (never.finish.queued, never.finish.first_token, never.finish.total) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("params", "width"),
    [
        ({}, None),
        ({"logprobs": 0}, 0),
        ({"logprobs": 3}, 3),
        ({"logprobs": -1}, 50),
        ({"logprob_token_ids": [4, 5]}, 2),
        ({"logprobs": 2, "logprob_token_ids": [4]}, 3),
    ],
)
def test_width_of_logprobs(params: dict[str, Any], width: int | None) -> None:
    request = make(max_tokens=1, **params)
    wide = rows_of([(0.0, 1, [0] * 60, [0.0] * 60)] * 2, 60)
    request.append([20], step_of(wide), 1, 101.0)
    logprobs = emitted(request).logprobs
    if width is None:
        assert logprobs is None
    else:
        assert logprobs is not None
        assert (width_of(logprobs), logprobs.num_rows) == (width, 1)


@pytest.mark.parametrize(("requested", "mode"), [(None, "raw"), ("processed", "processed")])
def test_mode_of_logprobs_is_the_requests_or_the_models(requested: Any, mode: str) -> None:
    request = make(max_tokens=1, logprobs=0, prompt_logprobs=1, logprobs_mode=requested)
    request.output.collect(PROMPT_LOGPROBS, 0, 0, rows_of([(0.0, 1, [0], [0.0])] * (request.prompt_len - 1), 1))
    request.append([20], step_of(rows_of([(0.0, 1, [], [])], 0)), 0, 101.0)
    output = emitted(request)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert output.logprobs.form == output.prompt_logprobs.form == mode


@pytest.mark.parametrize(
    ("length", "params", "reusable", "blocks"),
    [
        (8, {}, 7, 2),  # the whole prompt is found; its last token is computed again
        (9, {}, 8, 2),
        (7, {}, 6, 1),
        (1, {}, 0, 0),
        (8, {"prompt_logprobs": 1}, 0, 0),
        (8, {"prompt_logprobs": 1, "prompt_logprobs_start": 1}, 0, 0),
        (8, {"prompt_logprobs": 1, "prompt_logprobs_start": 5}, 4, 1),
        (8, {"prompt_logprobs": 1, "prompt_logprobs_start": 7}, 6, 1),
        (8, {"prompt_logprobs": 1, "prompt_logprobs_start": 8}, 7, 2),
        (8, {"prompt_logprobs": 1, "prompt_logprobs_start": 99}, 7, 2),
    ],
)
def test_what_may_come_from_the_cache(length: int, params: dict[str, Any], reusable: int, blocks: int) -> None:
    request = make([10] * length, **params)
    assert request.reusable == reusable
    assert request.reusable_blocks(4) == blocks


def test_prompt_rows_are_gathered_and_those_seen_before_are_dropped() -> None:
    request = make([10] * 8, prompt_logprobs=1, prompt_logprobs_start=2, max_tokens=1)

    def rows(first: int, last: int) -> Any:
        return rows_of([(-float(j), j, [j], [-float(j)]) for j in range(first, last)], 1, padding=1)

    request.output.collect(PROMPT_LOGPROBS, 0, 0, rows(2, 5))  # positions 0..3
    assert request.reusable == 4
    request.output.collect(PROMPT_LOGPROBS, 0, 0, rows(2, 4))  # after a preemption
    request.output.collect(PROMPT_LOGPROBS, 3, 0, rows(4, 7))
    request.output.collect(PROMPT_LOGPROBS, 6, 0, rows(7, 8))
    assert request.reusable == 7
    feed(request, 20)
    columns = emitted(request).prompt_logprobs
    assert columns is not None
    scores = Logprobs.of(columns)
    assert scores.ranks.tolist() == scores.top_ids[:, 0].tolist() == [2, 3, 4, 5, 6, 7]


def test_prompt_logprobs_without_rows_are_empty_not_absent() -> None:
    request = make([10], prompt_logprobs=2, max_tokens=1)
    feed(request, 20)
    columns = emitted(request).prompt_logprobs
    assert columns is not None and columns.num_rows == 0 and width_of(columns) == 2


def test_new_row_has_all_tokens() -> None:
    request = make([10, 11], max_tokens=9)
    feed(request, 20, 21)
    request.slot = 5
    row = request.new_row({})
    assert row.tokens.tolist() == [10, 11, 20, 21] and row.tokens.dtype == np.int32
    assert (row.slot, row.request_id, row.prompt_len, row.seed, row.stop_ids, row.adapter) == (5, "r", 2, 7, (1, 2), -1)
    request.append([22], {}, 0, 1.0)
    assert len(row.tokens) == 4


def test_a_run_of_tokens_is_cut_at_its_stop() -> None:
    request = make(max_tokens=9, stop_token_ids=[30], logprobs=0)
    rows = step_of(rows_of([(-float(i), i, [], []) for i in range(6)], 0))
    assert request.append([20, 21], rows, 1, 101.0) == 2 and request.finish is None
    assert request.append([22, 30, 23], rows, 3, 102.0) == 2
    output = emitted(request)
    assert output.token_ids == [20, 21, 22, 30] and output.finish is not None and output.finish.stop == 30
    assert output.logprobs is not None and Logprobs.of(output.logprobs).ranks.tolist() == [1, 2, 3, 4]


def test_a_run_of_tokens_is_cut_at_max_tokens() -> None:
    request = make(max_tokens=2, ignore_eos=True)
    assert request.append([20, 21, 22], {}, 0, 101.0) == 2
    assert request.finish is not None and request.finish.detail == "max_tokens" and request.num_output == 2


@pytest.mark.parametrize(("pooling", "reusable"), [("last", 7), ("mean", 0)])
def test_what_pooling_may_take_from_the_cache(pooling: Any, reusable: int) -> None:
    assert make([10] * 8, task=PoolingParams(pooling)).reusable == reusable
