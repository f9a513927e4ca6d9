"""Phi 3 and 4: q, k and v are one tensor in a checkpoint, gate and up another; part of a head may be rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.spec import dense, window_size


def phi3(hf: Mapping[str, Any]) -> DecoderSpec:
    """Phi 3, 3.5, 4 and 4 mini."""
    fields = ConfigReader({"original_max_position_embeddings": 4096} | dict(hf))
    window = window_size(fields, 0, minimum=0)
    return dense(
        fields,
        windows=(window,) * fields.integer("num_hidden_layers"),
        max_position=4096,
        rotary=1.0,
        norm=NormSpec(fields.number("rms_norm_eps", 1e-5)),
        in_attention={"qkv_names": ("qkv_proj",)},
        in_mlp={"up_names": ("gate_up_proj",)},
    )
