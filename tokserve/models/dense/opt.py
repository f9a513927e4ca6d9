"""OPT: learned positions, of which the first two rows are not used, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.embedding import PositionsSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import NO_ROPE
from tokserve.models.block import BlockNorms
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.spec import dense

NAMES = (
    ("model.decoder.final_layer_norm.", "model.norm."),
    ("model.decoder.", "model."),
    ("decoder.final_layer_norm.", "model.norm."),
    ("decoder.", "model."),
    ("final_layer_norm.", "model.norm."),
)
FIRST = 2  # row of the table of positions


def opt(hf: Mapping[str, Any]) -> DecoderSpec:
    """OPT but the 350 million parameter model, and Galactica."""
    fields = ConfigReader(
        {"max_position_embeddings": 2048} | dict(hf) | {"head_dim": None, "num_key_value_heads": None}
    )
    if not fields.flag("do_layer_norm_before", True):
        raise fields.unsupported("do_layer_norm_before", "is false, which is not built in")
    if fields.flag("_remove_final_layer_norm"):
        raise fields.unsupported("_remove_final_layer_norm", "is not built in")
    hidden = fields.integer("hidden_size")
    if fields.integer("word_embed_proj_dim", hidden) != hidden:
        raise fields.unsupported("word_embed_proj_dim", f"is not hidden_size {hidden}, which is not built in")
    changes = {"intermediate_size": fields.integer("ffn_dim", 3072)}
    fields = ConfigReader(dict(fields.values) | changes | {"hidden_act": fields.text("activation_function", "relu")})
    bias, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    positions = fields.integer("max_position_embeddings")
    return dense(
        fields,
        max_position=positions,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norm=NormSpec(1e-5, kind="layer", bias=affine, learned=affine),
        ropes=(NO_ROPE,) * fields.integer("num_hidden_layers"),
        renames=NAMES,
        in_attention={"out_name": "out_proj"},
        in_mlp={"gated": False, "up_names": ("fc1",), "down_name": "fc2"},
        in_block={"norms": BlockNorms("self_attn_layer_norm", "", "final_layer_norm", ""), "mlp_name": ""},
        tied=True,
        position_table=PositionsSpec(positions + FIRST, FIRST),
    )
