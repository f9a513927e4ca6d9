"""The column of sampling masks.

A record is the number of ids (int32), the logprob of the token among them, and the logprob of all of them in the
model's distribution at the temperature (float32); the items are the ids, ascending.  A negative number has no ids:
`WHOLE_VOCABULARY`, or `MASK_TOO_LONG` if more were kept than a mask may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokserve.protocol.columns import NUMBER_BYTES, Column, ColumnRows, ColumnSpec, RecordForm, ReplyLimits, Task
from tokserve.protocol.params import MASK_TOO_LONG, SamplingParams

if TYPE_CHECKING:
    from tokserve.client.outputs import ChoiceOutput

NAME = "sampling_masks"
FORM = RecordForm(12)
NO_MASKS = Column(stride=FORM.stride)


class Masks:
    """Sampling masks of n tokens in arrays: `counts` [n] of ids, `logprobs` and `kept_logprobs` [n], and the `ids` of
    all tokens one after the other."""

    def __init__(self, rows: ColumnRows) -> None:
        values = rows.records.view(np.float32)
        self.counts: NDArray[np.int32] = rows.records[:, 0]
        self.logprobs: NDArray[np.float32] = values[:, 1]
        self.kept_logprobs: NDArray[np.float32] = values[:, 2]
        self.ids: NDArray[np.int32] = np.zeros(0, np.int32) if rows.items is None else rows.items

    @classmethod
    def of(cls, column: Column) -> Masks:
        """The values of a packed column."""
        records = np.frombuffer(column.records, "<i4").reshape(-1, FORM.stride // 4)
        return cls(ColumnRows(records, np.frombuffer(column.items, "<i4")))

    def each(self) -> list[NDArray[np.int32] | None]:
        """The ids of each token; None: all, or too many."""
        ends = np.maximum(self.counts, 0).cumsum().tolist()
        pairs = zip(self.counts.tolist(), ends, strict=True)
        return [None if count < 0 else self.ids[end - count : end] for count, end in pairs]


def mask_rows(
    counts: NDArray[np.int32], ids: NDArray[np.int32], logprobs: NDArray[np.float32], kept_logprobs: NDArray[np.float32]
) -> ColumnRows:
    """The column's rows, of arrays as in `Masks`."""
    records = np.empty((len(counts), 3), np.int32)
    values = records.view(np.float32)
    records[:, 0], values[:, 1], values[:, 2] = counts, logprobs, kept_logprobs
    return ColumnRows(records, ids)


def _asked(task: Task, vocab_size: int, mode: str) -> RecordForm | None:
    return FORM if isinstance(task, SamplingParams) and task.return_sampling_mask else None


def _num_too_long(column: Column) -> int:
    return Masks.of(column).counts.tolist().count(MASK_TOO_LONG)


def _result(output: ChoiceOutput) -> dict[str, Any]:
    result: dict[str, Any] = {"sampling_mask_truncated": output.counts.get(NAME, 0)}
    if NAME in output.columns:
        masks = Masks.of(output.columns[NAME])
        result |= {"sampling_mask": masks.each(), "sampling_logprobs": masks.logprobs.copy()}
        result["kept_logprob"] = masks.kept_logprobs.copy()
    return result


def _token_bytes(params: SamplingParams, limits: ReplyLimits) -> int:
    """The logprobs of a mask and its ids, whose JSON is made while it is sent."""
    most = min(limits.max_items, limits.vocab_size)
    if params.temperature == 0.0:
        most = 1
    elif params.top_k > 0:
        most = min(most, params.top_k)
    return 2 * NUMBER_BYTES + 4 * most


SPECS = (
    ColumnSpec(
        NAME,
        _asked,
        count=_num_too_long,
        result=_result,
        source="tokserve.features.masks.source:MaskSource",
        reply="tokserve.features.masks.reply:MaskWriter",
        asked_by="return_sampling_mask",
        token_bytes=_token_bytes,
    ),
)
