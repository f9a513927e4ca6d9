"""Entropies in the forms of the routes: a list of numbers, or little-endian float32."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.features.entropy.columns import NAME, entropies
from tokserve.server.replies.fields import Form
from tokserve.server.replies.reply_parts import DeferredParts


class EntropyFields(msgspec.Struct, kw_only=True):
    """The field of a choice whose request has `return_entropy`: a number per token."""

    entropies: list[float] | bytes | UnsetType = UNSET


class EntropyWriter:
    """Writes the entropies of tokens."""

    fields = EntropyFields
    of_tokens = (NAME,)

    def tokens(self, column: Column | None, form: Form, parts: DeferredParts | None = None) -> dict[str, Any]:
        if form in ("base64", "packed"):
            return {NAME: b"" if column is None else column.records}
        return {NAME: entropies(column)}

    def end(self, c: ChoiceOutput, form: Form) -> dict[str, Any]:
        return {}
