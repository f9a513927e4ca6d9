"""What a decoder consists of, read from config.json.

This file and the family modules know the attribute names of Hugging Face configs, their older and newer spellings and
the values that transformers assumes where one is absent.  The result is a `DecoderSpec`.  An attribute that changes the
arithmetic in a way not built here is refused, because ignoring it would give other logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tokserve.base.errors import StartError
from tokserve.base.rooms import part
from tokserve.layers.attention import AttentionSpec
from tokserve.layers.linear import Activation
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import RopeSpec
from tokserve.models.block import BlockSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec, Renames
from tokserve.models.formats import checkpoint_format, quantization_of
from tokserve.models.rope_config import rope

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
# Checkpoints saved from the model without its head lack the prefix.
HEADLESS: Renames = (("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."), ("norm.", "model.norm."))


def decoder(
    fields: ConfigReader,
    blocks: tuple[BlockSpec, ...],
    *,
    max_position: int,
    renames: Renames = HEADLESS,
    tied: bool = False,
    **more: Any,
) -> DecoderSpec:
    """The spec of these blocks.  `max_position`, `tied`: what the family assumes where the attribute is absent;
    `more`: further fields."""
    refuse_unsupported(fields)
    return DecoderSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        max_position=fields.integer("max_position_embeddings", max_position),
        blocks=blocks,
        norm=blocks[-1].norm,
        tied=fields.flag("tie_word_embeddings", tied),
        renames=renames,
        format=checkpoint_format(fields.values),
        **more,
    )


def dense(
    fields: ConfigReader,
    *,
    max_position: int,
    windows: tuple[int, ...] | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    renames: Renames = HEADLESS,
    rotary: float | None = None,
    interleaved: bool = False,
    norm: NormSpec | None = None,
    ropes: tuple[RopeSpec, ...] = (),
    in_attention: Mapping[str, Any] | None = None,
    in_mlp: Mapping[str, Any] | None = None,
    in_block: Mapping[str, Any] | None = None,
    **in_decoder: Any,
) -> DecoderSpec:
    """The spec of a family whose blocks differ in their windows and ropes alone.

    `windows`: 0 is full attention; None: in every layer.  `kv_heads`, `head_dim`: as `attention` takes them;
    `max_position`: as `decoder` does.  `rotary`: the part of a head that is rotated, where the config does not say,
    None: all of it; `interleaved`: as in a `RopeSpec`.  `ropes`: one per layer, else the config's for all.  `norm`:
    else RMS norms with the config's `rms_norm_eps`.  `in_...`: more fields of these specs.
    """
    norm = norm or NormSpec(fields.number("rms_norm_eps", 1e-6))
    windows = (0,) * fields.integer("num_hidden_layers") if windows is None else windows
    dim, positions = head_size(fields, head_dim), fields.integer("max_position_embeddings", max_position)
    ropes = ropes or (rope(fields, dim, positions, rotary=rotary, interleaved=interleaved),) * len(windows)
    attend = attention(
        fields,
        dim=dim,
        rope=ropes[0],
        kv_heads=kv_heads,
        qk_norm=norm if qk_norm else None,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )
    attend = replace(attend, **in_attention or {})
    feed_forward = replace(mlp(fields, "hidden_act", "silu", bias=mlp_bias), **in_mlp or {})
    blocks = tuple(
        BlockSpec(replace(attend, rope=table, window=window), feed_forward, norm, **in_block or {})
        for window, table in zip(windows, ropes, strict=True)
    )
    return decoder(fields, blocks, max_position=max_position, renames=renames, **in_decoder)


def head_size(fields: ConfigReader, absent: int | None = None) -> int:
    """Elements of a head; `absent`: where the config has no head_dim, None: hidden size / heads."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    dim = fields.integer("head_dim", absent or max(1, hidden // heads))
    if dim % 2:
        raise fields.unsupported("head_dim", f"must be even, found {dim}")
    return dim


def attention(
    fields: ConfigReader,
    *,
    dim: int,
    rope: RopeSpec,
    kv_heads: int | None = None,
    scale: float | None = None,
    qk_norm: NormSpec | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> AttentionSpec:
    """Full attention.  `kv_heads`: where the config has no num_key_value_heads, None: as many as query heads, which is
    also what null means.  `scale` None: dim ** -0.5."""
    heads = fields.integer("num_attention_heads")
    absent = "num_key_value_heads" not in fields.values
    kv_heads = fields.integer("num_key_value_heads", kv_heads if absent and kv_heads else heads)
    if heads % kv_heads:
        raise fields.refuse("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}")
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        scale=dim**-0.5 if scale is None else scale,
        rope=rope,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )


def mlp(fields: ConfigReader, attribute: str, absent: str, *, bias: bool = False) -> MLPSpec:
    """`attribute` names the activation; `absent`: where the config does not."""
    return MLPSpec(fields.integer("intermediate_size"), activation(fields, attribute, absent), bias)


def activation(fields: ConfigReader, attribute: str, absent: str, *, only_built_in: bool = False) -> Activation:
    """The activation that `attribute` names; `absent`: where the config does not.  `only_built_in`: the family is
    served by the built-in implementation alone."""
    name = fields.text(attribute, absent)
    if name not in ACTIVATIONS:
        error = fields.refuse if only_built_in else fields.unsupported
        raise error(attribute, f"{name!r} is not supported; supported are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def refuse_unsupported(fields: ConfigReader) -> None:
    """Raise StartError for attributes that change the arithmetic in ways not built here."""
    if quantization_of(fields.values) is not None:
        part("quantization", "refuse")(fields)
    if fields.values.get("per_layer_config"):
        raise fields.refuse("per_layer_config", "(layers of different sizes) is not supported")
    if not fields.flag("is_causal", True):
        raise fields.refuse("is_causal", "is false; only causal attention is supported")


def layer_windows(fields: ConfigReader, window: int, otherwise: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer by `layer_types`, or else of the layers that `otherwise` is true of; 0: none."""
    layers = range(fields.integer("num_hidden_layers"))
    has_window = layer_kinds(
        fields, {"full_attention": False, "attention": False, "sliding_attention": True}, fields.unsupported
    )
    if has_window and any(has_window) and not window:
        raise fields.refuse("layer_types", "names sliding_attention, but no sliding_window is set and used")
    return tuple(window if one else 0 for one in has_window or map(otherwise, layers))


def layer_kinds(
    fields: ConfigReader, kinds: Mapping[str, bool], error: Callable[[str, str], StartError]
) -> list[bool] | None:
    """What `kinds` says of each of `layer_types`; None if the config has none.  `error`: of a kind that it lacks."""
    if not fields.present("layer_types"):
        return None
    types, layers = fields.texts("layer_types"), fields.integer("num_hidden_layers")
    if len(types) != layers:
        raise fields.refuse("layer_types", f"has {len(types)} entries for {layers} layers")
    if unknown := sorted(set(types) - kinds.keys()):
        raise error("layer_types", f"names unsupported kinds: {', '.join(unknown)}")
    return [kinds[kind] for kind in types]


def no_extra_layers(fields: ConfigReader, count: int) -> Renames:
    """Names of layers past the last, which predict more tokens and are not used: `count`, unless the config says."""
    first = fields.integer("num_hidden_layers")
    last = first + fields.integer("num_nextn_predict_layers", count, minimum=0)
    return tuple((f"{prefix}layers.{layer}.", "") for layer in range(first, last) for prefix in ("model.", ""))


def window_size(fields: ConfigReader, absent: int, *, minimum: int = 1) -> int:
    """`sliding_window`; 0 for null."""
    null = "sliding_window" in fields.values and not fields.present("sliding_window")
    return 0 if null else fields.integer("sliding_window", absent, minimum=minimum)


def window_if_used(fields: ConfigReader, absent: int = 4096, *, minimum: int = 1) -> int:
    """The same, but 0 unless `use_sliding_window`."""
    return window_size(fields, absent, minimum=minimum) if fields.flag("use_sliding_window") else 0
