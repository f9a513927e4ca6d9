"""Parts of replies that all generating routes have: why a choice ended, and which weights made its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokserve.client.outputs import ChoiceOutput


class WeightVersion(msgspec.Struct):
    """Tokens start..end-1 were made by this version of the weights; if there are none of the output, it computed KV on
    which those after them depend."""

    version: str
    start: int
    end: int


def versions(c: ChoiceOutput) -> list[WeightVersion]:
    """Which version of the weights made which of a choice's tokens."""
    return [WeightVersion(*span) for span in c.weight_versions]


def prompt_versions(c: ChoiceOutput) -> list[WeightVersion]:
    """Which version of the weights computed the KV of which of the prompt's tokens."""
    return [WeightVersion(*span) for span in c.prompt_weight_versions]


def last_version(ends: Sequence[ChoiceOutput]) -> str | None:
    """The version of the weights that made the last token of the last choice that has tokens."""
    return next((c.weight_versions[-1][0] for c in reversed(ends) if c.weight_versions), None)


class StopDetail(msgspec.Struct, omit_defaults=True):
    """Exactly why a choice ended; `message` comes with errors only."""

    kind: str | None
    message: str | None = None
