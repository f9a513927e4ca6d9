"""Columns of logprobs: ranks, ties, names, and what JSON can say."""

from typing import Any

import numpy as np

from tokserve.client.outputs import Column
from tokserve.protocol.logprobs import logprob_column
from tokserve.server.replies import logprobs


def columns(token_logprobs: list[float], ranks: list[int], ids: list[list[int]], values: list[list[float]]) -> Column:
    def array(rows: object, kind: str) -> Any:
        return np.asarray(rows, dtype=kind)

    return logprob_column(array(token_logprobs, "<f4"), array(ranks, "<i4"), array(ids, "<i4"), array(values, "<f4"))


def tops(written: logprobs.LogprobObjects) -> list[tuple[int, float, int | None]]:
    return [(top.token_id, top.logprob, top.rank) for top in written.content[0].top_logprobs]


def test_equal_logprobs_share_a_rank() -> None:
    row = columns([-3.0], [4], [[10, 11, 12]], [[-1.0, -1.0, -2.0]])
    assert tops(logprobs.objects(row, [9], 3)) == [(9, -3.0, 4), (10, -1.0, 1), (11, -1.0, 1), (12, -2.0, 3)]


def test_the_token_itself_is_not_repeated_and_keeps_its_place_in_the_ranks() -> None:
    row = columns([-1.0], [2], [[10, 9, 12]], [[-0.5, -1.0, -2.0]])
    assert tops(logprobs.objects(row, [9], 3)) == [(9, -1.0, 2), (10, -0.5, 1), (12, -2.0, 3)]


def test_named_ids_follow_without_a_rank_and_without_repetition() -> None:
    row = columns([-1.0], [1], [[9, 10, 10, 9, 77]], [[-1.0, -2.0, -2.0, -1.0, -np.inf]])
    assert tops(logprobs.objects(row, [9], 2)) == [(9, -1.0, 1), (10, -2.0, 2), (77, -9999.0, None)]


def test_numbers_are_the_float32_values_exactly() -> None:
    value = float(np.float32(-0.1))
    written = logprobs.objects(columns([value], [1], [[9]], [[value]]), [9], 1)
    assert written.content[0].logprob == value != -0.1
    assert logprobs.arrays(columns([value], [1], [[9]], [[value]])).top_logprobs == [[value]]


def test_packed_columns_are_untouched() -> None:
    row = columns([-np.inf], [1], [[9]], [[-np.inf]])
    assert logprobs.packed(row).token_logprobs == np.float32(-np.inf).tobytes()
    assert logprobs.arrays(row).token_logprobs == [-9999.0]
