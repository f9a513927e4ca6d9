"""The experts chosen for each position of prompt and output, as a value that is sent with the request's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokserve.protocol.columns import ReplyLimits, Task, ValueSpec
from tokserve.protocol.params import RoutedFormat, SamplingParams

if TYPE_CHECKING:
    from tokserve.client.outputs import ChoiceOutput

NAME = "routed_experts"
DEFAULT_FORM: RoutedFormat = "npy"
COMPACT = (np.uint8, np.int16, np.int32)


class ExpertRows(NamedTuple):
    """The experts of positions `start`, start + 1, ...: `ids` [n, layers, chosen].  `form`: how a reply has them."""

    ids: NDArray[Any]
    start: int
    form: RoutedFormat

    def compact(self) -> NDArray[Any]:
        """The ids in the smallest of the dtypes `COMPACT` that holds all of them."""
        largest = int(self.ids.max(initial=0))
        return self.ids.astype(next(dtype for dtype in COMPACT if largest <= np.iinfo(dtype).max), copy=False)


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The experts chosen for positions `start`, start + 1, ... of prompt and output.  `ids`: [n, layers, chosen] of
    `item` bytes each, little-endian; zeros in layers without experts.  `form`: how the reply has them."""

    ids: bytes
    start: int
    layers: int
    chosen: int
    item: int
    form: RoutedFormat = "npy"

    def before(self, end: int) -> ExpertRows:
        """The ids of positions before `end`."""
        ids = np.frombuffer(self.ids, f"<u{self.item}").reshape(-1, self.layers, self.chosen)
        return ExpertRows(ids[: max(0, end - self.start)], self.start, self.form)


class RoutedCollector:
    """The experts chosen for a request's positions, from the first one on."""

    def __init__(self, task: Task, prompt_len: int) -> None:
        start, self._form = 0, DEFAULT_FORM
        if isinstance(task, SamplingParams):
            start, self._form = task.routed_experts_prompt_start, task.routed_experts_format or DEFAULT_FORM
        self._start = min(start, prompt_len)
        self._ids = bytearray()
        self._shape, self._item = (0, 0), 1

    def add(self, start: int, end: int, values: NDArray[Any]) -> None:
        """Put in the experts of the last positions before `end`, [n, layers, chosen], in place of what is known from
        there on: after a preemption, or where drafts were rejected."""
        self._shape, self._item = (values.shape[1], values.shape[2]), values.itemsize
        first = (end - len(values)) * values[0].nbytes
        assert first <= len(self._ids), "a step left out routed experts"
        del self._ids[first:]
        self._ids += values.tobytes()

    def packed(self, num_tokens: int) -> RoutedExperts:
        """The experts of all positions but the last, as far as they are computed."""
        layers, chosen = self._shape
        size, start = layers * chosen * self._item, self._start
        ids = bytes(self._ids[start * size : (num_tokens - 1) * size])
        return RoutedExperts(ids, start, layers, chosen, self._item, self._form)


def _read(value: Any, num_tokens: int) -> ExpertRows:
    return msgspec.convert(value, RoutedExperts).before(num_tokens - 1)


def _result(output: ChoiceOutput) -> dict[str, Any]:
    return {NAME: output.values[NAME].ids} if NAME in output.values else {}


def _choice_bytes(params: SamplingParams, num_tokens: int, limits: ReplyLimits) -> int:
    """The size of the ids in base64; 0 if the server returns none."""
    positions = max(0, num_tokens - params.routed_experts_prompt_start)
    return int(positions * limits.facts.get("routed_bytes", 0)) * 4 // 3


SPECS = (
    ValueSpec(
        NAME,
        RoutedCollector,
        read=_read,
        result=_result,
        reply="tokserve.families.mixtures.reply:RoutedWriter",
        choice_bytes=_choice_bytes,
    ),
)
