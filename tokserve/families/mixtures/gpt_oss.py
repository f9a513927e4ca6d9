"""gpt-oss: every other layer has a window, heads have sinks, and all that is linear has a bias.

Checkpoints store the experts as MXFP4 (`formats/mxfp4`), or as the bfloat16 numbers that these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures.experts import MixtureSpec, RouterSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.spec import dense, layer_windows, window_size
from tokserve.ops.mixture import CLAMPED_LIMIT, CLAMPED_SLOPE

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(hf: Mapping[str, Any]) -> DecoderSpec:
    rope = {} if hf.get("rope_parameters") or hf.get("rope_scaling") else {"rope_parameters": YARN}
    fields = ConfigReader(DEFAULTS | dict(hf) | rope)
    for name, value in (("swiglu_limit", CLAMPED_LIMIT), ("swiglu_alpha", CLAMPED_SLOPE)):
        if fields.number(name, value) != value:
            raise fields.unsupported(name, f"must be {value}")
    bias = fields.flag("attention_bias", True)
    windows = layer_windows(fields, window_size(fields, 128), lambda layer: layer % 2 == 0)
    spec = dense(
        fields,
        windows=windows,
        max_position=131072,
        kv_heads=8,
        head_dim=64,
        qkv_bias=bias,
        out_bias=bias,
        in_attention={"sinks": True},
    )
    mixture = MixtureSpec(
        experts=fields.integer("num_local_experts", 128),
        inner=fields.integer("intermediate_size", 2880),
        router=RouterSpec(fields.integer("num_experts_per_tok", 4), bias=True),
        activation="clamped_swiglu",
        bias=True,
        stacked=True,
        interleaved=True,
        router_name="router",
    )
    return replace(spec, blocks=tuple(replace(block, mlp=mixture) for block in spec.blocks))
