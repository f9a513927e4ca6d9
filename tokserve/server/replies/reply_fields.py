"""Parts of replies that all generating routes have: why a choice ended, which weights and experts made its tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

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


def routed_experts(c: ChoiceOutput) -> str | UnsetType:
    """The experts of a choice's positions as an npy file in base64, with its last delta, if the server returns them."""
    return UNSET if c.routed_experts is None else base64.b64encode(npy(c.routed_experts)).decode()


def npy(array: NDArray[Any]) -> bytes:
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return file.getvalue()


class StopDetail(msgspec.Struct, omit_defaults=True):
    """Exactly why a choice ended; `message` comes with errors only."""

    kind: str | None
    message: str | None = None
