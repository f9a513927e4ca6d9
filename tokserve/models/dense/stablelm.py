"""StableLM and Nemotron: layer norms with biases, part of a head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.models.block import BEFORE, SINGLE
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.spec import dense


def stablelm(hf: Mapping[str, Any]) -> DecoderSpec:
    """StableLM 2 and 3B: attention and MLP one after the other or side by side."""
    fields = ConfigReader(dict(hf) | {"head_dim": None})  # which it does not read
    if fields.flag("qk_layernorm"):
        raise fields.unsupported("qk_layernorm", "(a layer norm for each head) is not built in")
    parallel = fields.flag("use_parallel_residual")
    return dense(
        fields,
        max_position=4096,
        kv_heads=32,
        qkv_bias=fields.flag("use_qkv_bias"),
        rotary=0.25,
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        in_block={"norms": SINGLE if parallel else BEFORE, "parallel": parallel},
    )


def nemotron(hf: Mapping[str, Any]) -> DecoderSpec:
    """Nemotron 3 to 4 and Minitron: an MLP without a gate; norms store the difference from 1."""
    fields = ConfigReader({"hidden_act": "relu2"} | dict(hf))
    bias = fields.flag("attention_bias")
    return dense(
        fields,
        max_position=4096,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        rotary=0.5,
        norm=NormSpec(fields.number("norm_eps", 1e-5), offset=1.0, kind="layer", bias=True),
        in_mlp={"gated": False, "up_names": ("up_proj",)},
    )
