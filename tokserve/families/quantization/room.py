"""The room of quantized weights: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    parts={
        "methods": "tokserve.families.quantization.methods:quant_methods",
        "checkpoint_format": "tokserve.families.quantization.formats.pick:checkpoint_format",
        "refuse": "tokserve.families.quantization.formats.pick:refuse_unsupported",
    },
)
