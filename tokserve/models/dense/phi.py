"""Phi 1 and 2: attention and MLP side by side after one norm, biases everywhere, the head's too.

Phi 3 and 4: q, k and v are one tensor in a checkpoint, gate and up another; part of a head may be rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.models.block import SINGLE
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


def phi(hf: Mapping[str, Any]) -> DecoderSpec:
    """Phi 1, 1.5 and 2."""
    fields = ConfigReader({"hidden_act": "gelu_new"} | dict(hf))
    if fields.flag("qk_layernorm"):
        raise fields.unsupported("qk_layernorm", "(a layer norm for each head) is not built in")
    return dense(
        fields,
        max_position=2048,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rotary=0.5,
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        in_attention={"out_name": "dense"},
        in_mlp={"gated": False, "up_names": ("fc1",), "down_name": "fc2"},
        in_block={"norms": SINGLE, "parallel": True},
        norm_name="final_layernorm",
        head_bias=True,
    )
