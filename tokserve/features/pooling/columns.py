"""The vector of a pooling request, as a value that is sent with the request's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from tokserve.protocol.columns import Task, ValueSpec

if TYPE_CHECKING:
    from tokserve.client.outputs import ChoiceOutput

NAME = "pooled"


class PooledVector:
    """The vector, float32, of the step that computed the prompt's last position."""

    def __init__(self, task: Task, prompt_len: int) -> None:
        self._packed = b""

    def add(self, start: int, end: int, values: NDArray[Any]) -> None:
        self._packed = values.astype("<f4").tobytes()

    def packed(self, num_tokens: int) -> bytes:
        return self._packed


def packed_vector(output: ChoiceOutput) -> bytes:
    """The vector of a request's last output, float32; empty if it ended without one."""
    packed: bytes = output.values.get(NAME, b"")
    return packed


SPECS = (ValueSpec(NAME, PooledVector),)
