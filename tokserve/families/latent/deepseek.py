"""Families with latent attention (`layers`): DeepSeek V2 and V3, GLM-4.7 Flash, and two without experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokserve.families.latent.layers import LatentAttentionSpec
from tokserve.families.mixtures.experts import MixtureSpec, RouterSpec
from tokserve.families.mixtures.moe import grouped_router, routed_and_shared
from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import yarn_scale
from tokserve.models.block import BlockSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.rope_config import rope, rope_values
from tokserve.models.spec import HEADLESS, decoder, mlp, no_extra_layers

SIZES = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}


def deepseek3(hf: Mapping[str, Any]) -> DecoderSpec:
    """DeepSeek V3 and R1, Kimi K2: sigmoid scores, groups of experts, dense layers first."""
    fields = ConfigReader(SIZES | dict(hf))
    experts = _noaux(fields, count=256, groups=8, kept=4, chosen=8, scale=2.5, inner=2048)
    first = fields.integer("first_k_dense_replace", 3, minimum=0)
    return _latent(fields, experts, [layer >= first for layer in _layers(fields)], extra=1, max_position=4096)


def glm4_moe_lite(hf: Mapping[str, Any]) -> DecoderSpec:
    """GLM-4.7 Flash: DeepSeek V3's blocks; `mlp_layer_types` says which have experts, else all but the first."""
    sizes = {
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "rms_norm_eps": 1e-5,
    }
    fields = ConfigReader(sizes | dict(hf))
    experts = _noaux(fields, count=64, groups=1, kept=1, chosen=4, scale=1.8, inner=1536)
    types = fields.texts("mlp_layer_types") or ["dense" if layer == 0 else "sparse" for layer in _layers(fields)]
    if len(types) != len(_layers(fields)) or set(types) - {"dense", "sparse"}:
        raise fields.refuse("mlp_layer_types", f"must say dense or sparse for each layer, found {types}")
    return _latent(fields, experts, [kind == "sparse" for kind in types], extra=1, max_position=202752)


def deepseek2(hf: Mapping[str, Any]) -> DecoderSpec:
    """DeepSeek V2: softmax scores that are not renormalized."""
    fields = ConfigReader(SIZES | dict(hf))
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.unsupported("topk_method", f"{method!r} is not supported")
    for name, only in (("norm_topk_prob", False), ("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        if fields.values.get(name, only) not in (only, None):
            raise fields.unsupported(name, f"must be {only}")
    limited = method == "group_limited_greedy"
    router = RouterSpec(
        fields.integer("num_experts_per_tok"),
        normalize=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group") if limited else 1,
        kept_groups=fields.integer("topk_group") if limited else 1,
    )
    experts = routed_and_shared(fields, router, count=64, inner=1407, shared=2, bias=fields.flag("mlp_bias"))
    first = fields.integer("first_k_dense_replace", 0, minimum=0)
    sparse = [layer >= first for layer in _layers(fields)]
    return _latent(fields, experts, sparse, interleaved=True, mlp_bias=fields.flag("mlp_bias"), max_position=2048)


def youtu(hf: Mapping[str, Any]) -> DecoderSpec:
    """Youtu-LLM: DeepSeek V3's attention, no experts."""
    return _latent(ConfigReader(SIZES | dict(hf)), tied=True, max_position=131072)


def minicpm3(hf: Mapping[str, Any]) -> DecoderSpec:
    """MiniCPM 3: DeepSeek V2's attention, no experts, and Granite's multipliers by other names."""
    sizes = {
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "rms_norm_eps": 1e-5,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
    fields = ConfigReader(sizes | dict(hf))
    hidden, count = fields.integer("hidden_size"), len(_layers(fields))
    return _latent(
        fields,
        interleaved=False,
        mlp_bias=fields.flag("mlp_bias"),
        value_dim=hidden // fields.integer("num_attention_heads"),
        residual_multiplier=fields.number("scale_depth", count**0.5) / count**0.5,
        tied=True,
        max_position=32768,
        embedding_multiplier=fields.number("scale_emb", 1.0),
        logits_multiplier=fields.number("dim_model_base", hidden) / hidden,
    )


def _layers(fields: ConfigReader) -> range:
    return range(fields.integer("num_hidden_layers"))


def _noaux(
    fields: ConfigReader, *, count: int, groups: int, kept: int, chosen: int, scale: float, inner: int
) -> MixtureSpec:
    """Experts chosen by sigmoid scores plus a correction bias; the arguments say what is assumed where absent."""
    if fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise fields.unsupported("scoring_func", "must be sigmoid")
    router = grouped_router(fields, chosen=chosen, scale=scale, groups=groups, kept=kept)
    return routed_and_shared(fields, router, count=count, inner=inner, shared=1)


def _attention(fields: ConfigReader, interleaved: bool, max_position: int, value_dim: int) -> LatentAttentionSpec:
    heads, rotated = fields.integer("num_attention_heads"), fields.integer("qk_rope_head_dim")
    for name in ("qk_rope_head_dim", "kv_lora_rank"):
        if fields.integer(name) % 2:
            raise fields.refuse(name, f"must be even, found {fields.integer(name)}")
    positions = fields.integer("max_position_embeddings", max_position)
    table = rope(fields, rotated, positions, interleaved=interleaved)
    plain = fields.integer("qk_nope_head_dim")
    scaling = rope_values(fields)
    stretched = table.kind != "default" and bool(scaling.values.get("mscale_all_dim"))
    mscale = yarn_scale(table.factor, scaling.number("mscale_all_dim")) if stretched else 1.0
    return LatentAttentionSpec(
        heads=heads,
        plain=plain,
        value_dim=fields.integer("v_head_dim", value_dim or None),
        latent=fields.integer("kv_lora_rank"),
        query_latent=fields.integer("q_lora_rank") if fields.present("q_lora_rank") else 0,
        scale=(plain + rotated) ** -0.5 * mscale * mscale,
        rope=table,
        norm=NormSpec(1e-6),  # whatever the config's rms_norm_eps
        bias=fields.flag("attention_bias"),
    )


def _latent(
    fields: ConfigReader,
    experts: MixtureSpec | None = None,
    sparse: Sequence[bool] = (),
    *,
    interleaved: bool | None = None,
    mlp_bias: bool = False,
    max_position: int,
    value_dim: int = 0,
    extra: int = 0,
    residual_multiplier: float = 1.0,
    **in_decoder: Any,
) -> DecoderSpec:
    """`interleaved` None: as `rope_interleave` says.  `extra`: layers of another head that checkpoints may have."""
    if interleaved is None:
        interleaved = fields.flag("rope_interleave", True)
    attend = _attention(fields, interleaved, max_position, value_dim)
    plain = mlp(fields, "hidden_act", "silu", bias=mlp_bias)
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6))
    blocks = tuple(
        BlockSpec(
            attend, experts if experts and sparse[layer] else plain, norm, residual_multiplier=residual_multiplier
        )
        for layer in _layers(fields)
    )
    renames = no_extra_layers(fields, extra) + HEADLESS
    return decoder(fields, blocks, max_position=max_position, renames=renames, **in_decoder)
