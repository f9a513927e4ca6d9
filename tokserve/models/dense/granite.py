"""Granite: multipliers of embeddings, attention scores, what is added to the residual stream, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.spec import dense


def granite(hf: Mapping[str, Any]) -> DecoderSpec:
    fields = ConfigReader(hf)
    return granite_spec(fields, mlp_bias=fields.flag("mlp_bias"))


def granite_spec(fields: ConfigReader, *, in_block: Mapping[str, Any] | None = None, **more: Any) -> DecoderSpec:
    """The spec of any Granite.  `in_block`: options of its blocks; `more`: those of `dense`."""
    bias = fields.flag("attention_bias")
    return dense(
        fields,
        max_position=2048,
        qkv_bias=bias,
        out_bias=bias,
        in_attention={"scale": fields.number("attention_multiplier", 1.0)},
        in_block={"residual_multiplier": fields.number("residual_multiplier", 1.0)} | dict(in_block or {}),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
        **more,
    )
