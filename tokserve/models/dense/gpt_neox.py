"""GPT-NeoX: attention and MLP side by side, each after a norm of its own; q, k and v of a head are together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec, Renames
from tokserve.models.spec import dense

NAMES = (
    ("gpt_neox.embed_in.", "model.embed_tokens."),
    ("gpt_neox.final_layer_norm.", "model.norm."),
    ("gpt_neox.", "model."),
    ("embed_out.", "lm_head."),
    ("embed_in.", "model.embed_tokens."),
    ("final_layer_norm.", "model.norm."),
    ("layers.", "model.layers."),
)


def gpt_neox(hf: Mapping[str, Any]) -> DecoderSpec:
    """GPT-NeoX-20B, Pythia, and others of this form; the parallel residual may be off."""
    theta, rotated = hf.get("rotary_emb_base"), hf.get("rotary_pct")
    older = {"rope_theta": 10000.0 if theta is None else theta}
    older |= {"partial_rotary_factor": 0.25 if rotated is None else rotated}
    # neither is in its config
    fields = ConfigReader({"hidden_act": "gelu"} | dict(hf) | older | {"head_dim": None, "num_key_value_heads": None})
    bias = fields.flag("attention_bias", True)
    return dense(
        fields,
        max_position=2048,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        rotary=0.25,
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        renames=masks(fields, ("gpt_neox.layers", "layers"), "attention") + NAMES,
        in_attention={"qkv_names": ("query_key_value",), "by_head": True, "out_name": "dense"},
        in_mlp={"gated": False, "up_names": ("dense_h_to_4h",), "down_name": "dense_4h_to_h"},
        in_block={"parallel": fields.flag("use_parallel_residual", True), "attention_name": "attention"},
    )


def masks(fields: ConfigReader, prefixes: tuple[str, ...], attention: str) -> Renames:
    """Causal masks, which older checkpoints store, as tensors that are not used."""
    layers = [f"{prefix}.{number}" for prefix in prefixes for number in range(fields.integer("num_hidden_layers"))]
    return tuple((f"{layer}.{attention}.{name}", "") for layer in layers for name in ("bias", "masked_bias"))
