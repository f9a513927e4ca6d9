"""Which decoders have a backward pass: those whose spec says nothing that the modules here do not compute.

Families gain attributes as they are added to the server.  One that is not named here is refused while it has another
value than its default, because a forward pass that ignored it would differ from the server's without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from tokserve.base.errors import StartError
from tokserve.families.mixtures.experts import MixtureSpec, RouterSpec
from tokserve.families.recurrent.layers import RecurrentSpec
from tokserve.layers.attention import AttentionSpec
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.models.block import BlockSpec, NoMLPSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.registry import decoder_spec

KNOWN: dict[type, set[str]] = {
    DecoderSpec: {
        "vocab",
        "hidden",
        "max_position",
        "blocks",
        "norm",
        "tied",
        "renames",
        "embedding_multiplier",
        "format",
        "logits_multiplier",
        "logits_softcap",
        "norm_name",
        "position_table",
    },
    BlockSpec: {
        "attention",
        "mlp",
        "norm",
        "norms",
        "parallel",
        "residual_multiplier",
        "mlp_name",
        "attention_name",
        "factor_name",
        "transposed",
    },
    AttentionSpec: {
        "heads",
        "kv_heads",
        "dim",
        "scale",
        "rope",
        "window",
        "qk_norm",
        "qkv_bias",
        "out_bias",
        "softcap",
        "norm_scope",
        "norm_last",
        "qkv_names",
        "out_name",
        "norm_names",
        "gated",
        "query_growth",
        "value_eps",
        "by_head",
    },
    MLPSpec: {"inner", "activation", "bias", "gated", "up_names", "down_name"},
    MixtureSpec: {
        "experts",
        "inner",
        "router",
        "activation",
        "shared",
        "shared_name",
        "shared_gate",
        "stacked",
        "router_name",
        "experts_name",
        "names",
    },
    RouterSpec: {
        "chosen",
        "sigmoid",
        "normalize",
        "added",
        "scale",
        "groups",
        "kept_groups",
        "two_of_group",
        "bias",
        "correction_bias",
        "correction_row",
    },
    NormSpec: {"eps", "offset", "kind", "bias"},
}
VALUES: dict[tuple[type, str], set[str]] = {(MixtureSpec, "activation"): {"silu", "gelu_tanh"}}


def trainable_spec(hf: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json.  Raises StartError, which names the architecture, if it has no backward pass."""
    spec = decoder_spec(hf)
    try:
        check_spec(spec)
    except StartError as error:
        raise StartError(f"{', '.join(ConfigReader(hf).texts('architectures'))}: {error}") from error
    return spec


def check_spec(spec: DecoderSpec) -> None:
    """Raise StartError, naming the attribute, if part of the decoder has no gradient."""
    _check(spec, "the model")
    _check(spec.norm, "norm")
    for number, block in enumerate(spec.blocks):
        if isinstance(block.mlp, NoMLPSpec):
            raise StartError(f"layer {number}: a layer without an MLP cannot be trained")
        _check(block, f"layer {number}")
        for name in ("attention", "mlp", "norm"):
            part = getattr(block, name)
            if not isinstance(part, RecurrentSpec):  # these layers have gradients whatever their spec says
                _check(part, f"layer {number}: {name}")
        if isinstance(block.mlp, MixtureSpec):
            _check(block.mlp.router, f"layer {number}: router")
            if block.mlp.shared is not None:
                _check(block.mlp.shared, f"layer {number}: shared expert")


def _check(part: Any, where: str) -> None:
    known = KNOWN.get(type(part))
    if known is None:
        raise StartError(f"{where}: {type(part).__name__} cannot be trained")
    for field in fields(part):
        value = getattr(part, field.name)
        allowed = VALUES.get((type(part), field.name))
        if field.name not in known and value != _default(field):
            raise StartError(f"{where}: {field.name} {value!r} cannot be trained")
        if allowed is not None and value not in allowed:
            raise StartError(f"{where}: {field.name} {value!r} cannot be trained")


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return MISSING if field.default_factory is MISSING else field.default_factory()
