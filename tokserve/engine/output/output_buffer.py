"""What a request has produced and not yet sent: logprobs, sampling masks, prompt logprobs, the pooled vector, and
weight versions."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokserve.engine.output.columns import (
    LogprobColumns,
    MaskColumns,
    PackedMasks,
    PackedRows,
    RoutedColumns,
    StepColumns,
)
from tokserve.engine.variant import Variant
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.messages import Finish
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.plan import Float32, LogprobRows


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the cache set for all requests.  `context`: maximum tokens of prompt plus output.
    `feature_bytes`, `whole_prompts`: as in `DeviceFacts`.  `images`: of a model that reads images."""

    context: int
    vocab_size: int
    eos: tuple[int, ...]
    logprobs_mode: str
    feature_bytes: Mapping[str, int] = field(default_factory=dict)
    images: ImageFormat | None = None
    whole_prompts: bool = False

    @property
    def joint_tokens(self) -> int:
        """The most tokens of a request that a step has to compute together: of a prompt, or of an image."""
        if self.whole_prompts:
            return self.context
        return 0 if self.images is None else self.images.step_tokens


class _Era(NamedTuple):
    """The same weights compute from output token `token` on, which for those before it is position `position`."""

    version: str
    generation: int  # of the variant; 0: none
    label: str  # of the variant
    token: int
    position: int


class OutputBuffer:
    """The unsent output of one request; positions are counted from the start of the prompt."""

    __slots__ = (
        "_eras",
        "_first_prompt_row",
        "_generation",
        "_logprobs",
        "_masks",
        "_next_to_send",
        "_pooled",
        "_prompt_len",
        "_prompt_logprobs",
        "_routed",
        "_routed_start",
        "_sent",
        "next_prompt_row",
        "num_computed",
        "scores_are_finite",
        "version",
    )

    def __init__(self, task: SamplingParams | PoolingParams, prompt_len: int, limits: Limits) -> None:
        self._prompt_len = prompt_len
        self._next_to_send = prompt_len
        self._sent = False  # anything has been sent
        self._eras: list[_Era] = []
        self.version: str | None = None  # of the weights that computed the newest position
        self._generation = 0  # of its variant
        self.scores_are_finite = True  # no logprob of the prompt is NaN
        self.num_computed = 0  # prompt tokens whose KV was there at the end
        self._pooled = b""
        self._routed: RoutedColumns | None = None
        self._routed_start = 0
        self._logprobs: LogprobColumns | None = None
        self._masks: MaskColumns | None = None
        self._prompt_logprobs: LogprobColumns | None = None
        self._first_prompt_row = self.next_prompt_row = prompt_len  # the prompt token whose row comes next
        if not isinstance(task, SamplingParams):
            return
        self._routed_start = min(task.routed_experts_prompt_start, prompt_len)
        mode = task.logprobs_mode or limits.logprobs_mode
        named = len(task.logprob_token_ids or ())
        if task.logprobs is not None or named:
            self._logprobs = LogprobColumns(_width(task.logprobs or 0, limits) + named, mode)
        if task.return_sampling_mask:
            self._masks = MaskColumns()
        if task.prompt_logprobs is not None:
            self._prompt_logprobs = LogprobColumns(
                _width(task.prompt_logprobs, limits), task.prompt_logprobs_mode or mode
            )
            self._first_prompt_row = self.next_prompt_row = max(task.prompt_logprobs_start, 1)

    def set_version(self, version: str, variant: Variant | None, token: int, position: int) -> None:
        """The positions from `position` on, and the output tokens from `token` on, are computed by these weights."""
        generation = 0 if variant is None else variant.generation
        if version != self.version or generation != self._generation:
            self.version, self._generation = version, generation
            self._eras.append(_Era(version, generation, "" if variant is None else variant.label, token, position))

    def forget_kv(self, num_output: int) -> None:
        """The KV is given back: weights that made nothing but that have no part in what comes."""
        eras = self._eras
        while eras and eras[-1].token == num_output:
            eras.pop()
        self.version, self._generation = (eras[-1].version, eras[-1].generation) if eras else (None, 0)

    def add_logprobs(self, rows: PackedRows, first: int, count: int) -> None:
        """Keep the logprobs of new tokens, rows `first` ... of a step, if they were requested."""
        if self._logprobs is not None:
            self._logprobs.append(rows, first, count)

    def add_sampling_masks(self, rows: PackedMasks, first: int, count: int) -> None:
        """Keep what new tokens were drawn from, rows `first` ... of a step, if it was requested."""
        if self._masks is not None:
            self._masks.append(rows, first, count)

    def add_prompt_rows(self, start: int, rows: LogprobRows) -> None:
        """Keep the logprobs that a chunk from position `start` brought, except those kept before a preemption."""
        if self._prompt_logprobs is None:
            return
        known = self.next_prompt_row - max(start + 1, self._first_prompt_row)
        count = len(rows.token_logprobs)
        assert known >= 0, "a chunk left out prompt logprobs"
        if count > known:
            self.scores_are_finite = self.scores_are_finite and not np.isnan(rows.token_logprobs[known:]).any()
            self._prompt_logprobs.add(rows, known, count)
            self.next_prompt_row += count - known

    def add_routed_experts(self, end: int, ids: NDArray[Any]) -> None:
        """Keep the experts of the positions before `end`, as many as there are ids."""
        if self._routed is None:
            self._routed = RoutedColumns()
        self._routed.add(end, ids)

    def restart_prompt_rows(self) -> bool:
        """The prompt's logprobs come again, from the first one on; whether there are any."""
        if self._prompt_logprobs is None:
            return False
        self._prompt_logprobs = LogprobColumns(self._prompt_logprobs.width, self._prompt_logprobs.mode)
        self.next_prompt_row = self._first_prompt_row
        self.scores_are_finite = True
        return True

    def set_pooled(self, vector: Float32) -> None:
        self._pooled = vector.astype("<f4").tobytes()

    def spans(self, num_output: int) -> list[tuple[str, str, int, int]]:
        """(weight version, variant's label or "", start, end) of the first `num_output` output positions.  An empty
        span is of weights that computed KV on which the tokens after it depend, and none of the tokens."""
        bounds = pairwise([era.token for era in self._eras] + [num_output])
        return [(era.version, era.label, start, end) for era, (start, end) in zip(self._eras, bounds, strict=True)]

    def prompt_spans(self, end: int) -> list[tuple[str, int, int]]:
        """(weight version with the variant's label, start, end) of the KV of the first `end` prompt tokens, as the
        first output token found it."""
        eras = [era for era in self._eras if not era.token]
        starts = [0, *(era.position for era in eras[1:]), end]
        bounds = zip(eras, pairwise(starts), strict=False)
        return [(_name(era.version, era.label), start, end) for era, (start, end) in bounds]

    def emit(
        self,
        columns: StepColumns,
        request_id: str,
        tokens: array[int],
        finish: Finish | None,
        cached: int,
        kv_transfer: dict[str, Any] | None = None,
    ) -> None:
        """Add what is unsent to a step's columns."""
        columns.add(request_id, tokens, self._logprobs, self._next_to_send, self._masks)
        self._next_to_send = len(tokens)
        if finish is None and self._sent:
            return
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if self.next_prompt_row < self._prompt_len:  # it ended within its prompt: all of them or none
            prompt_logprobs = None
        versions: list[tuple[str, int, int]] = []
        prompt_versions: list[tuple[str, int, int]] = []
        if finish is not None:
            spans = self.spans(len(tokens) - self._prompt_len)
            versions = [(_name(version, label), start, end) for version, label, start, end in spans]
            prompt_versions = self.prompt_spans(self.num_computed)
        routed = None
        if finish is not None and self._routed is not None:
            routed = self._routed.packed(self._routed_start, len(tokens) - 1)
        columns.set_rare(
            finish,
            prompt_logprobs,
            0 if self._sent else cached,
            versions,
            self._pooled,
            routed,
            kv_transfer,
            prompt_versions,
        )
        self._sent = True


def _name(version: str, label: str) -> str:
    return f"{version}+{label}" if label else version


def _width(k: int, limits: Limits) -> int:
    return limits.vocab_size if k < 0 else k
