"""The table of output values: logprobs and the values that rooms declare."""

from __future__ import annotations

from functools import cache

from tokserve.base.rooms import contributions
from tokserve.protocol import logprobs
from tokserve.protocol.columns import ColumnSpec, RecordForm, Task, ValueSpec


@cache
def output_specs() -> tuple[ColumnSpec | ValueSpec, ...]:
    """All declarations, in the order of the fields in replies."""
    return (*logprobs.SPECS, *(spec for _, specs in contributions("columns") for spec in specs))


@cache
def column_specs() -> dict[str, ColumnSpec]:
    """The values per new token, by name."""
    return {spec.name: spec for spec in output_specs() if isinstance(spec, ColumnSpec)}


@cache
def value_specs() -> dict[str, ValueSpec]:
    """The values that a request has once, by name."""
    return {spec.name: spec for spec in output_specs() if isinstance(spec, ValueSpec)}


def asked_columns(task: Task, vocab_size: int = 0, mode: str = "raw") -> dict[str, RecordForm]:
    """The columns that a task asks for, with the form of their records."""
    forms = {name: spec.form_of(task, vocab_size, mode) for name, spec in column_specs().items()}
    return {name: form for name, form in forms.items() if form is not None}
