"""The option of hidden states."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.config.common import about

FLAG = "--max-hidden-state-bytes"


class HiddenStateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be returned of hidden states."""

    max_hidden_state_bytes: Annotated[
        int,
        about("Most bytes of hidden states that a choice may have, in the model's dtype; 0: none are returned.", ge=0),
    ] = 0


def check(config: Config) -> None:
    """Raise StartError for options with which hidden states cannot be returned."""
    if not config.options_of(HiddenStateOptions).max_hidden_state_bytes:
        return
    if config.parallel.pipeline_parallel_size > 1:
        raise StartError("option max_hidden_state_bytes needs all layers in one stage (pipeline_parallel_size 1)")
    if config.model.runner == "pooling":
        raise StartError("option max_hidden_state_bytes is for models that generate")
