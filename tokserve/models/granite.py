"""Granite: multipliers of embeddings, attention scores, what is added to the residual stream, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.rope import NO_ROPE
from tokserve.models.config_reader import ConfigReader
from tokserve.models.llama import HEADLESS
from tokserve.models.spec import DecoderSpec, dense, no_windows


def granite(hf: Mapping[str, Any]) -> DecoderSpec:
    """Granite 3."""
    fields = ConfigReader(hf)
    return _granite(fields, mlp_bias=fields.flag("mlp_bias"))


def granite_hybrid(hf: Mapping[str, Any]) -> DecoderSpec:
    """Granite 4 with attention in every layer and no experts: gate and up are one tensor; rope may be missing."""
    fields = ConfigReader(hf)
    name = "layers_block_type" if fields.present("layers_block_type") else "layer_types"
    if others := sorted(set(fields.texts(name) or ["mamba"]) - {"attention", "full_attention"}):
        kinds = ", ".join(others)
        raise fields.refuse(name, f"names unsupported kinds: {kinds}; of Granite 4, models without Mamba are served")
    if fields.integer("num_local_experts", 8, minimum=0):
        raise fields.refuse("num_local_experts", "is not 0; experts are not supported by this architecture")
    inner = fields.integer("shared_intermediate_size", 1024)
    turned = fields.text("position_embedding_type", "nope") == "rope"
    return _granite(
        fields,
        ropes=() if turned else (NO_ROPE,) * fields.integer("num_hidden_layers"),
        in_mlp={"inner": inner, "up_names": ("input_linear",), "down_name": "output_linear"},
        in_block={"mlp_name": "shared_mlp"},
    )


def _granite(fields: ConfigReader, *, in_block: Mapping[str, Any] | None = None, **more: Any) -> DecoderSpec:
    bias = fields.flag("attention_bias")
    return dense(
        fields,
        windows=no_windows(fields),
        max_position=2048,
        qkv_bias=bias,
        out_bias=bias,
        in_attention={"scale": fields.number("attention_multiplier", 1.0)},
        in_block={"residual_multiplier": fields.number("residual_multiplier", 1.0)} | dict(in_block or {}),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
        renames=HEADLESS,
        **more,
    )
