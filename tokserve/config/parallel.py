"""Options of several engines."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tokserve.config.common import about


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many engines serve the model, and on what (docs/scale.md)."""

    data_parallel_size: Annotated[
        int,
        about("Engines that each hold the whole model, behind one address: a request is served by the engine that has "
              "its prefix cached or has the least to do. No result depends on which.", ge=1, le=64),
    ] = 1  # fmt: skip
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        about("Where engines run: mp, as processes on this machine; ray, on nodes of a Ray cluster, whose address is "
              "in RAY_ADDRESS or which has a node here. Needs tokserve[ray], and on CPUs --cpu-threads, which Ray "
              "reserves for each engine."),
    ] = "mp"  # fmt: skip
