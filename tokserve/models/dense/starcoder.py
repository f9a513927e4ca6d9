"""StarCoder 2: layer norms with biases, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.spec import dense, window_size


def starcoder2(hf: Mapping[str, Any]) -> DecoderSpec:
    """StarCoder 2."""
    fields = ConfigReader({"hidden_act": "gelu_pytorch_tanh"} | dict(hf))
    bias, window = fields.flag("use_bias", True), window_size(fields, 0, minimum=0)
    return dense(
        fields,
        windows=(window,) * fields.integer("num_hidden_layers"),
        max_position=4096,
        kv_heads=2,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norm=NormSpec(fields.number("norm_epsilon", 1e-5), kind="layer", bias=True),
        in_mlp={"gated": False, "up_names": ("c_fc",), "down_name": "c_proj"},
        tied=True,
    )
