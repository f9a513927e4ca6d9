"""Logprob rows of a step, cut to one request's width and packed."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from tests.outputs import unpack
from tokserve.engine.output.columns import LogprobColumns, PackedRows, StepColumns
from tokserve.protocol.messages import Finish, StepStats
from tokserve.protocol.plan import LogprobRows
from tokserve.protocol.prompt import pack_ids


def rows(count: int, width: int) -> LogprobRows:
    rng = np.random.default_rng(count)
    return LogprobRows(
        rng.random(count, np.float32),
        rng.integers(1, 99, count, np.int32),
        rng.integers(0, 99, (count, width), np.int32),
        rng.random((count, width), np.float32),
    )


@pytest.mark.parametrize("width", [0, 1, 3, 5])
def test_rows_are_cut_to_the_width_and_packed_in_order(width: int) -> None:
    columns = LogprobColumns(width, "temperature")
    one, two = rows(4, 5), rows(3, 6)
    columns.add(one, 1, 3)
    columns.add(two, 2, 3)
    packed = columns.packed()
    assert (packed.width, packed.mode) == (width, "temperature")
    token_logprobs = np.concatenate([one.token_logprobs[1:3], two.token_logprobs[2:]])
    assert np.array_equal(np.frombuffer(packed.token_logprobs, "<f4"), token_logprobs)
    assert np.array_equal(np.frombuffer(packed.ranks, "<i4"), np.concatenate([one.ranks[1:3], two.ranks[2:]]))
    ids = np.concatenate([one.top_ids[1:3, :width], two.top_ids[2:, :width]])
    assert np.array_equal(np.frombuffer(packed.top_ids, "<i4").reshape(3, width), ids)
    values = np.concatenate([one.top_logprobs[1:3, :width], two.top_logprobs[2:, :width]])
    assert np.array_equal(np.frombuffer(packed.top_logprobs, "<f4").reshape(3, width), values)


@pytest.mark.parametrize("width", [0, 2])
def test_a_single_row_is_the_same_from_packed_rows(width: int) -> None:
    step = rows(5, 3)
    one, other = LogprobColumns(width, "raw"), LogprobColumns(width, "raw")
    for row in (3, 0):
        one.add(step, row, row + 1)
        other.append(PackedRows(step), row)
    assert one.packed() == other.packed() and len(one.packed().ranks) == 8


def test_moved_rows_are_gone() -> None:
    columns, all_of_them = LogprobColumns(1, "raw"), LogprobColumns(1, "raw")
    columns.add(rows(2, 1), 0, 2)
    columns.move(all_of_them)
    assert columns.packed().ranks == b""
    columns.add(rows(3, 1), 0, 1)
    columns.move(all_of_them)
    alone = LogprobColumns(1, "raw")
    alone.add(rows(2, 1), 0, 2)
    alone.add(rows(3, 1), 0, 1)
    assert all_of_them.packed() == alone.packed()


def test_a_step_of_single_tokens_has_no_counts() -> None:
    step = StepColumns()
    for token in (5, 6):
        step.add(f"r{token}", array("i", [token]))
    output = step.step(StepStats(running=2))
    assert (output.request_ids, output.token_ids, output.counts) == (["r5", "r6"], pack_ids([5, 6]), b"")
    assert output.stats.running == 2 and not output.logprobs and not output.rare


def test_rows_of_all_kinds_come_out_as_they_went_in() -> None:
    def scored(width: int, mode: str, count: int) -> LogprobColumns:
        columns = LogprobColumns(width, mode)
        columns.add(rows(6, 4), 0, count)
        return columns

    kinds = [(0, "raw", 2), (3, "raw", 1), (0, "raw", 1), (0, "processed", 1)]
    step = StepColumns()
    step.add("plain", array("i", [1]))
    for number, kind in enumerate(kinds):
        step.add(f"r{number}", array("i", range(kind[2])), scored(*kind))
    step.set_rare(Finish("stop", "eos"), scored(2, "raw", 5), 16, [("v", 0, 1)])
    step.add("refused", array("i"))
    step.set_rare(Finish("error", "error"))
    outputs = unpack(step.step(StepStats()))
    assert [output.rid for output in outputs] == ["plain", "r0", "r1", "r2", "r3", "refused"]
    assert [output.token_ids for output in outputs] == [[1], [0, 1], [0], [0], [0], []]
    assert [output.logprobs for output in outputs[1:5]] == [scored(*kind).packed() for kind in kinds]
    assert outputs[0].logprobs is outputs[5].logprobs is None
    last = outputs[4]
    assert (last.finish, last.cached, last.spans) == (Finish("stop", "eos"), 16, [("v", 0, 1)])
    assert last.prompt_logprobs == scored(2, "raw", 5).packed()
    assert outputs[5].finish == Finish("error", "error")
