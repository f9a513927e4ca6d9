"""Logprobs as a column: their records, and arrays of them.

A record is 1 + width pairs of int32 and float32: the rank (1 = most probable) and the logprob of the token itself, then
the id and the logprob of each alternative: the most probable tokens in descending order, then the ids asked for by
name.  A record of fewer alternatives is the beginning of one of more.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokserve.protocol.candidates import candidate_rows
from tokserve.protocol.columns import (
    LOGPROBS,
    PROMPT_LOGPROBS,
    Column,
    ColumnSpec,
    Int32,
    RecordForm,
    Task,
    ValueSpec,
)
from tokserve.protocol.params import SamplingParams

Float32 = NDArray[np.float32]
PAIR = 8  # bytes


def stride_of(width: int) -> int:
    """Bytes of a record with `width` alternatives."""
    return PAIR * (1 + width)


def width_of(column: Column) -> int:
    """The alternatives per token."""
    return column.stride // PAIR - 1


def logprob_records(token_logprobs: Float32, ranks: Int32, top_ids: Int32, top_logprobs: Float32) -> Int32:
    """Records [n, 2 + 2 * width] of n tokens: their logprobs and ranks [n], and their alternatives [n, width]."""
    n, width = top_ids.shape
    records = np.empty((n, 1 + width, 2), np.int32)
    values = records.view(np.float32)
    records[:, 0, 0], values[:, 0, 1] = ranks, token_logprobs
    if width:
        records[:, 1:, 0], values[:, 1:, 1] = top_ids, top_logprobs
    return records.reshape(n, 2 + 2 * width)


class Logprobs:
    """Logprobs of n tokens in arrays, views of the records: `token_logprobs` and `ranks` [n], `top_ids` and
    `top_logprobs` [n, width]."""

    def __init__(self, records: Int32, mode: str = "raw") -> None:
        pairs = records.reshape(len(records), records.shape[1] // 2, 2)
        values = pairs.view(np.float32)
        self.token_logprobs: Float32 = values[:, 0, 1]
        self.ranks: Int32 = pairs[:, 0, 0]
        self.top_ids: Int32 = pairs[:, 1:, 0]
        self.top_logprobs: Float32 = values[:, 1:, 1]
        self.mode = mode

    @classmethod
    def of(cls, column: Column) -> Logprobs:
        """The values of a packed column."""
        return cls(np.frombuffer(column.records, "<i4").reshape(-1, column.stride // 4), column.form)

    @property
    def width(self) -> int:
        """The alternatives per token."""
        return self.top_ids.shape[1]

    def column(self, width: int | None = None) -> Column:
        """The packed column, with the first `width` alternatives, by default all."""
        width = self.width if width is None else width
        records = logprob_records(
            self.token_logprobs, self.ranks, self.top_ids[:, :width], self.top_logprobs[:, :width]
        )
        return Column(records.tobytes(), stride_of(width), b"", self.mode)


def logprob_column(
    token_logprobs: Float32, ranks: Int32, top_ids: Int32, top_logprobs: Float32, mode: str = "raw"
) -> Column:
    """The packed column of logprobs in arrays, as in `logprob_records`."""
    records = logprob_records(token_logprobs, ranks, top_ids, top_logprobs)
    return Column(records.tobytes(), 4 * records.shape[1], b"", mode)


def _width(top: int, vocab_size: int) -> int:
    return vocab_size if top < 0 else top


def prompt_width(task: SamplingParams, vocab_size: int) -> int:
    """The alternatives of a prompt token: the most probable ids, or the candidates and, as id -1, all other ids."""
    if task.prompt_logprob_token_ids is not None:
        return candidate_rows(task.prompt_logprob_token_ids).shape[-1] + 1
    return _width(task.prompt_logprobs or 0, vocab_size)


def asked_logprobs(task: Task, vocab_size: int, mode: str) -> RecordForm | None:
    """The records of new tokens that a task asks for; `mode`: the model's."""
    if not isinstance(task, SamplingParams):
        return None
    named = len(task.logprob_token_ids or ())
    if task.logprobs is None and not named:
        return None
    return RecordForm(stride_of(_width(task.logprobs or 0, vocab_size) + named), task.logprobs_mode or mode)


def asked_prompt_logprobs(task: Task, vocab_size: int, mode: str) -> RecordForm | None:
    """The records of prompt tokens that a task asks for; `mode`: the model's."""
    if not isinstance(task, SamplingParams) or task.prompt_logprobs is None:
        return None
    form = task.prompt_logprobs_mode or task.logprobs_mode or mode
    return RecordForm(stride_of(prompt_width(task, vocab_size)), form)


def _read_column(value: Any, num_tokens: int) -> Column:
    return msgspec.convert(value, Column)


SPECS = (ColumnSpec(LOGPROBS, asked_logprobs), ValueSpec(PROMPT_LOGPROBS, read=_read_column))
