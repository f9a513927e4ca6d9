"""The text models of Llama 4: chunks of attention in the layers with rope, experts whose inputs are weighted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures.chunked import ChunkedAttentionSpec
from tokserve.families.mixtures.experts import RouterSpec
from tokserve.families.mixtures.moe import mixture, shared_mlp, with_mixture
from tokserve.layers.attention import AttentionSpec, QueryGrowth
from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import NO_ROPE
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.formats import quantization_of
from tokserve.models.rope_config import rope
from tokserve.models.spec import dense, head_size, layer_kinds

MAX_POSITION = 131072


def llama4(hf: Mapping[str, Any]) -> DecoderSpec:
    """Llama 4, dense or with experts in some layers."""
    fields = ConfigReader({"rms_norm_eps": 1e-5} | dict(hf))
    layers, dim = fields.integer("num_hidden_layers"), head_size(fields, 128)
    table = rope(fields, dim, fields.integer("max_position_embeddings", MAX_POSITION), theta=5e5, interleaved=True)
    turned = _turned(fields, layers)
    bias, width = fields.flag("attention_bias"), fields.integer("intermediate_size_mlp", 16384)
    spec = dense(
        ConfigReader(dict(fields.values) | {"intermediate_size": width}),
        max_position=MAX_POSITION,
        kv_heads=8,
        head_dim=128,
        qkv_bias=bias,
        out_bias=bias,
        ropes=tuple(table if one else NO_ROPE for one in turned),
        in_block={"mlp_name": "feed_forward"},
    )
    norm = NormSpec(spec.norm.eps, learned=False) if fields.flag("use_qk_norm", True) else None
    growth, chunks = _growth(fields), _chunks(fields, turned)
    blocks = []
    for block, rotates, chunk in zip(spec.blocks, turned, chunks, strict=True):
        attend = block.attention
        assert isinstance(attend, AttentionSpec)
        attend = replace(attend, qk_norm=norm, norm_last=True) if rotates else replace(attend, query_growth=growth)
        if chunk:
            values = {field.name: getattr(attend, field.name) for field in fields_of(attend)}
            attend = ChunkedAttentionSpec(**values, chunk=chunk)
        blocks.append(replace(block, attention=attend))
    return _with_experts(fields, replace(spec, blocks=tuple(blocks)), layers)


def _with_experts(fields: ConfigReader, spec: DecoderSpec, layers: int) -> DecoderSpec:
    step = fields.integer("interleave_moe_layer_step", 1)
    listed = fields.integers("moe_layers") if fields.present("moe_layers") else range(step - 1, layers, step)
    if not any(layer in listed for layer in range(layers)):
        return spec
    if (chosen := fields.integer("num_experts_per_tok", 1)) != 1:
        raise fields.unsupported("num_experts_per_tok", f"is {chosen}; built in is 1")
    inner = ("intermediate_size", 8192)
    experts = mixture(
        fields,
        RouterSpec(1, sigmoid=True, normalize=False),
        count=("num_local_experts", 16),
        inner=inner,
        shared=shared_mlp(fields, fields.integer(*inner)),
        stacked=quantization_of(fields.values) is None,  # tools that quantize divide the tensors by expert
        transposed=True,
        router_name="router",
        scales_input=True,
    )
    return with_mixture(spec, experts, [layer in listed for layer in range(layers)], "feed_forward")


def _turned(fields: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has rope: `no_rope_layers`, where 1 means that it has, or else all but every fourth."""
    every = fields.integer("no_rope_layer_interval", 4)
    listed = fields.integers("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(listed) < layers or not all(one in (0, 1) for one in listed):
        raise fields.refuse("no_rope_layers", f"must be a list of 0 and 1 for {layers} layers")
    return [one == 1 for one in listed[:layers]]


def _chunks(fields: ConfigReader, turned: list[bool]) -> list[int]:
    """The size of each layer's chunks of attention by `layer_types`, or else of those with rope; 0: it sees all."""
    null = "attention_chunk_size" in fields.values and not fields.present("attention_chunk_size")
    size = 0 if null else fields.integer("attention_chunk_size", 8192)
    kinds = layer_kinds(fields, {"full_attention": False, "chunked_attention": True}, fields.unsupported)
    if kinds and any(kinds) and not size:
        raise fields.refuse("layer_types", "names chunked_attention, but attention_chunk_size is null")
    return [size if one else 0 for one in kinds or turned]


def _growth(fields: ConfigReader) -> QueryGrowth | None:
    """The growth of queries in layers without rope.  Released configs have a number for the flag."""
    flag, scale = fields.values.get("attn_temperature_tuning", True), fields.values.get("attn_scale", 0.1)
    if not isinstance(flag, int):
        raise fields.refuse("attn_temperature_tuning", f"must be true or false, found {flag!r}")
    if not flag or scale == 0:
        return None
    return QueryGrowth(fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192), 1)
