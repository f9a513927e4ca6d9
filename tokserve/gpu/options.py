"""The options of GPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tokserve.config import Config
from tokserve.config.common import about
from tokserve.gpu import candidates


class GpuOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a GPU's kernels may try."""

    gpu_candidates: Annotated[
        str | None,
        about(
            "Kernels on trial to use, separated by commas, or all, or none (docs/gpu-checklist.md lists them). They "
            "change speed only: a start at which bits differ does without. Default: those that `gpu_tune.py "
            "--candidates` has chosen for this GPU."
        ),
    ] = None


def check(config: Config) -> None:
    """Raise StartError for a candidate that does not exist."""
    candidates.selected(config.options_of(GpuOptions).gpu_candidates or "none", "")
