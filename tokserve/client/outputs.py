"""What engines give: the new output of one choice, their state and statistics; how several of a kind become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from tokserve.protocol.messages import (
    PREEMPTIONS,
    STEP_TOKENS,
    DraftCounts,
    Logprobs,
    Ready,
    SamplingMasks,
    Status,
    StepStats,
    StoreStats,
)

__all__ = [
    "PREEMPTIONS",
    "STEP_TOKENS",
    "ChoiceOutput",
    "DraftCounts",
    "EngineReport",
    "Logprobs",
    "Ready",
    "SamplingMasks",
    "Status",
    "StepStats",
    "StoreStats",
    "join_logprobs",
    "join_masks",
    "merge",
    "total",
]

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

    `text` is None where none was asked for.  `prompt_logprobs` and `cached_tokens` come once, with the first
    delta.  `stop_reason`: the token id, sequence or string that matched.  `stop_detail`: see `messages.Finish`, or
    `stop_string`.  `weight_versions`: (version, start, end) of output positions, with the last delta; an empty span is
    of weights that computed KV which later tokens depend on, and no token.  `prompt_weight_versions`: likewise of
    prompt positions, by what computed their KV.  `times`, with the last delta: seconds from arrival to a slot, to the
    first token and to the end (0.0 for what was not reached).  `pooled`: the vector of a pooling request, float32, with
    the last delta, as are the counts of `drafts`.  `routed_experts`: uint8 or uint16 [n, layers, chosen] of all
    positions but the last, with the last delta, if the server returns them.  `sampling_masks`: None where none were
    requested or there are no tokens; `sampling_mask_truncated`, with the last delta: how many of the choice's tokens
    had more ids than a mask may have.  `kv_transfer`: with the last delta, for the server that goes on with the
    request.
    """

    index: int
    token_ids: list[int]
    text: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | list[int] | None = None
    stop_detail: str | None = None
    message: str | None = None
    weight_versions: list[tuple[str, int, int]] = []
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    pooled: bytes = b""
    routed_experts: NDArray[Any] | None = None
    drafts: DraftCounts = DraftCounts()
    sampling_masks: SamplingMasks | None = None
    sampling_mask_truncated: int = 0
    kv_transfer: dict[str, Any] | None = None
    prompt_weight_versions: list[tuple[str, int, int]] = []


def join_masks(parts: Sequence[SamplingMasks]) -> SamplingMasks | None:
    """The rows of all parts in order."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return SamplingMasks(b"".join(part.rows for part in parts), b"".join(part.ids for part in parts))


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs | None:
    """The rows of all parts in order."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(
        b"".join(part.token_logprobs for part in parts),
        b"".join(part.ranks for part in parts),
        b"".join(part.top_ids for part in parts),
        b"".join(part.top_logprobs for part in parts),
        parts[0].width,
        parts[0].mode,
    )


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
        logprobs=join_logprobs([part.logprobs for part in parts if part.logprobs is not None]),
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        cached_tokens=max(part.cached_tokens for part in parts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        stop_detail=last.stop_detail,
        message=last.message,
        weight_versions=last.weight_versions,
        times=last.times,
        pooled=last.pooled,
        routed_experts=last.routed_experts,
        drafts=last.drafts,
        sampling_masks=join_masks([part.sampling_masks for part in parts if part.sampling_masks is not None]),
        sampling_mask_truncated=last.sampling_mask_truncated,
        kv_transfer=last.kv_transfer,
        prompt_weight_versions=last.prompt_weight_versions,
    )


def total(stats: Sequence[StepStats]) -> StepStats:
    """The sums of all gauges and counters."""
    sums: dict[str, Any] = {}
    for name in StepStats.__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if isinstance(values[0], list):
            longest = max(map(len, values))
            sums[name] = [sum(value[i] for value in values if i < len(value)) for i in range(longest)]
        elif isinstance(values[0], StoreStats):
            columns = zip(*map(msgspec.structs.astuple, values), strict=True)
            sums[name] = StoreStats(*map(sum, columns))
        elif isinstance(values[0], dict):
            keys = {key: None for value in values for key in value}
            rows = {key: [value[key] for value in values if key in value] for key in keys}
            sums[name] = {key: tuple(map(sum, zip(*row, strict=True))) for key, row in rows.items()}
        else:
            sums[name] = sum(values)
    return StepStats(**sums)
