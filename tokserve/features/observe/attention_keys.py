"""How many keys attention has needed, and how many of them were read for several requests at once."""

from __future__ import annotations

from tokserve.ops.attention import attention_keys
from tokserve.runner.features import RunnerContext, RunnerFeature


def make(context: RunnerContext) -> RunnerFeature | None:
    """None where attention does not count keys."""
    return None if attention_keys() is None else AttentionKeys()


class AttentionKeys(RunnerFeature):
    """Counts of this process since the feature was made."""

    def __init__(self) -> None:
        self._before = attention_keys() or (0, 0)

    def totals(self) -> dict[str, int]:
        needed, shared = attention_keys() or self._before
        return {"attention_keys": needed - self._before[0], "shared_attention_keys": shared - self._before[1]}
