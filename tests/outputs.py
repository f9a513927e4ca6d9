"""Steps as a list of outputs, one per row, for tests; the package has columns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS, Column, RowColumn
from tokserve.protocol.messages import Finish, RareFields, StepOutput, StepStats
from tokserve.protocol.prompt import pack_ids


@dataclass
class Output:
    """A row of a step."""

    rid: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: Column | None = None
    prompt_logprobs: Column | None = None
    cached: int = 0
    finish: Finish | None = None
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    pooled: bytes = b""
    kv_transfer: dict[str, Any] | None = None
    prompt_spans: list[tuple[str, int, int]] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)  # besides logprobs


def pack(outputs: Sequence[Output], stats: StepStats) -> StepOutput:
    """The message with these rows; every row's logprobs are a part of their own."""
    parts, rare = [], []
    for row, o in enumerate(outputs):
        if o.logprobs is not None:
            parts.append(RowColumn(LOGPROBS, o.logprobs, pack_ids([row])))
        parts += [RowColumn(name, column, pack_ids([row])) for name, column in o.columns.items()]
        if o.finish or o.prompt_logprobs is not None or o.cached or o.spans or o.pooled:
            values: dict[str, Any] = {"pooled": o.pooled} if o.pooled else {}
            if o.prompt_logprobs is not None:
                values[PROMPT_LOGPROBS] = o.prompt_logprobs
            rare.append(RareFields(row, o.finish, o.cached, o.spans, values))
    ids = array("i", (token for o in outputs for token in o.token_ids)).tobytes()
    counts = pack_ids([len(o.token_ids) for o in outputs])
    return StepOutput(stats, [o.rid for o in outputs], ids, counts, parts, rare)


def unpack(step: StepOutput) -> list[Output]:
    """The rows of a message."""
    outputs = []
    for rid, ids, columns, fields in step.rows():
        e = fields or RareFields(0)
        scores = e.values.get(PROMPT_LOGPROBS)
        scores = None if scores is None else msgspec.convert(scores, Column)
        rare = (scores, e.cached_tokens, e.finish, e.weight_versions)
        values = (e.values.get("pooled", b""), e.values.get("kv_transfer"))
        others = {name: column for name, column in columns.items() if name != LOGPROBS}
        outputs.append(Output(rid, ids, columns.get(LOGPROBS), *rare, *values, e.prompt_weight_versions, others))
    return outputs
