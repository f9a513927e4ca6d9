"""Fields of choices that columns and values write: declared, as their writers are, where the column is."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
from msgspec import UNSET

from tokserve.base.rooms import imported
from tokserve.client.outputs import ChoiceOutput
from tokserve.protocol.column_table import output_specs
from tokserve.protocol.columns import Column
from tokserve.server.replies.reply_parts import DeferredParts

Form = Literal["lists", "arrays", "base64", "packed"]  # the last: byte strings in msgpack


class FieldWriter(Protocol):
    """Writes one column or value into choices.

    `fields`: a Struct whose fields are those of a choice, all absent by default.  `of_tokens`: which of them are in
    every delta, in the order in which they are written.
    """

    fields: type[msgspec.Struct]
    of_tokens: tuple[str, ...]

    def tokens(self, column: Column | None, form: Form, parts: DeferredParts | None = None) -> dict[str, Any]:
        """The fields `of_tokens` of new tokens, None if there are none; with `parts`, large values are made later."""

    def end(self, c: ChoiceOutput, form: Form) -> dict[str, Any]:
        """The fields that come with a choice's last delta."""


@cache
def writers() -> dict[str, FieldWriter]:
    """The writers of columns and values, by name."""
    by_name: dict[str, FieldWriter] = {}
    for spec in output_specs():
        if spec.reply:
            by_name[spec.name] = imported(spec.reply)()
    return by_name


if TYPE_CHECKING:

    class ColumnFields(msgspec.Struct, kw_only=True):
        """The fields that all writers write, of a choice or of a delta of one."""

else:
    _fields = [field for writer in writers().values() for field in msgspec.structs.fields(writer.fields)]
    ColumnFields = msgspec.defstruct(
        "ColumnFields", [(field.name, field.type, UNSET) for field in _fields], kw_only=True, module=__name__
    )


def write_tokens(
    choice: ColumnFields, c: ChoiceOutput, names: tuple[str, ...], form: Form, parts: DeferredParts | None = None
) -> None:
    """Fill in what the columns of these names say of a delta's tokens."""
    for name in names:
        for field, value in writers()[name].tokens(c.columns.get(name), form, parts).items():
            setattr(choice, field, value)


def write_end(choice: ColumnFields, c: ChoiceOutput, names: tuple[str, ...], form: Form) -> None:
    """Fill in what the columns of these names, and the values of the last delta, say of the whole choice."""
    known = writers()
    for name in (*names, *(name for name in c.values if name in known)):
        for field, value in known[name].end(c, form).items():
            setattr(choice, field, value)
