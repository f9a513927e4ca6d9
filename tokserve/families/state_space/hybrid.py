"""Families with state-space layers beside attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures.granite_moe import granite_attending
from tokserve.families.state_space.layers import StateSpaceSpec
from tokserve.models.block import BlockNorms, BlockSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.spec import HEADLESS, dense

KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}  # whether they attend
BAMBA_NORMS = BlockNorms(before_mlp="pre_ff_layernorm")


def bamba(hf: Mapping[str, Any]) -> DecoderSpec:
    """Bamba: state-space layers, and attention, half of whose heads is rotated, in a few."""
    fields = ConfigReader({"rms_norm_eps": 1e-5} | dict(hf))
    attending = fields.integers("attn_layer_indices")
    spec = dense(
        fields,
        max_position=262144,
        kv_heads=8,
        qkv_bias=fields.flag("attention_bias"),
        out_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        rotary=0.5,
        in_block={"mlp_name": "feed_forward", "norms": BAMBA_NORMS},
        norm_name="final_layernorm",
        renames=(("final_layernorm.", "model.final_layernorm."), *HEADLESS),
    )
    return _with_states(fields, spec, [layer in attending for layer in range(len(spec.blocks))])


def granite_hybrid(hf: Mapping[str, Any]) -> DecoderSpec:
    """Granite 4: state-space layers, and attention in a few or all; rope and experts may be missing."""
    fields = ConfigReader(hf)
    spec, name = granite_attending(fields), "layers_block_type"
    kinds = fields.texts(name if fields.present(name) else "layer_types") or ["mamba"] * len(spec.blocks)
    if unknown := sorted(set(kinds) - KINDS.keys()):
        raise fields.refuse("layer_types", f"names unsupported kinds: {', '.join(unknown)}")
    if len(kinds) != len(spec.blocks):
        raise fields.refuse("layer_types", f"has {len(kinds)} entries for {len(spec.blocks)} layers")
    return _with_states(fields, spec, [KINDS[kind] for kind in kinds])


def _with_states(fields: ConfigReader, spec: DecoderSpec, attends: list[bool]) -> DecoderSpec:
    """The spec with a state-space layer where attention is not."""
    if all(attends):
        return spec
    layer = _state_space(fields, spec.hidden)

    def scans(block: BlockSpec) -> BlockSpec:
        return replace(block, attention=layer, attention_name="mamba")

    blocks = tuple(block if attend else scans(block) for block, attend in zip(spec.blocks, attends, strict=True))
    return replace(spec, blocks=blocks)


def _state_space(fields: ConfigReader, hidden: int) -> StateSpaceSpec:
    heads, inner = fields.integer("mamba_n_heads", 128), fields.integer("mamba_expand", 2) * hidden
    automatic = fields.values.get("mamba_d_head", "auto") == "auto"
    dim = max(1, inner // heads) if automatic else fields.integer("mamba_d_head")
    if heads * dim != inner:
        raise fields.refuse("mamba_n_heads", f"{heads} heads of {dim} are not {inner} elements")
    return state_space(
        fields,
        ("mamba_n_heads", heads),
        dim,
        ("mamba_n_groups", fields.integer("mamba_n_groups", 1)),
        fields.integer("mamba_d_state", 256),
        taps=fields.integer("mamba_d_conv", 4),
        eps=fields.number("rms_norm_eps", 1e-6),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias"),
        limits=step_limits(fields),
    )


def state_space(
    fields: ConfigReader,
    heads: tuple[str, int],
    dim: int,
    groups: tuple[str, int],
    size: int,
    *,
    activation: str = "hidden_act",
    **more: Any,
) -> StateSpaceSpec:
    """The layer whose outputs are normalized by groups.  `heads`, `groups`: with the attributes that say how
    many; `activation`: the attribute that names that of the convolution and the gate; `more`: fields of the spec.
    Raises StartError."""
    (name, count), (of_groups, parts) = heads, groups
    if count % parts:
        raise fields.refuse(name, f"{count} is not a multiple of {of_groups} {parts}")
    if (value := fields.text(activation, "silu")) not in ("silu", "swish"):
        raise fields.refuse(activation, f"{value!r} is not supported by state-space layers")
    return StateSpaceSpec(count, dim, parts, size, norm_size=count * dim // parts, **more)


def step_limits(fields: ConfigReader) -> tuple[float, float]:
    """`time_step_limit`, in which transformers writes infinity as an object."""
    stored = fields.values.get("time_step_limit")
    if stored is None:
        return 0.0, math.inf
    try:
        low, high = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in stored)
    except (KeyError, TypeError, ValueError):
        low = high = math.nan
    if not 0 <= low <= high:
        raise fields.refuse("time_step_limit", f"must be two numbers, the first at most the second, found {stored!r}")
    return low, high
