"""The declaration of the value, and its field in replies."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from tokserve.base.rooms import Room
from tokserve.protocol.columns import Column, ColumnSpec, RecordForm, Task


class MarginFields(msgspec.Struct, kw_only=True):
    """The field of a choice, or of a delta of one."""

    margins: list[float] | UnsetType = UNSET


class MarginWriter:
    """Writes a number per token."""

    fields = MarginFields
    of_tokens = ("margins",)

    def tokens(self, column: Column | None, form: str, parts: Any = None) -> dict[str, Any]:
        return {"margins": np.frombuffer(b"" if column is None else column.records, "<f4").tolist()}

    def end(self, c: Any, form: str) -> dict[str, Any]:
        return {}


def _form_of(task: Task, vocab_size: int, mode: str) -> RecordForm | None:
    return RecordForm(4) if getattr(task, "return_margins", None) else None


SPECS = (
    ColumnSpec(
        "margins",
        _form_of,
        source="tests.client.margin.source:MarginSource",
        reply="tests.client.margin.room:MarginWriter",
    ),
)
ROOM = Room(columns="tests.client.margin.room:SPECS")
