"""What the scripted server of test_scripted.py replies, by the first id of the prompt."""

from __future__ import annotations

from typing import Any

OUTPUTS = {1: ([5, 6, 7], [-0.5, -0.25, -2.0]), 2: ([8], [-1.5]), 3: ([9], [-1.0])}
LONG = 4  # its output waits before the second token
_refused: list[int] = []


def reply(prompt_ids: list[int], index: int) -> Any:
    """A `ScriptedReply`; the first request with prompt 3 is refused."""
    from tokserve.testing import ScriptedReply

    first = prompt_ids[0]
    if first == LONG:
        return ScriptedReply([5] * 4, delays={1: 600.0})
    if first == 3 and not _refused:
        _refused.append(first)
        return ScriptedReply(refuse=503)
    ids, logprobs = OUTPUTS.get(first, ([5], [-1.0]))
    return ScriptedReply(ids, logprobs=logprobs)
