"""The text models of Gemma 4: dense, with experts beside the MLPs, or with inputs by layer and shared keys.

Layers with full attention have wider heads than those with a window, of which a part turns, and their values may be
their keys before the norm.  The norms of values have no weight, and a factor multiplies the stream after each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures.beside import BesideSpec
from tokserve.families.mixtures.experts import RouterSpec
from tokserve.families.mixtures.layer_inputs import PerLayerGateSpec, PerLayerSpec
from tokserve.families.mixtures.moe import mixture
from tokserve.families.mixtures.shared_keys import SharedKeysSpec
from tokserve.layers.attention import AttentionSpec
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.protocols import FeedForwardSpec
from tokserve.layers.rope import RopeSpec
from tokserve.models.block import AROUND, BlockNorms, BlockSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec, Renames
from tokserve.models.formats import quantization_of
from tokserve.models.rope_config import rope_by_type
from tokserve.models.spec import (
    HEADLESS,
    activation,
    attention,
    decoder,
    head_size,
    layer_windows,
    mlp,
    window_size,
)

MAX_POSITION = 131072
KINDS = ("full_attention", "sliding_attention")
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
NAMES: Renames = (  # of checkpoints saved without the head
    ("embed_tokens_per_layer.", "model.embed_tokens_per_layer."),
    ("per_layer_", "model.per_layer_"),
)
OVERRIDES = ("head_dim", "num_key_value_heads")  # by layer


def gemma4(hf: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 4, dense or with experts."""
    values = {"rope_parameters": ROPES} | {name: value for name, value in hf.items() if value is not None}
    overrides = values.pop("per_layer_config", None)
    fields = ConfigReader(values)
    _refuse(fields)
    layers = fields.integer("num_hidden_layers")
    windows = layer_windows(fields, window_size(fields, 512), lambda layer: (layer + 1) % 6 != 0)
    windows = (*windows[:-1], 0)  # the last layer sees all
    by_layer = _overrides(fields, windows) if overrides is None else _written(ConfigReader(hf), layers)
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6))
    feed_forward, norms, mlp_name = _feed_forward(fields, norm)
    shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    attends = [
        _attention(ConfigReader(values | one), norm, one_window)
        for one, one_window in zip(by_layer, windows, strict=True)
    ]
    attends = _with_shared_keys(fields, attends, layers - shared)
    wide = replace(feed_forward, inner=2 * feed_forward.inner) if isinstance(feed_forward, MLPSpec) else feed_forward
    is_wide = fields.flag("use_double_wide_mlp")
    blocks = tuple(
        BlockSpec(
            attend,
            wide if is_wide and layer >= layers - shared else feed_forward,
            norm,
            norms,
            mlp_name=mlp_name,
            factor_name="layer_scalar",
        )
        for layer, attend in enumerate(attends)
    )
    spec = decoder(
        fields,
        blocks,
        max_position=MAX_POSITION,
        renames=_unused(layers - shared, layers) + NAMES + HEADLESS,
        tied=True,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logits_softcap=fields.number("final_logit_softcapping") if fields.present("final_logit_softcapping") else 0.0,
    )
    return _with_inputs(fields, spec, norm)


def _with_inputs(fields: ConfigReader, spec: DecoderSpec, norm: NormSpec) -> DecoderSpec:
    """The spec with inputs by layer, if the config has any."""
    width, vocab = (
        fields.integer("hidden_size_per_layer_input", 256, minimum=0),
        fields.integer("vocab_size_per_layer_input", 262144),
    )
    if not width:
        return spec
    if vocab < spec.vocab:
        raise fields.refuse("vocab_size_per_layer_input", f"is {vocab}, less than vocab_size {spec.vocab}")
    kind = activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    blocks = tuple(
        replace(block, gate=PerLayerGateSpec(layer, width, kind, norm)) for layer, block in enumerate(spec.blocks)
    )
    return replace(spec, blocks=blocks, inputs=PerLayerSpec(vocab, len(blocks), width, norm))


def _with_shared_keys(fields: ConfigReader, attends: list[AttentionSpec], first: int) -> list[AttentionSpec]:
    """The specs, from the layer `first` on with the keys and values of the last layer of their kind before it."""
    last = {attend.window > 0: layer for layer, attend in enumerate(attends[:first])}
    for layer, attend in enumerate(attends[first:], first):
        source = last.get(attend.window > 0)
        if source is None:
            raise fields.refuse("num_kv_shared_layers", f"leaves no layer whose keys layer {layer} could share")
        if (attends[source].kv_heads, attends[source].dim) != (attend.kv_heads, attend.dim):
            raise fields.unsupported("per_layer_config", f"has other heads in layer {layer} than in {source}")
        values = {field.name: getattr(attend, field.name) for field in fields_of(attend)}
        attends[layer] = SharedKeysSpec(**values | {"value_eps": 0.0}, number=layer, source=source)
    return attends


def _unused(first: int, layers: int) -> Renames:
    """Names of keys and values that checkpoints have of layers from `first` on, which share those of others."""
    names = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return tuple(
        (f"{prefix}layers.{layer}.self_attn.{name}", "")
        for layer in range(first, layers)
        for prefix in ("model.", "model.language_model.", "language_model.model.", "")
        for name in names
    )


def _feed_forward(fields: ConfigReader, norm: NormSpec) -> tuple[FeedForwardSpec, BlockNorms, str]:
    """The feed-forward part of a block, the block's norms, and the name of the part's module."""
    plain = mlp(fields, "hidden_activation", "gelu_pytorch_tanh")
    if not fields.flag("enable_moe_block"):
        return plain, AROUND, "mlp"
    router = RouterSpec(fields.integer("top_k_experts"))
    experts = mixture(
        ConfigReader(dict(fields.values) | {"hidden_act": fields.text("hidden_activation", "gelu_pytorch_tanh")}),
        router,
        count=("num_experts", None),
        inner=("moe_intermediate_size", None),
        stacked=quantization_of(fields.values) is None,  # tools that quantize divide the tensors by expert
        router_name="router.proj",
    )
    return BesideSpec(plain, experts, norm), replace(AROUND, before_mlp=""), ""


def _refuse(fields: ConfigReader) -> None:
    if fields.values.get("use_bidirectional_attention") == "all":
        raise fields.refuse("use_bidirectional_attention", "is all; only causal attention is supported")


def _overrides(fields: ConfigReader, windows: tuple[int, ...]) -> list[dict[str, Any]]:
    """Attributes of each layer in place of the config's, as released configs say it."""
    full: dict[str, Any] = {"head_dim": fields.integer("global_head_dim", 512)}
    if fields.flag("attention_k_eq_v") and fields.present("num_global_key_value_heads"):
        full["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
    return [{} if window else full for window in windows]


def _written(fields: ConfigReader, layers: int) -> list[dict[str, Any]]:
    """The same as transformers writes it: by the number of the layer, as text."""
    by_number, overrides = fields.inner("per_layer_config"), [dict[str, Any]() for _ in range(layers)]
    for number in by_number.values:
        if not str(number).isdecimal() or int(number) >= layers:
            raise fields.refuse("per_layer_config", f"names {number!r}, which is no number of a layer")
        one = dict(by_number.inner(number).values)
        if others := one.keys() - set(OVERRIDES):
            raise by_number.unsupported(number, f"has attributes besides {', '.join(OVERRIDES)}: {sorted(others)}")
        overrides[int(number)] = one
    return overrides


def _attention(fields: ConfigReader, norm: NormSpec, window: int) -> AttentionSpec:
    """The attention of one layer; `fields`: with what is said of this layer alone."""
    bias, dim = fields.flag("attention_bias"), head_size(fields, 256)
    attend = attention(
        fields,
        dim=dim,
        rope=_rope(fields, KINDS[window > 0], dim),
        kv_heads=4,
        scale=1.0,
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
    )
    attend = replace(attend, window=window, value_eps=norm.eps)
    shares = fields.flag("attention_k_eq_v") and not window
    return replace(attend, qkv_names=("q_proj", "k_proj")) if shares else attend


def _rope(fields: ConfigReader, kind: str, dim: int) -> RopeSpec:
    return rope_by_type(fields, kind, dim, fields.integer("max_position_embeddings", MAX_POSITION), 1e4)
