"""Cohere: attention and MLP side by side after one layer norm; neighbours rotate as pairs; logits are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import NO_ROPE
from tokserve.models.block import SINGLE
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.rope_config import rope
from tokserve.models.spec import dense, head_size, layer_windows, window_size

MAX_POSITION = 8192


def cohere(hf: Mapping[str, Any]) -> DecoderSpec:
    """Command R."""
    fields = ConfigReader(hf)
    if fields.flag("use_qk_norm"):
        raise fields.unsupported("use_qk_norm", "is not supported")
    return _cohere(fields, theta=5e5)


def cohere2(hf: Mapping[str, Any]) -> DecoderSpec:
    """Command R7B and A: windows in three layers of four, which alone are rotated."""
    fields = ConfigReader(hf)
    every = fields.integer("sliding_window_pattern", 4)
    windows = layer_windows(fields, window_size(fields, 4096), lambda layer: (layer + 1) % every != 0)
    return _cohere(fields, theta=1e4, windows=windows)


def _cohere(fields: ConfigReader, *, theta: float, windows: tuple[int, ...] | None = None) -> DecoderSpec:
    bias, dim = fields.flag("attention_bias"), head_size(fields)
    table = rope(fields, dim, fields.integer("max_position_embeddings", MAX_POSITION), theta=theta, interleaved=True)
    ropes = (table,) * fields.integer("num_hidden_layers")
    if windows is not None:
        ropes = tuple(table if window else NO_ROPE for window in windows)
    return dense(
        fields,
        windows=windows,
        max_position=MAX_POSITION,
        qkv_bias=bias,
        out_bias=bias,
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer"),
        ropes=ropes,
        in_block={"norms": SINGLE, "parallel": True},
        tied=True,
        logits_multiplier=fields.number("logit_scale", 0.0625),
    )
