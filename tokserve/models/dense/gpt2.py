"""GPT-2: learned positions, projections stored as [inputs, outputs], an MLP without a gate, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokserve.layers.embedding import PositionsSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import NO_ROPE
from tokserve.models.block import BlockNorms
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.dense.gpt_neox import masks
from tokserve.models.spec import dense

SIZES = {  # in its config.json, and elsewhere; transformers reads both
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 1024,
}
NAMES = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.wpe.", "model.embed_positions."),
    ("transformer.h.", "model.layers."),
    ("transformer.ln_f.", "model.norm."),
    ("wte.", "model.embed_tokens."),
    ("wpe.", "model.embed_positions."),
    ("h.", "model.layers."),
    ("ln_f.", "model.norm."),
)


def gpt2(hf: Mapping[str, Any]) -> DecoderSpec:
    """GPT-2 and others of this form, such as DistilGPT-2 and Cerebras-GPT."""
    sizes = {SIZES[name]: value for name, value in hf.items() if name in SIZES}
    fields = ConfigReader(DEFAULTS | sizes | dict(hf) | {"head_dim": None, "num_key_value_heads": None})
    if fields.flag("add_cross_attention"):
        raise fields.unsupported("add_cross_attention", "is not supported")
    inner = fields.integer("n_inner", 4 * fields.integer("hidden_size"))
    acts = fields.text("activation_function", "gelu_new")
    fields = ConfigReader(dict(fields.values) | {"intermediate_size": inner, "hidden_act": acts})
    layers, positions = fields.integer("num_hidden_layers"), fields.integer("max_position_embeddings")
    spec = dense(
        fields,
        max_position=positions,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm=NormSpec(fields.number("layer_norm_epsilon", 1e-5), kind="layer", bias=True),
        ropes=(NO_ROPE,) * layers,
        renames=masks(fields, ("transformer.h", "h"), "attn") + NAMES,
        in_attention={"qkv_names": ("c_attn",), "out_name": "c_proj"}
        | ({} if fields.flag("scale_attn_weights", True) else {"scale": 1.0}),
        in_mlp={"gated": False, "up_names": ("c_fc",), "down_name": "c_proj"},
        in_block={"norms": BlockNorms("ln_1", "", "ln_2", ""), "attention_name": "attn", "transposed": True},
        tied=True,
        position_table=PositionsSpec(positions),
    )
    if not fields.flag("scale_attn_by_inverse_layer_idx"):
        return spec
    scale = spec.blocks[0].attention.scale  # type: ignore[attr-defined]
    blocks = (
        replace(block, attention=replace(block.attention, scale=scale / (number + 1)))  # type: ignore[type-var]
        for number, block in enumerate(spec.blocks)
    )
    return replace(spec, blocks=tuple(blocks))
