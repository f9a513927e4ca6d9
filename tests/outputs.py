"""Steps as a list of outputs, one per row, for tests; the package has columns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokserve.protocol.messages import Finish, Logprobs, RareFields, RowLogprobs, StepOutput, StepStats
from tokserve.protocol.prompt import pack_ids


@dataclass
class Output:
    """A row of a step."""

    rid: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached: int = 0
    finish: Finish | None = None
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    pooled: bytes = b""
    kv_transfer: dict[str, Any] | None = None
    prompt_spans: list[tuple[str, int, int]] = field(default_factory=list)


def pack(outputs: Sequence[Output], stats: StepStats) -> StepOutput:
    """The message with these rows; every row's logprobs are a part of their own."""
    parts, rare = [], []
    for row, o in enumerate(outputs):
        if o.logprobs is not None:
            parts.append(RowLogprobs(o.logprobs, pack_ids([row])))
        if o.finish or o.prompt_logprobs is not None or o.cached or o.spans or o.pooled:
            rare.append(RareFields(row, o.finish, o.prompt_logprobs, o.cached, o.spans, o.pooled))
    ids = array("i", (token for o in outputs for token in o.token_ids)).tobytes()
    counts = pack_ids([len(o.token_ids) for o in outputs])
    return StepOutput(stats, [o.rid for o in outputs], ids, counts, parts, rare)


def unpack(step: StepOutput) -> list[Output]:
    """The rows of a message."""
    outputs = []
    for rid, ids, logprobs, fields, _ in step.rows():
        e = fields or RareFields(0)
        rare = (e.prompt_logprobs, e.cached_tokens, e.finish, e.weight_versions, e.pooled, e.kv_transfer)
        outputs.append(Output(rid, ids, logprobs, *rare, e.prompt_weight_versions))
    return outputs
