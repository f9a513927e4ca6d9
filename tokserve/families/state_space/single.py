"""Families each of whose layers is of one kind: a state space, attention or a feed-forward block.

A block of the decoder is a layer in which tokens meet and, where the next one is a feed-forward block, that layer too;
so the decoder has fewer blocks than the checkpoint has layers, and each block's names are renamed by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokserve.families.state_space.hybrid import state_space, step_limits
from tokserve.families.state_space.layers import StateSpaceSpec
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.protocols import MixerSpec
from tokserve.layers.rope import NO_ROPE
from tokserve.models.block import BEFORE, SINGLE, BlockSpec, NoMLPSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec, Renames
from tokserve.models.spec import activation, attention, decoder, head_size

SYMBOLS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}  # of hybrid_override_pattern
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
PREFIXES = ("backbone.", "model.", "")  # of a checkpoint's names: as released, as transformers 5 has them, headless


def nemotron_h(hf: Mapping[str, Any]) -> DecoderSpec:
    """Nemotron-H without experts: state spaces, a few layers of attention without rope, MLPs without gates."""
    fields = ConfigReader(dict(hf) | {"tie_word_embeddings": False})  # transformers never ties them
    kinds = _kinds(fields)
    inner = MLPSpec(
        fields.integer("intermediate_size", 21504),
        activation(fields, "mlp_hidden_act", "relu2", only_built_in=True),
        fields.flag("mlp_bias"),
        gated=False,
        up_names=("up_proj",),
    )
    mixers: dict[str, MixerSpec] = {"linear_attention": _nemotron_state_space(fields)}
    if "full_attention" in kinds:
        mixers["full_attention"] = attention(fields, dim=head_size(fields, 128), rope=NO_ROPE, kv_heads=8)
    return _decoder(fields, kinds, mixers, inner, max_position=4096)


def mamba2(hf: Mapping[str, Any]) -> DecoderSpec:
    """Mamba-2: state spaces alone.  The residual stream has the model's dtype, whatever `residual_in_fp32` says."""
    fields = ConfigReader(hf)
    hidden, heads, dim = fields.integer("hidden_size"), fields.integer("num_heads", 128), fields.integer("head_dim", 64)
    if heads * dim != (inner := fields.integer("expand", 2) * hidden):
        raise fields.refuse("num_heads", f"{heads} heads of {dim} are not {inner} elements")
    layer = state_space(
        fields,
        ("num_heads", heads),
        dim,
        ("n_groups", fields.integer("n_groups", 8)),
        fields.integer("state_size", 128),
        taps=fields.integer("conv_kernel", 4),
        eps=fields.number("layer_norm_epsilon", 1e-5),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias"),
        limits=step_limits(fields),
    )
    kinds = ["linear_attention"] * fields.integer("num_hidden_layers")
    return _decoder(fields, kinds, {"linear_attention": layer}, None, max_position=1 << 20)


def _nemotron_state_space(fields: ConfigReader) -> StateSpaceSpec:
    """Its step sizes have a lower limit of their own, and no upper one."""
    return state_space(
        fields,
        ("mamba_num_heads", fields.integer("mamba_num_heads", 128)),
        fields.integer("mamba_head_dim", 64),
        ("n_groups", _renamed(fields, "n_groups", "mamba_n_groups", 8)),
        fields.integer("ssm_state_size", 128),
        activation="mamba_hidden_act",
        taps=_renamed(fields, "conv_kernel", "mamba_d_conv", 4),
        eps=fields.number("layer_norm_epsilon", 1e-5),
        conv_bias=fields.flag("mamba_conv_bias" if fields.present("mamba_conv_bias") else "use_conv_bias", True),
        bias=fields.flag("use_bias"),
        limits=(fields.number("mamba_dt_min" if fields.present("mamba_dt_min") else "time_step_min", 0.001), math.inf),
    )


def _renamed(fields: ConfigReader, name: str, older: str, absent: int) -> int:
    """An attribute that older configs call otherwise."""
    return fields.integer(older if fields.present(older) else name, absent)


def _kinds(fields: ConfigReader) -> list[str]:
    """The kind of each layer, by name or by a letter each."""
    for name in ("layers_block_type", "layer_types"):
        if fields.present(name):
            kinds = [OLDER.get(kind, kind) for kind in fields.texts(name)]
            break
    else:
        name, letters = "hybrid_override_pattern", fields.text("hybrid_override_pattern", "ME*-")
        kinds = [SYMBOLS.get(letter, letter) for letter in letters]
    if unknown := sorted(set(kinds) - set(SYMBOLS.values())):
        raise fields.refuse(name, f"names unsupported kinds: {', '.join(unknown)}")
    if "moe" in kinds:
        raise fields.refuse(name, "names layers of experts without gates, which are not supported")
    if not kinds or any(one == "mlp" and (not i or kinds[i - 1] == "mlp") for i, one in enumerate(kinds)):
        raise fields.refuse(name, "must have attention or a state space before each feed-forward layer")
    return kinds


def _decoder(
    fields: ConfigReader, kinds: list[str], mixers: Mapping[str, MixerSpec], inner: MLPSpec | None, *, max_position: int
) -> DecoderSpec:
    """Blocks of the layers that mix, each with the feed-forward layer after it, if there is one."""
    norm = NormSpec(fields.number("layer_norm_epsilon", 1e-5))
    blocks: list[BlockSpec] = []
    renames: list[tuple[str, str]] = []
    for number, kind in enumerate(kinds):
        if kind == "mlp":
            renames += _of_layer(number, len(blocks) - 1, "post_attention_layernorm", "mlp")
            continue
        name = "mamba" if kind == "linear_attention" else "self_attn"
        renames += _of_layer(number, len(blocks), "input_layernorm", name)
        follows = inner if kinds[number + 1 : number + 2] == ["mlp"] else None
        norms = SINGLE if follows is None else BEFORE
        blocks.append(BlockSpec(mixers[kind], follows or NoMLPSpec(), norm, norms, attention_name=name))
    for prefix in PREFIXES:
        renames += ((f"{prefix}embeddings.", "model.embed_tokens."), (f"{prefix}norm_f.", "model.norm."))
    renames += [("backbone.embedding.", "model.embed_tokens."), ("mtp.", "")]
    return decoder(fields, tuple(blocks), max_position=max_position, renames=tuple(renames))


def _of_layer(layer: int, block: int, norm: str, module: str) -> Renames:
    """The names of a layer of the checkpoint, which is half a block or a whole one."""
    return tuple(
        (f"{prefix}layers.{layer}.{old}.", f"model.layers.{block}.{new}.")
        for prefix in PREFIXES
        for old, new in (("norm", norm), ("mixer", module))
    )
