"""OLMo 1, whose norms have no weights.

OLMo 2 and 3 have norms after attention and MLP, not before, and norms over all query and all key heads of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import RopeSpec
from tokserve.models.block import AFTER
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.rope_config import ropes_with_windows
from tokserve.models.spec import dense, head_size, layer_windows, window_size

MAX_POSITION = 2048
THETA = 500000.0  # of OLMo 3, where the config gives none


def olmo(hf: Mapping[str, Any]) -> DecoderSpec:
    """OLMo 1 without clipped queries, keys and values."""
    fields = ConfigReader(hf)
    if fields.present("clip_qkv"):
        raise fields.unsupported("clip_qkv", "is not built in")
    bias = fields.flag("attention_bias")
    norm = NormSpec(1e-5, kind="layer", learned=False)
    return dense(fields, max_position=MAX_POSITION, qkv_bias=bias, out_bias=bias, norm=norm)


def olmo2(hf: Mapping[str, Any]) -> DecoderSpec:
    return _olmo(ConfigReader(hf))


def olmo3(hf: Mapping[str, Any]) -> DecoderSpec:
    """OLMo 3: windows in three layers of four, whose rope is not stretched."""
    fields = ConfigReader(hf)
    windows = layer_windows(fields, window_size(fields, 4096), lambda layer: layer % 4 != 3)
    max_position = fields.integer("max_position_embeddings", MAX_POSITION)
    full, local = ropes_with_windows(fields, head_size(fields), max_position, THETA)
    return _olmo(fields, windows, tuple(local if window else full for window in windows))


def _olmo(
    fields: ConfigReader, windows: tuple[int, ...] | None = None, ropes: tuple[RopeSpec, ...] = ()
) -> DecoderSpec:
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
    )
