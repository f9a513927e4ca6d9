"""OLMo 2 and 3: norms after attention and MLP, not before; norms over all query and all key heads of a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import RopeSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.llama import HEADLESS
from tokserve.models.rope_config import rope_by_type, rope_spec
from tokserve.models.spec import AFTER, DecoderSpec, dense, every_but, head_size, no_windows, window_size

MAX_POSITION = 2048
THETA = 500000.0  # of OLMo 3, where the config gives none


def olmo2(hf: Mapping[str, Any]) -> DecoderSpec:
    """OLMo 2."""
    fields = ConfigReader(hf)
    return _olmo(fields, no_windows(fields))


def olmo3(hf: Mapping[str, Any]) -> DecoderSpec:
    """OLMo 3: windows in three layers of four, whose rope is not stretched."""
    fields = ConfigReader(hf)
    windows = every_but(fields, window_size(fields, 4096), 4)
    full, local = _ropes(fields)
    return _olmo(fields, windows, tuple(local if window else full for window in windows))


def _olmo(fields: ConfigReader, windows: tuple[int, ...], ropes: tuple[RopeSpec, ...] = ()) -> DecoderSpec:
    bias = fields.flag("attention_bias")
    return dense(
        fields,
        windows=windows,
        max_position=MAX_POSITION,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        norm=NormSpec(fields.number("rms_norm_eps", 1e-5)),
        ropes=ropes,
        in_attention={"norm_scope": "all"},
        in_block={"norms": AFTER},
        renames=HEADLESS,
    )


def _ropes(fields: ConfigReader) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of full attention and of windows: from `rope_parameters` by layer type, or from `rope_scaling` (of full
    attention alone) and `rope_theta`."""
    dim, positions = head_size(fields), fields.integer("max_position_embeddings", MAX_POSITION)
    theta, scaling = fields.number("rope_theta", THETA), fields.inner("rope_scaling")
    given = fields.inner("rope_parameters")
    if scaling.values or not any(isinstance(value, Mapping) for value in given.values.values()):
        scaling = scaling if scaling.values else given
        theta = scaling.number("rope_theta", theta)
        return rope_spec(fields, scaling, dim, positions, theta), RopeSpec(dim, theta)
    return (
        rope_by_type(fields, "full_attention", dim, positions, theta),
        rope_by_type(fields, "sliding_attention", dim, positions, theta),
    )
