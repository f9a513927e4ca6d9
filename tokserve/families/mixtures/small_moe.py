"""More families with a mixture of experts in the blocks of a dense family: OLMoE, FlexOlmo, ERNIE 4.5, dots.llm1,
MiniMax-M2 and HunYuan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures.experts import RouterSpec
from tokserve.families.mixtures.moe import (
    MIXTRAL_NAMES,
    grouped_router,
    mixture,
    routed_and_shared,
    shared_mlp,
    with_mixture,
)
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.dense.llama import ernie4_5, hunyuan
from tokserve.models.dense.olmo import olmo2
from tokserve.models.spec import HEADLESS, dense, layer_windows, no_extra_layers, window_size

WHOLE_NORMS = {"norm_scope": "all"}  # of all query heads of a token together, and of all key heads


def olmoe(hf: Mapping[str, Any]) -> DecoderSpec:
    """OLMoE: norms over all heads, experts in every layer."""
    fields = ConfigReader({"rms_norm_eps": 1e-5} | dict(hf))
    if fields.present("clip_qkv"):
        raise fields.unsupported("clip_qkv", "is not supported")
    bias = fields.flag("attention_bias")
    spec = dense(
        fields,
        max_position=4096,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        in_attention=WHOLE_NORMS,
    )
    router = RouterSpec(fields.integer("num_experts_per_tok", 8), normalize=fields.flag("norm_topk_prob"))
    experts = mixture(fields, router, count=("num_experts", 64), inner=("intermediate_size", 2048))
    return with_mixture(spec, experts, [True] * len(spec.blocks))


def flex_olmo(hf: Mapping[str, Any]) -> DecoderSpec:
    """FlexOlmo: OLMo 2 with experts in every layer."""
    fields = ConfigReader({"rope_theta": 5e5, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6} | dict(hf))
    router = RouterSpec(fields.integer("num_experts_per_tok", 5), normalize=fields.flag("norm_topk_prob"))
    experts = mixture(fields, router, count=("num_experts", 7), inner=("intermediate_size", 11008))
    spec = olmo2(fields.values)
    return with_mixture(spec, experts, [True] * len(spec.blocks))


def ernie4_5_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """ERNIE 4.5: softmax scores with a correction bias, shared experts, dense layers by number."""
    fields = ConfigReader({"num_key_value_heads": 4} | dict(hf))
    if fields.flag("use_bias"):
        raise fields.unsupported("use_bias", "is not supported with experts")
    if fields.number("moe_norm_min", 1e-12) > 1e-12:
        raise fields.unsupported("moe_norm_min", "must not be above 1e-12")
    heads = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    spec = ernie4_5({"head_dim": heads} | dict(fields.values))
    router = RouterSpec(
        fields.integer("moe_k", fields.integer("num_experts_per_tok", 6)),
        correction_bias="moe_statics.e_score_correction_bias",
        correction_row=True,
    )
    inner, shared = (
        fields.integer("moe_intermediate_size", 1536),
        fields.integer("moe_num_shared_experts", 2, minimum=0),
    )
    experts = mixture(
        fields,
        router,
        count=("moe_num_experts", 64),
        inner=("moe_intermediate_size", 1536),
        shared=shared_mlp(fields, inner * shared) if shared else None,
        shared_name="shared_experts",
    )
    layers = len(spec.blocks)
    first, step = fields.integer("moe_layer_start_index", 1, minimum=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last = layers - 1 if last == -1 else last
    sparse = [first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers)]
    unused = (("model.mtp_", ""), ("mtp_", ""))  # another head, which predicts more tokens
    renames = (*unused, (".mlp.gate.moe_statics.", ".mlp.moe_statics."), *spec.renames)
    return with_mixture(replace(spec, renames=renames), experts, sparse)


def dots1(hf: Mapping[str, Any]) -> DecoderSpec:
    """dots.llm1: the blocks of Qwen 3, the experts of DeepSeek V3."""
    fields, layers = ConfigReader(hf), range(ConfigReader(hf).integer("num_hidden_layers"))
    window, first = window_size(fields, 4096), fields.integer("max_window_layers", 62, minimum=0)
    windows = layer_windows(fields, window, lambda layer: layer >= first)
    bias = fields.flag("attention_bias")
    spec = dense(
        fields,
        windows=windows,
        max_position=2048,
        kv_heads=32,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
    router = grouped_router(fields, chosen=None, normalize=False)
    experts = routed_and_shared(fields, router, count=None, inner=1408, shared=None)
    dense_layers = fields.integer("first_k_dense_replace", 0, minimum=0)
    return with_mixture(spec, experts, [layer >= dense_layers for layer in layers])


def minimax_m2(hf: Mapping[str, Any]) -> DecoderSpec:
    """MiniMax-M2: Mixtral's names, norms over all heads, part of a head rotated, sigmoid scores with a correction."""
    fields = ConfigReader({"head_dim": 128, "rope_theta": 5e6} | dict(hf))
    dim = fields.integer("head_dim")
    spec = dense(
        fields,
        max_position=196608,
        kv_heads=8,
        qk_norm=True,
        in_attention=WHOLE_NORMS,
        rotary=fields.integer("rotary_dim", dim) / dim,
        renames=no_extra_layers(fields, 0) + HEADLESS + MIXTRAL_NAMES,
    )
    router = RouterSpec(
        fields.integer("num_experts_per_tok", 8), sigmoid=True, correction_bias="e_score_correction_bias"
    )
    experts = mixture(
        fields, router, count=("num_local_experts", 256), inner=("intermediate_size", 1536), names=("w1", "w3", "w2")
    )
    return with_mixture(spec, experts, [True] * len(spec.blocks), "block_sparse_moe")


def hunyuan_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """HunYuan with experts in every layer, and a shared one as wide as they are."""
    fields = ConfigReader(hf)
    if fields.flag("use_cla"):
        raise fields.unsupported("use_cla", "(layers that share keys and values) is not supported")
    spec, top = hunyuan(hf), fields.values.get("moe_topk", fields.values.get("num_experts_per_tok"))
    counts = top if isinstance(top, list) else [1 if top is None else top] * len(spec.blocks)
    if len(counts) != len(spec.blocks):
        raise fields.refuse("moe_topk", f"has {len(counts)} entries for {len(spec.blocks)} layers")
    blocks = []
    for block, chosen in zip(spec.blocks, counts, strict=True):
        router = RouterSpec(ConfigReader({"moe_topk": chosen}).integer("moe_topk"))
        experts = mixture(
            fields,
            router,
            count=("num_experts", 1),
            inner=("intermediate_size", 11008),
            router_name="gate.wg",
            shared=shared_mlp(fields, fields.integer("intermediate_size", 11008)),
            shared_name="shared_mlp",
        )
        blocks.append(replace(block, mlp=experts))
    return replace(spec, blocks=tuple(blocks))
