"""The dense families that share the Llama block: what each adds to it, and what its config assumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.models.config_reader import ConfigReader
from tokserve.models.spec import DecoderSpec, dense, no_windows, window_everywhere, windows_by_layer

# Checkpoints saved from the model without its head lack the prefix.
HEADLESS = (("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."), ("norm.", "model.norm."))


def llama(hf: Mapping[str, Any]) -> DecoderSpec:
    """Llama 1 to 3: optional biases."""
    fields = ConfigReader(hf)
    bias = fields.flag("attention_bias")
    return dense(
        fields,
        windows=no_windows(fields),
        max_position=2048,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        renames=HEADLESS,
    )


def mistral(hf: Mapping[str, Any]) -> DecoderSpec:
    """Mistral: no biases, one window for all layers."""
    fields = ConfigReader(hf)
    windows = window_everywhere(fields, absent=4096)
    return dense(fields, windows=windows, max_position=131072, kv_heads=8, renames=HEADLESS)


def qwen2(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 2 and 2.5: biases on q, k and v; windows on some layers."""
    fields = ConfigReader(hf)
    windows = windows_by_layer(fields, absent=4096, full_layers=28)
    return dense(fields, windows=windows, max_position=32768, kv_heads=32, qkv_bias=True, renames=HEADLESS)


def qwen3(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 3: norms on query and key heads, optional biases, windows on some layers."""
    fields = ConfigReader(hf)
    bias = fields.flag("attention_bias")
    return dense(
        fields,
        windows=windows_by_layer(fields, absent=4096, full_layers=28),
        max_position=32768,
        kv_heads=32,
        head_dim=128,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        renames=HEADLESS,
    )
