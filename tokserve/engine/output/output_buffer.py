"""What a request has produced and not yet sent: columns, values that it has once, and weight versions."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tokserve.engine.output.columns import ColumnBuffer, PromptRows, StepColumns, StepRows
from tokserve.engine.variant import Variant
from tokserve.protocol.column_table import asked_columns, value_specs
from tokserve.protocol.columns import PROMPT_LOGPROBS, Collector
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.logprobs import asked_prompt_logprobs
from tokserve.protocol.messages import Finish
from tokserve.protocol.params import PoolingParams, SamplingParams


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

    @property
    def model(self) -> tuple[int, str]:
        """Ids of the vocabulary, and the mode of logprobs where a request names none."""
        return self.vocab_size, self.logprobs_mode


class _Era(NamedTuple):
    """The same weights compute from output token `token` on, which for those before it is position `position`."""

    version: str
    generation: int  # of the variant; 0: none
    label: str  # of the variant
    token: int
    position: int


class OutputBuffer:
    """The unsent output of one request; positions are counted from the start of the prompt.  `values`: what the last
    output brings, by name."""

    __slots__ = (
        "_collectors",
        "_columns",
        "_eras",
        "_generation",
        "_next_to_send",
        "_prompt_len",
        "_sent",
        "_task",
        "num_computed",
        "prompt_rows",
        "values",
        "version",
    )

    def __init__(self, task: SamplingParams | PoolingParams, prompt_len: int, limits: Limits) -> None:
        self._task = task
        self._prompt_len = prompt_len
        self._next_to_send = prompt_len
        self._sent = False  # anything has been sent
        self._eras: list[_Era] = []
        self.version: str | None = None  # of the weights that computed the newest position
        self._generation = 0  # of its variant
        self.num_computed = 0  # prompt tokens whose KV was there at the end
        self.values: dict[str, Any] = {}
        self._collectors: dict[str, Collector] = {}
        self._columns = tuple([ColumnBuffer(name, form) for name, form in asked_columns(task, *limits.model).items()])
        self.prompt_rows: PromptRows | None = None
        form = asked_prompt_logprobs(task, *limits.model)
        if form is not None and isinstance(task, SamplingParams):
            self.prompt_rows = PromptRows(form, max(task.prompt_logprobs_start, 1), prompt_len)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that the request asks for."""
        return tuple([column.name for column in self._columns])

    @property
    def next_prompt_row(self) -> int:
        """The prompt token whose logprob comes next; beyond all where none is asked for."""
        return self._prompt_len if self.prompt_rows is None else self.prompt_rows.next

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

    def add_rows(self, step: Mapping[str, StepRows], first: int, count: int) -> None:
        """Keep the columns of new tokens, rows `first` ... of a step, that the request asks for."""
        for column in self._columns:
            rows = step.get(column.name)
            if rows is not None:
                column.append(rows, first, count)

    def collect(self, name: str, start: int, end: int, values: NDArray[Any]) -> None:
        """Keep what a step brought of a value, by computing the positions from `start` to before `end`."""
        if name == PROMPT_LOGPROBS:
            if self.prompt_rows is not None:
                self.prompt_rows.add(start, values)
            return
        collector = self._collectors.get(name)
        if collector is None:
            make = value_specs()[name].collect
            assert make is not None, f"no step brings {name}"
            collector = self._collectors[name] = make(self._task, self._prompt_len)
        collector.add(start, end, values)

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
        self, columns: StepColumns, request_id: str, tokens: array[int], finish: Finish | None, cached: int
    ) -> None:
        """Add what is unsent to a step's columns."""
        columns.add(request_id, tokens, self._columns, self._next_to_send)
        self._next_to_send = len(tokens)
        if finish is None and self._sent:
            return
        values: dict[str, Any] = {}
        scores = None if self._sent or self.prompt_rows is None else self.prompt_rows.take()
        if scores is not None:
            values[PROMPT_LOGPROBS] = scores
        versions: list[tuple[str, int, int]] = []
        prompt_versions: list[tuple[str, int, int]] = []
        if finish is not None:
            spans = self.spans(len(tokens) - self._prompt_len)
            versions = [(_name(version, label), start, end) for version, label, start, end in spans]
            prompt_versions = self.prompt_spans(self.num_computed)
            packed = [(name, collector.packed(len(tokens))) for name, collector in self._collectors.items()]
            values |= self.values | {name: value for name, value in packed if value is not None}
        columns.set_rare(finish, 0 if self._sent else cached, versions, values, prompt_versions)
        self._sent = True


def _name(version: str, label: str) -> str:
    return f"{version}+{label}" if label else version
