"""GLM 4: half of a head is rotated, neighbours as pairs; gate and up are one tensor in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.models.block import BEFORE, BlockNorms
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.spec import dense

AROUND_GLM = BlockNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def glm(hf: Mapping[str, Any]) -> DecoderSpec:
    """GLM-4-9B and GLM-Edge."""
    return _glm(hf, BEFORE)


def glm4(hf: Mapping[str, Any]) -> DecoderSpec:
    """GLM-4-0414: norms after attention and MLP, too."""
    return _glm(hf, AROUND_GLM)


def _glm(hf: Mapping[str, Any], norms: BlockNorms) -> DecoderSpec:
    fields = ConfigReader(hf)
    return dense(
        fields,
        max_position=131072,
        kv_heads=2,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias", True),
        rotary=0.5,
        interleaved=True,
        norm=NormSpec(fields.number("rms_norm_eps", 1.5625e-07)),
        in_mlp={"up_names": ("gate_up_proj",)},
        in_block={"norms": norms},
    )
