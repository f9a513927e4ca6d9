"""The column of entropies: a float32 per token, in nats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tokserve.protocol.columns import NUMBER_BYTES, Column, ColumnSpec, RecordForm, Task
from tokserve.protocol.params import SamplingParams

if TYPE_CHECKING:
    from tokserve.client.outputs import ChoiceOutput

NAME = "entropies"
FORM = RecordForm(4)


def entropies(column: Column | None) -> list[float]:
    """The values of a packed column."""
    values: list[float] = np.frombuffer(b"" if column is None else column.records, "<f4").tolist()
    return values


def _form_of(task: Task, vocab_size: int, mode: str) -> RecordForm | None:
    return FORM if isinstance(task, SamplingParams) and task.return_entropy else None


def _result(output: ChoiceOutput) -> dict[str, Any]:
    if NAME not in output.columns:
        return {}
    return {NAME: np.frombuffer(output.columns[NAME].records, "<f4").copy()}


SPECS = (
    ColumnSpec(
        NAME,
        _form_of,
        result=_result,
        source="tokserve.features.entropy.source:EntropySource",
        reply="tokserve.features.entropy.reply:EntropyWriter",
        asked_by="return_entropy",
        token_bytes=lambda params, limits: NUMBER_BYTES,
    ),
)
