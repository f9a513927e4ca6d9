"""The text models of Gemma 1, 2 and 3.

Their norms store the difference from 1; Gemma 2 and 3 have norms after attention and MLP too.  Most layers of Gemma 3
have a window and a rope of their own.  Embeddings are multiplied by the root of their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import RopeSpec
from tokserve.models.block import AROUND, BEFORE, BlockNorms, BlockSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.rope_config import rope, ropes_with_windows
from tokserve.models.spec import attention, decoder, head_size, layer_windows, mlp, window_size

THETA, LOCAL_THETA = 1e6, 1e4  # of full attention and of windows, where the config gives none
MAX_POSITION = 131072


def gemma(hf: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 1.  Its older configs say gelu and mean the approximation."""
    fields = ConfigReader(dict(hf) | ({"hidden_act": "gelu_pytorch_tanh"} if hf.get("hidden_act") == "gelu" else {}))
    dim = head_size(fields, 256)
    table = rope(fields, dim, fields.integer("max_position_embeddings", 8192))
    layers = fields.integer("num_hidden_layers")
    return _gemma(
        fields,
        (table,) * layers,
        (0,) * layers,
        scale=dim**-0.5,
        kv_heads=16,
        norms=BEFORE,
        activation="hidden_act",
        max_position=8192,
    )


def gemma2(hf: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 2: soft-capped scores and logits, windows in every other layer."""
    fields = ConfigReader(hf)
    table = rope(fields, head_size(fields, 256), fields.integer("max_position_embeddings", 8192))
    windows = layer_windows(fields, window_size(fields, 4096), lambda layer: layer % 2 == 0)
    return _gemma(fields, (table,) * len(windows), windows, max_position=8192, caps=(50.0, 30.0))


def gemma3(hf: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 3 without its vision tower: norms of query and key heads, windows in five layers of six."""
    fields = ConfigReader(dict(hf) | {"attn_logit_softcapping": None})  # its attention does not read it
    every = fields.integer("sliding_window_pattern", 6)
    windows = layer_windows(fields, window_size(fields, 4096), lambda layer: (layer + 1) % every != 0)
    full, local = ropes_with_windows(
        fields,
        head_size(fields, 256),
        fields.integer("max_position_embeddings", MAX_POSITION),
        THETA,
        fields.number("rope_local_base_freq", LOCAL_THETA),
    )
    ropes = tuple(local if window else full for window in windows)
    return _gemma(fields, ropes, windows, max_position=MAX_POSITION, qk_norm=True)


def _gemma(
    fields: ConfigReader,
    ropes: tuple[RopeSpec, ...],
    windows: tuple[int, ...],
    *,
    max_position: int,
    scale: float | None = None,
    kv_heads: int = 4,
    norms: BlockNorms = AROUND,
    activation: str = "hidden_activation",
    caps: tuple[float, float] = (0.0, 0.0),
    qk_norm: bool = False,
) -> DecoderSpec:
    """`caps`: of scores and logits, where the config does not say."""
    if fields.values.get("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "is not supported")
    score_cap, logit_cap = (
        _cap(fields, name, absent)
        for name, absent in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
    )
    bias = fields.flag("attention_bias")
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6), offset=1.0)
    feed_forward = mlp(fields, activation, "gelu_pytorch_tanh")
    attend = attention(
        fields,
        dim=head_size(fields, 256),
        rope=ropes[0],
        kv_heads=kv_heads,
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5 if scale is None else scale,
        qk_norm=norm if qk_norm else None,
        qkv_bias=bias,
        out_bias=bias,
    )
    attend = replace(attend, softcap=score_cap)
    return decoder(
        fields,
        tuple(
            BlockSpec(replace(attend, rope=table, window=window), feed_forward, norm, norms)
            for table, window in zip(ropes, windows, strict=True)
        ),
        max_position=max_position,
        tied=True,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logits_softcap=logit_cap,
    )


def _cap(fields: ConfigReader, name: str, absent: float) -> float:
    """0: none, which is what null means."""
    if name in fields.values and not fields.present(name):
        return 0.0
    return fields.number(name, absent) if absent or fields.present(name) else 0.0
