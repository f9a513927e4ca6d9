"""The counts of a request's drafts: a value that is sent with the request's end, if there were any."""

from __future__ import annotations

from typing import Any

import msgspec

from tokserve.protocol.columns import ValueSpec
from tokserve.protocol.messages import DraftCounts

DRAFTS = "drafts"


def _read(value: Any, num_tokens: int) -> DraftCounts:
    return msgspec.convert(value, DraftCounts)


SPECS = (ValueSpec(DRAFTS, read=_read),)
