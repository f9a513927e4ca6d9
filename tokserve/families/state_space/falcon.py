"""Falcon-H1: attention and a state space side by side in every layer, and multipliers nearly everywhere.

A layer is two blocks of the decoder.  The first is the state space alone, whose input the second is given too; that has
attention and the MLP.  Multipliers of attention are those of its scores and of what it adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tokserve import ops
from tokserve.families.state_space.hybrid import state_space, step_limits
from tokserve.families.state_space.layers import StateSpaceSpec
from tokserve.layers.linear import Activation, Linear
from tokserve.layers.mlp import GatedMLP, MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.options import LayerOptions
from tokserve.models.block import BlockNorms, BlockSpec, NoMLPSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec, Renames
from tokserve.models.rope_config import rope
from tokserve.models.spec import attention, decoder, head_size, mlp

FIRST = BlockNorms("first_layernorm", before_mlp="")
SECOND = BlockNorms(before_attention="", before_mlp="second_layernorm")
# A module of a layer in checkpoints, in which of the two blocks it is, and its name there: none that a checkpoint has.
MODULES = (
    ("input_layernorm", 0, "first_layernorm"),
    ("mamba", 0, "first_mamba"),
    ("self_attn", 1, "second_attn"),
    ("pre_ff_layernorm", 1, "second_layernorm"),
    ("feed_forward", 1, "mlp"),
)
OUTER: Renames = (
    ("embed_tokens.", "model.embed_tokens."),
    ("final_layernorm.", "model.final_layernorm."),
)


@dataclass(frozen=True, slots=True)
class ScaledMLPSpec:
    """down(act(gate(x) * `gate`) * up(x)) * `down`, of the projections of `plain`."""

    plain: MLPSpec
    gate: float
    down: float

    @property
    def has_experts(self) -> bool:
        return False

    @property
    def routing(self) -> None:
        return None

    def layer(self, hidden: int, options: LayerOptions) -> ScaledMLP:
        """The layer without weights."""
        return ScaledMLP(hidden, self, options)

    def as_stored(self, hidden: int, shapes: Mapping[str, tuple[int, ...]]) -> ScaledMLPSpec:
        """Itself: checkpoints store its projections in one way."""
        return self


class ScaledMLP(GatedMLP):
    """`hidden` is the width of inputs and outputs.  The gate's multiplier multiplies what it gates, too, so what
    comes out is divided by it."""

    def __init__(self, hidden: int, spec: ScaledMLPSpec, options: LayerOptions) -> None:
        plain = spec.plain
        self.activation: Activation = plain.activation
        self.gate, self.scale = spec.gate, spec.down / spec.gate
        widths = dict.fromkeys(plain.up_names, plain.inner)
        self.gate_up = Linear(hidden, widths, options, bias=plain.bias, split="column")
        self.down = Linear(plain.inner, {plain.down_name: hidden}, options, bias=plain.bias, split="row")

    def __call__(
        self, x: Tensor, adapters: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        both = ops.cap(self.gate_up(x, adapters=adapters), self.gate, 0.0)
        gated = ops.activate(both, self.activation, True)
        return ops.cap(self.down(gated, adapters=adapters), self.scale, 0.0)


def falcon_h1(hf: Mapping[str, Any]) -> DecoderSpec:
    """Falcon-H1, with or without norms of the state spaces' outputs."""
    fields = ConfigReader({"rms_norm_eps": 1e-5} | dict(hf))
    layers, bias = fields.integer("num_hidden_layers"), fields.flag("attention_bias")
    inward, outward = (fields.number(f"attention_{way}_multiplier", 1.0) for way in ("in", "out"))
    if bias and inward != 1.0:
        raise fields.refuse("attention_in_multiplier", "is not supported with attention_bias")
    positions, dim = fields.integer("max_position_embeddings", 8192), head_size(fields)
    attend = attention(
        fields,
        dim=dim,
        rope=rope(fields, dim, positions),
        kv_heads=8,
        scale=dim**-0.5 * inward**2 * fields.number("key_multiplier", 1.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    gate, down = fields.numbers("mlp_multipliers", 2) if fields.present("mlp_multipliers") else (1.0, 1.0)
    added = outward * inward  # what attention adds is multiplied by both, what the MLP adds by `down`
    plain = mlp(fields, "hidden_act", "silu", bias=fields.flag("mlp_bias"))
    if plain.bias and gate != 1.0:
        raise fields.refuse("mlp_multipliers", "of the gate is not supported with mlp_bias")
    norm = NormSpec(fields.number("rms_norm_eps", 1e-5))
    first = BlockSpec(
        _state_space(fields),
        NoMLPSpec(),
        norm,
        FIRST,
        parallel=True,
        residual_multiplier=fields.number("ssm_out_multiplier", 1.0),
        attention_name="first_mamba",
    )
    second = BlockSpec(
        attend,
        ScaledMLPSpec(plain, gate, down / added),
        norm,
        SECOND,
        residual_multiplier=added,
        attention_name="second_attn",
    )
    return decoder(
        fields,
        (first, second) * layers,
        max_position=8192,
        renames=tuple(pair for layer in range(layers) for pair in _of_layer(layer)) + OUTER,
        norm_name="final_layernorm",
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
    )


def _of_layer(layer: int) -> Renames:
    """The names of a layer's modules in its two blocks."""
    return tuple(
        (f"{prefix}layers.{layer}.{module}.", f"model.layers.{2 * layer + block}.{name}.")
        for prefix in ("model.", "")
        for module, block, name in MODULES
    )


def _state_space(fields: ConfigReader) -> StateSpaceSpec:
    hidden, heads = fields.integer("hidden_size"), fields.integer("mamba_n_heads", 128)
    null = "mamba_d_ssm" in fields.values and not fields.present("mamba_d_ssm")
    inner = fields.integer("mamba_expand", 2) * hidden if null else fields.integer("mamba_d_ssm", 1024)
    automatic = fields.values.get("mamba_d_head", "auto") == "auto"
    dim = max(1, inner // heads) if automatic else fields.integer("mamba_d_head")
    if heads * dim != inner:
        raise fields.refuse("mamba_n_heads", f"{heads} heads of {dim} are not {inner} elements")
    bias, normed = fields.flag("mamba_proj_bias"), fields.flag("mamba_rms_norm")
    if bias != fields.flag("projectors_bias"):
        raise fields.refuse("projectors_bias", "must be what mamba_proj_bias is")
    if normed and fields.flag("mamba_norm_before_gate", True):
        raise fields.refuse("mamba_norm_before_gate", "is not supported")
    entering = fields.number("ssm_in_multiplier", 1.0)
    if bias and entering != 1.0:
        raise fields.refuse("ssm_in_multiplier", "is not supported with mamba_proj_bias")
    parts = fields.numbers("ssm_multipliers", 5) if fields.present("ssm_multipliers") else (1.0,) * 5
    multipliers = tuple(part * entering for part in parts)
    spec = state_space(
        fields,
        ("mamba_n_heads", heads),
        dim,
        ("mamba_n_groups", fields.integer("mamba_n_groups", 1)),
        fields.integer("mamba_d_state", 256),
        taps=fields.integer("mamba_d_conv", 4),
        eps=fields.number("rms_norm_eps", 1e-5),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=bias,
        limits=step_limits(fields),
        multipliers=() if set(multipliers) == {1.0} else multipliers,
    )
    return spec if normed else replace(spec, norm_size=0)
