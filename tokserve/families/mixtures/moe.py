"""Families whose blocks are those of a dense family, with a mixture of experts in place of the MLP of most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures.experts import MixtureSpec, RouterSpec
from tokserve.layers.mlp import MLPSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.rope_config import rope
from tokserve.models.spec import (
    HEADLESS,
    activation,
    dense,
    head_size,
    layer_windows,
    no_extra_layers,
    window_if_used,
    window_size,
)

MIXTRAL_NAMES = ((".mlp.", ".block_sparse_moe."),)  # transformers 5 calls the module so, checkpoints do not


def with_mixture(spec: DecoderSpec, mixture: MixtureSpec, layers: Sequence[bool], mlp_name: str = "mlp") -> DecoderSpec:
    """The spec with the mixture in the layers marked True.  `mlp_name`: of its module in a checkpoint."""
    blocks = (
        replace(block, mlp=mixture, mlp_name=mlp_name) if sparse else block
        for block, sparse in zip(spec.blocks, layers, strict=True)
    )
    return replace(spec, blocks=tuple(blocks))


def mixture(
    fields: ConfigReader,
    router: RouterSpec,
    *,
    count: tuple[str, int | None],
    inner: tuple[str, int | None],
    **options: Any,
) -> MixtureSpec:
    """`count` and `inner`: the attributes with the number of experts and their width, and what is assumed where they
    are absent; `options`: further fields."""
    names = (count[0], "num_local_experts", "num_experts")  # transformers saves some families' under another name
    experts = fields.integer(next((name for name in names if fields.present(name)), count[0]), count[1])
    if experts % router.groups:
        raise fields.refuse("n_group", f"{router.groups} does not divide the {experts} experts")
    if router.two_of_group and router.groups > 1 and experts // router.groups < 2:
        raise fields.refuse("n_group", f"{router.groups} leaves a group with one expert")
    if router.kept_groups > router.groups:
        raise fields.refuse("topk_group", f"is {router.kept_groups}, more than n_group {router.groups}")
    if router.chosen > experts // router.groups * router.kept_groups:
        raise fields.refuse("num_experts_per_tok", f"is {router.chosen}, more than there are to choose from")
    kind = activation(fields, "hidden_act", "silu")
    if kind not in ("silu", "gelu_tanh"):
        raise fields.unsupported("hidden_act", f"{fields.values['hidden_act']!r} is not supported for experts")
    return MixtureSpec(experts, fields.integer(*inner), router, kind, **options)


def shared_mlp(fields: ConfigReader, inner: int) -> MLPSpec:
    """A shared block of this width, without biases."""
    return MLPSpec(inner, activation(fields, "hidden_act", "silu"))


def grouped_router(
    fields: ConfigReader,
    *,
    chosen: int | None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    kept: int = 1,
) -> RouterSpec:
    """DeepSeek V3's: sigmoid scores plus a correction bias, groups by their best two; the arguments say what is assumed
    where attributes are absent."""
    return RouterSpec(
        fields.integer("num_experts_per_tok", chosen),
        sigmoid=True,
        normalize=fields.flag("norm_topk_prob", normalize),
        scale=fields.number("routed_scaling_factor", scale),
        groups=fields.integer("n_group", groups),
        kept_groups=fields.integer("topk_group", kept),
        two_of_group=True,
        correction_bias="gate.e_score_correction_bias",
    )


def routed_and_shared(
    fields: ConfigReader, router: RouterSpec, *, count: int | None, inner: int, shared: int | None, bias: bool = False
) -> MixtureSpec:
    """DeepSeek's: `count` routed experts of width `inner`, and `shared` of that width as one block, where absent;
    `bias`: of the shared block."""
    width = fields.integer("moe_intermediate_size", inner) * fields.integer("n_shared_experts", shared)
    return mixture(
        fields,
        router,
        count=("n_routed_experts", count),
        inner=("moe_intermediate_size", inner),
        shared=replace(shared_mlp(fields, width), bias=bias),
        shared_name="shared_experts",
    )


def sparse_layers(fields: ConfigReader) -> list[bool]:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step, plain = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    layers = range(fields.integer("num_hidden_layers"))
    return [layer not in plain and (layer + 1) % step == 0 for layer in layers]


def qwen3_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 3 with experts."""
    fields = ConfigReader(hf)
    bias = fields.flag("attention_bias")
    spec = dense(
        fields,
        windows=(window_if_used(fields),) * fields.integer("num_hidden_layers"),
        max_position=32768,
        kv_heads=4,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
    router = RouterSpec(fields.integer("num_experts_per_tok", 8), normalize=fields.flag("norm_topk_prob"))
    experts = mixture(fields, router, count=("num_experts", 128), inner=("moe_intermediate_size", 768))
    return with_mixture(spec, experts, sparse_layers(fields))


def qwen2_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 1.5 and 2 with experts, and a gated shared one."""
    fields = ConfigReader(hf)
    last = fields.integer("max_window_layers", 28, minimum=0)
    spec = dense(
        fields,
        windows=layer_windows(fields, window_if_used(fields), lambda layer: layer % 2 == 0 and layer < last),
        max_position=32768,
        kv_heads=16,
        qkv_bias=fields.flag("qkv_bias", True),
    )
    router = RouterSpec(fields.integer("num_experts_per_tok", 4), normalize=fields.flag("norm_topk_prob"))
    shared = shared_mlp(fields, fields.integer("shared_expert_intermediate_size", 5632))
    experts = mixture(
        fields,
        router,
        count=("num_experts", 60),
        inner=("moe_intermediate_size", 1408),
        shared=shared,
        shared_gate=True,
    )
    return with_mixture(spec, experts, sparse_layers(fields))


def mixtral(hf: Mapping[str, Any]) -> DecoderSpec:
    """Mixtral: experts in every layer."""
    fields = ConfigReader({"rms_norm_eps": 1e-5, "rope_theta": 1e6} | dict(hf))
    layers = fields.integer("num_hidden_layers")
    window = window_size(fields, 4096) if fields.present("sliding_window") else 0
    spec = dense(fields, windows=(window,) * layers, max_position=131072, kv_heads=8, renames=HEADLESS + MIXTRAL_NAMES)
    experts = mixture(
        fields,
        RouterSpec(fields.integer("num_experts_per_tok", 2)),
        count=("num_local_experts", 8),
        inner=("intermediate_size", 14336),
        names=("w1", "w3", "w2"),
    )
    return with_mixture(spec, experts, [True] * layers, "block_sparse_moe")


def solar_open(hf: Mapping[str, Any]) -> DecoderSpec:
    """Solar Open: GLM-4.5's experts in every layer, whole heads rotated."""
    fields = ConfigReader({"rms_norm_eps": 1e-5} | dict(hf))
    layers, dim = fields.integer("num_hidden_layers"), head_size(fields, 128)
    spec = dense(
        ConfigReader({"intermediate_size": 1} | dict(fields.values)),
        max_position=131072,
        kv_heads=8,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias"),
        ropes=(rope(fields, dim, fields.integer("max_position_embeddings", 131072), theta=1e6),) * layers,
    )
    experts = routed_and_shared(fields, grouped_router(fields, chosen=8), count=128, inner=1280, shared=1)
    return with_mixture(spec, experts, [True] * layers)


def glm4_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """GLM-4.5: sigmoid scores with a correction bias, a shared expert, dense layers first, half of a head rotated."""
    fields = ConfigReader({"rms_norm_eps": 1e-5} | dict(hf))
    bias, layers = fields.flag("attention_bias"), fields.integer("num_hidden_layers")
    spec = dense(
        fields,
        max_position=131072,
        kv_heads=8,
        qkv_bias=bias,
        qk_norm=fields.flag("use_qk_norm"),
        rotary=0.5,
    )
    experts = routed_and_shared(fields, grouped_router(fields, chosen=8), count=128, inner=1408, shared=1)
    first = fields.integer("first_k_dense_replace", 1, minimum=0)
    spec = replace(spec, renames=no_extra_layers(fields, 1) + spec.renames)
    return with_mixture(spec, experts, [layer >= first for layer in range(layers)])
