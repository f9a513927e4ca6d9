"""Hybrids: families most of whose layers have a recurrent state in place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures.experts import RouterSpec
from tokserve.families.mixtures.moe import mixture, shared_mlp, sparse_layers, with_mixture
from tokserve.families.recurrent.layers import GatedDeltaSpec, ShortConvSpec
from tokserve.layers.attention import AttentionSpec
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.models.block import BlockNorms, BlockSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec, Renames
from tokserve.models.rope_config import rope
from tokserve.models.spec import HEADLESS, attention, decoder, head_size, layer_kinds, mlp

LFM2 = {"num_key_value_heads": 8, "norm_eps": 1e-5, "tie_word_embeddings": True}  # where the config does not say
LFM2_NORMS = BlockNorms("operator_norm", "", "ffn_norm", "")
# Draft heads and a vision tower are not served; text models beside a tower have a longer prefix.
QWEN_NAMES: Renames = (("mtp.", ""), *HEADLESS)
QWEN3_5_NAMES: Renames = (
    ("model.visual.", ""),
    ("visual.", ""),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
    *QWEN_NAMES,
)


def qwen3_next(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3-Next: the gated delta rule in three layers of four, gated attention in the others, experts."""
    fields = ConfigReader(hf)
    spec = _qwen(fields, grouped=True, inner=5632, kv_heads=2, renames=QWEN_NAMES)
    return _with_experts(fields, spec, sparse_layers(fields), count=512, chosen=10, normalize=True)


def qwen3_5(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 3.5's text model without experts: as Qwen3-Next, with other tensors."""
    return _qwen(ConfigReader(hf), grouped=False, inner=12288, kv_heads=4, renames=QWEN3_5_NAMES)


def qwen3_5_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 3.5's text model with experts in every layer."""
    fields = ConfigReader(hf)
    spec = _qwen(fields, grouped=False, inner=1, kv_heads=2, renames=QWEN3_5_NAMES)
    return _with_experts(fields, spec, [True] * len(spec.blocks), count=256, chosen=8, normalize=None)


def lfm2(hf: Mapping[str, Any]) -> DecoderSpec:
    """LFM2: gated short convolutions, with attention in a few layers."""
    fields = ConfigReader(LFM2 | dict(hf))
    return _lfm2(fields, _lfm2_width(fields))


def lfm2_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """LFM2 with experts, but in the first layers."""
    fields = ConfigReader(LFM2 | dict(hf))
    spec = _lfm2(fields, fields.integer("intermediate_size", 7168))
    router = RouterSpec(
        fields.integer("num_experts_per_tok", 4),
        sigmoid=True,
        normalize=fields.flag("norm_topk_prob", True),
        added=1e-6,
        scale=fields.number("routed_scaling_factor", 1.0),
        correction_bias="expert_bias" if fields.flag("use_expert_bias", True) else None,
    )
    activated = ConfigReader(dict(fields.values) | {"hidden_act": "silu"})  # whatever the config says
    experts = mixture(
        activated, router, count=("num_experts", 32), inner=("moe_intermediate_size", 1792), names=("w1", "w3", "w2")
    )
    dense = fields.integer("num_dense_layers", 2, minimum=0)
    return with_mixture(spec, experts, [layer >= dense for layer in range(len(spec.blocks))], "feed_forward")


def _lfm2(fields: ConfigReader, inner: int) -> DecoderSpec:
    feed_forward = MLPSpec(inner, "silu", up_names=("w1", "w3"), down_name="w2")
    norm = NormSpec(fields.number("norm_eps"))
    dim, positions = head_size(fields), fields.integer("max_position_embeddings", 128000)
    attend = attention(fields, dim=dim, rope=rope(fields, dim, positions, theta=1e6), qk_norm=norm)
    attend = replace(attend, out_name="out_proj", norm_names=("q_layernorm", "k_layernorm"))
    conv = ShortConvSpec(fields.integer("conv_L_cache", 3), fields.flag("conv_bias"))
    layers = fields.integer("num_hidden_layers")
    attending = fields.integers("full_attn_idxs")
    kinds = layer_kinds(fields, {"full_attention": True, "conv": False}, fields.refuse) or [
        not fields.present("full_attn_idxs") or layer in attending for layer in range(layers)
    ]

    def block(attends: bool) -> BlockSpec:
        mixer: AttentionSpec | ShortConvSpec = attend if attends else conv
        name = "self_attn" if attends else "conv"
        return BlockSpec(mixer, feed_forward, norm, norms=LFM2_NORMS, mlp_name="feed_forward", attention_name=name)

    return decoder(
        fields,
        tuple(map(block, kinds)),
        max_position=128000,
        tied=fields.flag("tie_embedding", fields.flag("tie_word_embeddings")),
        renames=(("embedding_norm.", "model.embedding_norm."), *HEADLESS),
        norm_name="embedding_norm",
    )


def _lfm2_width(fields: ConfigReader) -> int:
    inner = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    unit = fields.integer("block_multiple_of", 256)
    return -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3)) // unit) * unit


def _qwen(fields: ConfigReader, *, grouped: bool, inner: int, kv_heads: int, renames: Renames) -> DecoderSpec:
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6), offset=1.0)
    dim, positions = head_size(fields, 256), fields.integer("max_position_embeddings", 32768)
    bias, layers = fields.flag("attention_bias"), fields.integer("num_hidden_layers")
    attend = attention(
        fields,
        dim=dim,
        rope=rope(fields, dim, positions, rotary=0.25),
        kv_heads=kv_heads,
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
    )
    attend = replace(attend, gated=True)
    delta = _gated_delta(fields, grouped)
    feed_forward = mlp(ConfigReader({"intermediate_size": inner} | dict(fields.values)), "hidden_act", "silu")
    every = fields.integer("full_attention_interval", 4)
    kinds = layer_kinds(fields, {"full_attention": True, "linear_attention": False}, fields.refuse)
    kinds = kinds or [(layer + 1) % every == 0 for layer in range(layers)]
    blocks = tuple(
        BlockSpec(attend, feed_forward, norm)
        if attends
        else BlockSpec(delta, feed_forward, norm, attention_name="linear_attn")
        for attends in kinds
    )
    return decoder(fields, blocks, max_position=32768, renames=renames)


def _gated_delta(fields: ConfigReader, grouped: bool) -> GatedDeltaSpec:
    heads, key_heads = fields.integer("linear_num_value_heads", 32), fields.integer("linear_num_key_heads", 16)
    dim, key_dim = fields.integer("linear_value_head_dim", 128), fields.integer("linear_key_head_dim", 128)
    if heads % key_heads:
        raise fields.refuse("linear_num_value_heads", f"{heads} is not a multiple of linear_num_key_heads {key_heads}")
    if (activation := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", f"{activation!r} is not supported by linear attention")
    keys, values = key_heads * key_dim, heads * dim
    names = (
        {"in_proj_qkvz": 2 * keys + 2 * values}
        if grouped
        else {
            "in_proj_qkv": 2 * keys + values,
            "in_proj_z": values,
        }
    )
    return GatedDeltaSpec(
        heads,
        dim,
        key_heads,
        key_dim,
        taps=fields.integer("linear_conv_kernel_dim", 4),
        eps=fields.number("rms_norm_eps", 1e-6),
        grouped=grouped,
        names=tuple(names.items()),
        rate_names=(("in_proj_ba", 2 * heads),) if grouped else (("in_proj_b", heads), ("in_proj_a", heads)),
    )


def _with_experts(
    fields: ConfigReader, spec: DecoderSpec, layers: list[bool], *, count: int, chosen: int, normalize: bool | None
) -> DecoderSpec:
    """`count`, `chosen`, `normalize`: what the family assumes; the last None: it always does."""
    router = RouterSpec(
        fields.integer("num_experts_per_tok", chosen),
        normalize=True if normalize is None else fields.flag("norm_topk_prob", normalize),
    )
    shared = shared_mlp(fields, fields.integer("shared_expert_intermediate_size", 512))
    experts = mixture(
        fields,
        router,
        count=("num_experts", count),
        inner=("moe_intermediate_size", 512),
        shared=shared,
        shared_gate=True,
    )
    return with_mixture(spec, experts, layers)
