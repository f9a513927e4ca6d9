"""What engines give: the new output of one choice, their state and statistics; how several of a kind become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS, Column, join
from tokserve.protocol.engine_metric import add_reports
from tokserve.protocol.messages import (
    PREEMPTIONS,
    STEP_TOKENS,
    DraftCounts,
    Ready,
    Status,
    StepStats,
)

__all__ = [
    "PREEMPTIONS",
    "STEP_TOKENS",
    "ChoiceOutput",
    "Column",
    "DraftCounts",
    "EngineReport",
    "Ready",
    "Status",
    "StepStats",
    "join_columns",
    "merge",
    "total",
]

NO_DRAFTS = DraftCounts()
TERMINATORS = ("eos", "stop_token")  # stop details whose last token is not part of the text


class EngineReport(msgspec.Struct, frozen=True):
    """What an engine reported last.  `rank`: of several engines; `down`: there is none now.  An engine that has died
    leaves statistics of zero, as the one in its place begins with."""

    rank: int
    stats: StepStats
    status: Status
    ready: Ready | None
    down: bool = False


class ChoiceOutput(msgspec.Struct):
    """New output of one choice since the last delta; with `finish_reason`, its last.

    `text` is None where none was asked for.  `columns`: of its tokens, by the names of their `ColumnSpec`s.
    `cached_tokens` come once, with the first delta.  `stop_reason`: the token id, sequence or string that matched.
    `stop_detail`: see `messages.Finish`, or `stop_string`.  `weight_versions`: (version, start, end) of output
    positions, with the last delta; an empty span is of weights that computed KV which later tokens depend on, and no
    token.  `prompt_weight_versions`: likewise of prompt positions, by what computed their KV.  `times`, with the last
    delta: seconds from arrival to a slot, to the first token and to the end (0.0 for what was not reached).  `values`:
    what a request has once, by the names of their `ValueSpec`s: the prompt's logprobs with the first delta, all others
    with the last.  `counts`, with the last delta: sums over all of the choice's tokens, by the column's name.
    """

    index: int
    token_ids: list[int]
    text: str | None = None
    columns: dict[str, Column] = {}
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | list[int] | None = None
    stop_detail: str | None = None
    message: str | None = None
    weight_versions: list[tuple[str, int, int]] = []
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    values: dict[str, Any] = {}
    counts: dict[str, int] = {}
    prompt_weight_versions: list[tuple[str, int, int]] = []

    @property
    def logprobs(self) -> Column | None:
        """The logprobs of its tokens; None where none were requested."""
        return self.columns.get(LOGPROBS)

    @property
    def prompt_logprobs(self) -> Column | None:
        """The logprobs of the prompt's tokens, with the first delta."""
        scores: Column | None = self.values.get(PROMPT_LOGPROBS)
        return scores

    @property
    def drafts(self) -> DraftCounts:
        """The counts of its drafts, with the last delta."""
        counts: DraftCounts = self.values.get("drafts", NO_DRAFTS)
        return counts


def join_columns(parts: Sequence[dict[str, Column]]) -> dict[str, Column]:
    """The rows of all parts in order, by name.  A part without tokens may lack names."""
    if len(parts) < 2:
        return parts[0] if parts else {}
    names = {name: None for part in parts for name in part}
    return {name: join([part[name] for part in parts if name in part]) for name in names}


def merge(deltas: Iterable[ChoiceOutput]) -> list[ChoiceOutput]:
    """One completion per choice, by index: what the same request returns when it is not streamed."""
    by_index: dict[int, list[ChoiceOutput]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [_merge_one(by_index[index]) for index in sorted(by_index)]


def _merge_one(parts: list[ChoiceOutput]) -> ChoiceOutput:
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    texts = [part.text for part in parts if part.text is not None]
    return ChoiceOutput(
        index=last.index,
        token_ids=[token for part in parts for token in part.token_ids],
        text="".join(texts) if last.text is not None else None,
        columns=join_columns([part.columns for part in parts if part.columns]),
        cached_tokens=max(part.cached_tokens for part in parts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        stop_detail=last.stop_detail,
        message=last.message,
        weight_versions=last.weight_versions,
        times=last.times,
        values={name: value for part in parts for name, value in part.values.items()},
        counts=last.counts,
        prompt_weight_versions=last.prompt_weight_versions,
    )


def total(stats: Sequence[StepStats]) -> StepStats:
    """The sums of all gauges and counters."""
    return StepStats(*map(add_reports, zip(*map(msgspec.structs.astuple, stats), strict=True)))
