"""The text models of Gemma 3.

Their norms store the difference from 1, and there are norms after attention and MLP too.  Most layers have a window and
a rope of their own.  Embeddings are multiplied by the root of their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import RopeSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.llama import HEADLESS
from tokserve.models.rope_config import rope_by_type, rope_spec
from tokserve.models.spec import (
    BlockSpec,
    DecoderSpec,
    attention,
    decoder,
    head_size,
    mlp,
    window_size,
    windowed,
    windows_by_type,
)

THETA, LOCAL_THETA = 1e6, 1e4  # of full attention and of windows, where the config gives none
MAX_POSITION = 131072


def gemma3(hf: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 3 without its vision tower."""
    fields = ConfigReader(hf)
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.values.get(name):
            raise fields.refuse(name, "is not supported")
    dim, bias = head_size(fields, 256), fields.flag("attention_bias")
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6), offset=1.0)
    full, local = _ropes(fields, dim)
    feed_forward = mlp(fields, "hidden_activation", "gelu_pytorch_tanh")

    def block(window: int) -> BlockSpec:
        attend = attention(
            fields,
            dim=dim,
            rope=local if window else full,
            kv_heads=4,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
            qk_norm=norm,
            qkv_bias=bias,
            out_bias=bias,
        )
        return BlockSpec(windowed(attend, window), feed_forward, norm, post_norms=True)

    return decoder(
        fields,
        tuple(block(window) for window in _windows(fields)),
        max_position=MAX_POSITION,
        renames=HEADLESS,
        tied=True,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
    )


def _windows(fields: ConfigReader) -> tuple[int, ...]:
    """By `layer_types`, or else in all layers but every sixth (`sliding_window_pattern`)."""
    window = window_size(fields, 4096)
    if fields.present("layer_types"):
        return windows_by_type(fields, window)
    every = fields.integer("sliding_window_pattern", 6)
    return tuple(window if (layer + 1) % every else 0 for layer in range(fields.integer("num_hidden_layers")))


def _ropes(fields: ConfigReader, dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Of full attention and of windows: from `rope_parameters` by layer type, or from `rope_scaling` (of full attention
    alone), `rope_theta` and `rope_local_base_freq`."""
    positions = fields.integer("max_position_embeddings", MAX_POSITION)
    theta, local = fields.number("rope_theta", THETA), fields.number("rope_local_base_freq", LOCAL_THETA)
    scaling = fields.inner("rope_scaling")
    if scaling.values:
        return rope_spec(fields, scaling, dim, positions, theta), RopeSpec(dim, local)
    return (
        rope_by_type(fields, "full_attention", dim, positions, theta),
        rope_by_type(fields, "sliding_attention", dim, positions, local),
    )
