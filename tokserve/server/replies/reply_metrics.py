"""What a reply says about its drafts, on demand: `metrics.speculative_decoding` in vLLM's shape.

Ratios are null where no step had drafts.  Choices of one request are added up; what each step had is there only for a
request with one choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from tokserve.client.outputs import DraftCounts
from tokserve.protocol.params import DraftReport
from tokserve.server.replies.timing import TimingFields


class SourceCounts(msgspec.Struct):
    """Drafts of one source."""

    num_draft_tokens: int
    num_accepted_draft_tokens: int


class SpeculativeDecoding(msgspec.Struct, kw_only=True):
    """Entry j of the histogram: steps of which exactly j drafts were accepted.  `num_spec_tokens`: the most drafts
    that a step may have.  Steps without drafts do not count."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET
    sources: dict[str, SourceCounts] | UnsetType = UNSET


class ReplyMetrics(TimingFields):
    """`metrics` of a reply."""

    speculative_decoding: SpeculativeDecoding | UnsetType = UNSET


def speculative_decoding(choices: Sequence[DraftCounts], level: DraftReport, most: int) -> SpeculativeDecoding:
    """The report of a request's choices.  `most`: drafts that a step may have."""
    steps = sum(one.steps for one in choices)
    proposed, accepted = sum(one.proposed for one in choices), sum(one.accepted for one in choices)
    columns = np.frombuffer(b"".join(one.per_step for one in choices), np.uint8).reshape(-1, 2)  # [steps, 2]
    metrics = SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / steps if steps else None,
        draft_acceptance_rate=accepted / proposed if proposed else None,
        acceptance_histogram=np.bincount(columns[:, 1]).tolist(),
        num_spec_steps=steps,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=proposed,
        num_spec_tokens=most,
    )
    if level == "detailed" and len(choices) == 1:
        metrics.per_step_drafted, metrics.per_step_accepted = columns.T.tolist()
    return metrics


def by_source(choices: Sequence[DraftCounts]) -> dict[str, SourceCounts]:
    """Drafts and accepted ones of the choices, by where they came from."""
    by_source: dict[str, SourceCounts] = {}
    for one in choices:
        for source, (proposed, accepted) in one.by_source.items():
            counts = by_source.setdefault(source, SourceCounts(0, 0))
            counts.num_draft_tokens += proposed
            counts.num_accepted_draft_tokens += accepted
    return by_source
