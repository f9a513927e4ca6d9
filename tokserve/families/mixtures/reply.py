"""Routed experts in replies: with a choice's last delta, in the form that the request names.

"npy", vLLM's: a file of numpy.  "object", prime-rl's: the bytes of the array, with its shape, its first position and
its dtype, which is that of the model.  "compact", SkyRL's: the same in the smallest dtype that holds the reply's ids.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.families.mixtures.columns import NAME, ExpertRows
from tokserve.server.replies.fields import Form
from tokserve.server.replies.reply_parts import DeferredParts


class RoutedFields(msgspec.Struct, kw_only=True):
    """The field of a choice, if the server returns routed experts: base64, in msgpack bytes; or `RoutedObject`."""

    routed_experts: Any = UNSET


class RoutedObject(msgspec.Struct):
    """Little-endian ids: base64 in JSON, a byte string in msgpack.  `data` comes first: clients cut it out of the
    text of a reply."""

    data: bytes
    shape: tuple[int, ...]
    start: int
    dtype: str


class RoutedWriter:
    """Writes the experts of a choice's positions."""

    fields = RoutedFields
    of_tokens = ()

    def tokens(self, column: Column | None, form: Form, parts: DeferredParts | None = None) -> dict[str, Any]:
        return {}

    def end(self, c: ChoiceOutput, form: Form) -> dict[str, Any]:
        rows: ExpertRows = c.values[NAME]
        if rows.form != "npy":
            ids = rows.ids if rows.form == "object" else rows.compact()
            return {NAME: RoutedObject(ids.tobytes(), ids.shape, rows.start, ids.dtype.name)}
        npy = npy_of(rows.ids)
        return {NAME: npy if form == "packed" else base64.b64encode(npy).decode()}


def npy_of(ids: NDArray[Any]) -> bytes:
    with io.BytesIO() as file:
        np.save(file, ids, allow_pickle=False)
        return file.getvalue()
