"""Granite with experts in every layer, and what Granite 4 has beside its state-space layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures.experts import RouterSpec
from tokserve.families.mixtures.moe import mixture, shared_mlp, with_mixture
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.rope import NO_ROPE
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.dense.granite import granite_spec

FUSED_MLP: dict[str, Any] = {"up_names": ("input_linear",), "down_name": "output_linear"}
MOE_NAMES = (  # transformers 5 has other names
    (".block_sparse_moe.router.layer.", ".block_sparse_moe.router."),
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
)


def granite_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """Granite 3 with experts in every layer."""
    fields = ConfigReader(hf)
    return _with_experts(granite_spec(fields), fields, None)


def granite_moe_shared(hf: Mapping[str, Any]) -> DecoderSpec:
    """Granite 3 with experts and, where it has a width, a shared one."""
    fields = ConfigReader(hf)
    inner = fields.integer("shared_intermediate_size", 0, minimum=0)
    shared = replace(shared_mlp(fields, inner), **FUSED_MLP) if inner else None
    return _with_experts(granite_spec(fields), fields, shared)


def _with_experts(spec: DecoderSpec, fields: ConfigReader, shared: MLPSpec | None) -> DecoderSpec:
    experts = mixture(
        fields,
        RouterSpec(fields.integer("num_experts_per_tok", 2)),
        count=("num_local_experts", 8),
        inner=("intermediate_size", 11008),
        stacked=True,
        router_name="block_sparse_moe.router",
        experts_name="block_sparse_moe.experts",
        shared=shared,
        shared_name="shared_mlp",
    )
    spec = replace(spec, renames=MOE_NAMES + spec.renames)
    return with_mixture(spec, experts, [True] * len(spec.blocks), "")


def granite_attending(fields: ConfigReader) -> DecoderSpec:
    """Granite 4 with attention in every layer: gate and up are one tensor; rope and experts may be missing."""
    inner = fields.integer("shared_intermediate_size", 1024)
    turned = fields.text("position_embedding_type", "nope") == "rope"
    spec = granite_spec(
        fields,
        ropes=() if turned else (NO_ROPE,) * fields.integer("num_hidden_layers"),
        in_mlp={"inner": inner} | FUSED_MLP,
        in_block={"mlp_name": "shared_mlp"},
    )
    if not fields.integer("num_local_experts", 8, minimum=0):
        return spec
    return _with_experts(spec, fields, replace(shared_mlp(fields, inner), **FUSED_MLP))
