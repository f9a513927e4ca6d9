"""Hidden states in replies: with a choice's last delta, as the bytes of an array with its shape."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.features.hidden_states.columns import NAME, ChosenStates
from tokserve.server.replies.fields import Form
from tokserve.server.replies.reply_parts import DeferredParts


class StateArray(msgspec.Struct):
    """Little-endian values of `dtype` [positions, layers, hidden]: base64 in JSON, a byte string in msgpack."""

    data: bytes
    shape: tuple[int, int, int]
    dtype: str
    layers: list[int]
    positions: list[int]


class StateFields(msgspec.Struct, kw_only=True):
    """The field of a choice whose request has `hidden_states`."""

    hidden_states: StateArray | UnsetType = UNSET


class StateWriter:
    """Writes the hidden states of a choice."""

    fields = StateFields
    of_tokens = ()

    def tokens(self, column: Column | None, form: Form, parts: DeferredParts | None = None) -> dict[str, Any]:
        return {}

    def end(self, c: ChoiceOutput, form: Form) -> dict[str, Any]:
        states: ChosenStates = c.values[NAME]
        return {NAME: StateArray(states.packed, states.shape, states.dtype, states.layers, states.positions)}
