"""Logprob rows of a step, cut to one request's width and packed."""

from __future__ import annotations

import numpy as np
import pytest

from tokserve.engine.columns import LogprobColumns
from tokserve.plan import LogprobRows


def rows(count: int, width: int) -> LogprobRows:
    rng = np.random.default_rng(count)
    return LogprobRows(
        rng.random(count, np.float32), rng.integers(1, 99, count, np.int32),
        rng.integers(0, 99, (count, width), np.int32), rng.random((count, width), np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("width", [0, 1, 3, 5])
def test_rows_are_cut_to_the_width_and_packed_in_order(width: int) -> None:
    columns = LogprobColumns(width, "temperature")
    one, two = rows(4, 5), rows(3, 6)
    columns.add(one, 1, 3)
    columns.add(two, 2, 3)
    packed = columns.take()
    assert (packed.width, packed.mode) == (width, "temperature")
    token_logprobs = np.concatenate([one.token_logprobs[1:3], two.token_logprobs[2:]])
    assert np.array_equal(np.frombuffer(packed.token_logprobs, "<f4"), token_logprobs)
    assert np.array_equal(np.frombuffer(packed.ranks, "<i4"), np.concatenate([one.ranks[1:3], two.ranks[2:]]))
    ids = np.concatenate([one.top_ids[1:3, :width], two.top_ids[2:, :width]])
    assert np.array_equal(np.frombuffer(packed.top_ids, "<i4").reshape(3, width), ids)
    values = np.concatenate([one.top_logprobs[1:3, :width], two.top_logprobs[2:, :width]])
    assert np.array_equal(np.frombuffer(packed.top_logprobs, "<f4").reshape(3, width), values)


def test_taken_rows_are_gone() -> None:
    columns = LogprobColumns(1, "raw")
    columns.add(rows(2, 1), 0, 2)
    first = columns.take()
    columns.add(rows(3, 1), 0, 1)
    second = columns.take()
    assert len(first.ranks) == 8 and len(second.ranks) == 4
    assert first.join(second).cut(2) == first
    assert columns.take().ranks == b""
