"""The hidden states of a request, as a value that is sent with the request's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokserve.protocol.columns import ReplyLimits, Task, ValueSpec
from tokserve.protocol.params import SamplingParams

if TYPE_CHECKING:
    from tokserve.client.outputs import ChoiceOutput

NAME = "hidden_states"
BFLOAT16 = "bfloat16"  # which numpy does not have: its bits are uint16


class ChosenStates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Hidden states of these `positions` after these numbers of `layers`, position by position: `packed` has the values
    of `dtype` [positions, layers, hidden], little-endian."""

    positions: list[int]
    layers: list[int]
    dtype: str
    packed: bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, item = len(self.positions) * len(self.layers), 4 if self.dtype == "float32" else 2
        return len(self.positions), len(self.layers), len(self.packed) // (rows * item) if rows else 0

    def values(self) -> NDArray[np.float32]:
        """The states [positions, layers, hidden] in float32."""
        if self.dtype != BFLOAT16:
            return np.frombuffer(self.packed, self.dtype).reshape(self.shape).astype(np.float32)
        bits = np.frombuffer(self.packed, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(self.shape)


class StateCollector:
    """The states of the positions that a request has chosen; those computed again replace earlier ones."""

    def __init__(self, task: Task, prompt_len: int) -> None:
        assert isinstance(task, SamplingParams) and task.hidden_states is not None
        self._chosen = task.hidden_states
        self._prompt_len = prompt_len
        self._dtype = BFLOAT16
        self._rows: dict[int, bytes] = {}  # by position

    def add(self, start: int, end: int, values: NDArray[Any]) -> None:
        """`values` [n, layers, hidden]: of the chosen positions of the step, in the order of these."""
        self._dtype = BFLOAT16 if values.dtype == np.uint16 else values.dtype.name
        positions = [position for position in self._chosen.positions if start <= position < end]
        for position, row in zip(positions, values, strict=True):
            self._rows[position] = row.tobytes()

    def packed(self, num_tokens: int) -> ChosenStates | None:
        """The states of positions whose tokens stay: the last output token is not computed.  None if there are none,
        also if some were computed for drafts that were rejected, or behind a stop."""
        last = max(self._prompt_len, num_tokens - 1)
        positions = [position for position in self._chosen.positions if position in self._rows and position < last]
        if not positions:
            return None
        rows = [self._rows[position] for position in positions]
        return ChosenStates(positions, self._chosen.layers, self._dtype, b"".join(rows))


def _read(value: Any, num_tokens: int) -> ChosenStates:
    return msgspec.convert(value, ChosenStates)


def _result(output: ChoiceOutput) -> dict[str, Any]:
    return {NAME: output.values[NAME]} if NAME in output.values else {}


def _choice_bytes(params: SamplingParams, num_tokens: int, limits: ReplyLimits) -> int:
    """The size of the states in base64."""
    if params.hidden_states is None:
        return 0
    num_states = len(params.hidden_states.positions) * len(params.hidden_states.layers)
    return int(num_states * limits.facts.get("hidden_state_bytes", 0)) * 4 // 3


SPECS = (
    ValueSpec(
        NAME,
        StateCollector,
        read=_read,
        result=_result,
        reply="tokserve.features.hidden_states.reply:StateWriter",
        asked_by=NAME,
        choice_bytes=_choice_bytes,
    ),
)
