"""Routed experts in replies: an npy file with a choice's last delta."""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.families.mixtures.columns import NAME
from tokserve.server.replies.fields import Form
from tokserve.server.replies.reply_parts import DeferredParts


class RoutedFields(msgspec.Struct, kw_only=True):
    """The field of a choice, if the server returns routed experts: base64, in msgpack bytes."""

    routed_experts: Any = UNSET


class RoutedWriter:
    """Writes the experts of a choice's positions."""

    fields = RoutedFields
    of_tokens = ()

    def tokens(self, column: Column | None, form: Form, parts: DeferredParts | None = None) -> dict[str, Any]:
        return {}

    def end(self, c: ChoiceOutput, form: Form) -> dict[str, Any]:
        with io.BytesIO() as file:
            np.save(file, c.values[NAME], allow_pickle=False)
            npy = file.getvalue()
        return {NAME: npy if form == "packed" else base64.b64encode(npy).decode()}
