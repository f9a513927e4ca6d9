"""Columns of a step, cut to the length of one request's records and packed."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from tests.outputs import unpack
from tokserve.engine.output.columns import ColumnBuffer, PromptRows, StepColumns, StepRows
from tokserve.protocol.columns import LOGPROBS, Column, ColumnRows, RecordForm
from tokserve.protocol.messages import Finish, StepStats
from tokserve.protocol.prompt import pack_ids


def records(count: int, numbers: int) -> np.ndarray:
    return np.random.default_rng(count).integers(1, 99, (count, numbers), np.int32)


def buffer(numbers: int, form: str = "raw") -> ColumnBuffer:
    return ColumnBuffer(LOGPROBS, RecordForm(4 * numbers, form))


@pytest.mark.parametrize("numbers", [2, 4, 8, 10])
def test_records_are_cut_to_their_length_and_packed_in_order(numbers: int) -> None:
    column = buffer(numbers, "temperature")
    one, two = records(4, 10), records(3, 12)
    column.append(StepRows(ColumnRows(one)), 1, 2)
    column.append(StepRows(ColumnRows(two)), 2)
    expected = np.concatenate([one[1:3, :numbers], two[2:, :numbers]])
    assert column.packed() == Column(expected.tobytes(), 4 * numbers, b"", "temperature")


def test_items_of_a_ragged_column_are_those_of_its_rows() -> None:
    column = ColumnBuffer("masks", RecordForm(8))
    step = StepRows(ColumnRows(np.array([[2, 7], [-1, 8], [0, 9], [3, 6]], np.int32), np.arange(5, dtype=np.int32)))
    column.append(step, 3)
    column.append(step, 0, 2)
    assert column.packed() == Column(pack_ids([3, 6, 2, 7, -1, 8]), 8, pack_ids([2, 3, 4, 0, 1]))


def test_moved_rows_are_gone() -> None:
    column, all_of_them, alone = buffer(4), buffer(4), buffer(4)
    one, two = StepRows(ColumnRows(records(2, 4))), StepRows(ColumnRows(records(3, 4)))
    column.append(one, 0, 2)
    column.move(all_of_them)
    assert column.packed().records == b""
    column.append(two, 0)
    column.append(two, 1)
    column.move(all_of_them)
    alone.append(one, 0, 2)
    alone.append(two, 0, 2)
    assert all_of_them.packed() == alone.packed()


def test_prompt_rows_that_are_known_are_not_taken_again() -> None:
    rows, scores = PromptRows(RecordForm(8, "raw"), 2, 6), records(6, 4)
    rows.add(0, scores[2:4])
    assert rows.take() is None and rows.next == 4, "not all of them"
    rows.add(0, scores[2:3])
    rows.add(2, scores[3:6])
    assert rows.take() == Column(scores[2:6, :2].tobytes(), 8, b"", "raw")


def test_a_step_of_single_tokens_has_no_counts() -> None:
    step = StepColumns()
    for token in (5, 6):
        step.add(f"r{token}", array("i", [token]))
    output = step.step(StepStats(running=2))
    assert (output.request_ids, output.token_ids, output.counts) == (["r5", "r6"], pack_ids([5, 6]), b"")
    assert output.stats.running == 2 and not output.columns and not output.rare


def test_rows_of_all_kinds_come_out_as_they_went_in() -> None:
    def scored(numbers: int, mode: str, count: int) -> ColumnBuffer:
        column = buffer(numbers, mode)
        column.append(StepRows(ColumnRows(records(6, 10))), 0, count)
        return column

    kinds = [(2, "raw", 2), (8, "raw", 1), (2, "raw", 1), (2, "processed", 1)]
    scores = scored(6, "raw", 5).packed()
    step = StepColumns()
    step.add("plain", array("i", [1]))
    for number, kind in enumerate(kinds):
        step.add(f"r{number}", array("i", range(kind[2])), (scored(*kind),))
    step.set_rare(Finish("stop", "eos"), 16, [("v", 0, 1)], {"prompt_logprobs": scores})
    step.add("refused", array("i"))
    step.set_rare(Finish("error", "error"))
    outputs = unpack(step.step(StepStats()))
    assert [output.rid for output in outputs] == ["plain", "r0", "r1", "r2", "r3", "refused"]
    assert [output.token_ids for output in outputs] == [[1], [0, 1], [0], [0], [0], []]
    assert [output.logprobs for output in outputs[1:5]] == [scored(*kind).packed() for kind in kinds]
    assert outputs[0].logprobs is outputs[5].logprobs is None
    last = outputs[4]
    assert (last.finish, last.cached, last.spans) == (Finish("stop", "eos"), 16, [("v", 0, 1)])
    assert last.prompt_logprobs == scores
    assert outputs[5].finish == Finish("error", "error")
