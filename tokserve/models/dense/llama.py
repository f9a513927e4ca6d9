"""The dense families that share the Llama block: what each adds to it, and what its config assumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.layers.attention import QueryGrowth
from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import NO_ROPE
from tokserve.models.block import AFTER
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec
from tokserve.models.rope_config import rope, rope_values
from tokserve.models.spec import HEADLESS, dense, head_size, layer_windows, window_if_used, window_size

EXAONE = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.h.", "model.layers."),
    ("transformer.ln_f.", "model.norm."),
    (".attn.attention.", ".self_attn."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".mlp.c_fc_0.", ".mlp.gate_proj."),
    (".mlp.c_fc_1.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)

MINISTRAL3_ROPE = {  # where the config has none
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def llama(hf: Mapping[str, Any]) -> DecoderSpec:
    """Llama 1 to 3: optional biases."""
    fields = ConfigReader(hf)
    bias = fields.flag("attention_bias")
    return dense(fields, max_position=2048, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def arcee(hf: Mapping[str, Any]) -> DecoderSpec:
    """Arcee: Llama whose MLP has no gate."""
    fields = ConfigReader({"hidden_act": "relu2", "rms_norm_eps": 1e-5} | dict(hf))
    bias = fields.flag("attention_bias")
    return dense(
        fields,
        max_position=4096,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        in_mlp={"gated": False, "up_names": ("up_proj",)},
    )


def cwm(hf: Mapping[str, Any]) -> DecoderSpec:
    """Code World Model: windows in three layers of four."""
    fields = ConfigReader({"rms_norm_eps": 1e-5} | dict(hf))
    if not fields.present("rope_parameters") and not fields.present("rope_scaling"):
        scaling = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
        original = {"original_max_position_embeddings": 8192}
        fields = ConfigReader(dict(fields.values) | {"rope_parameters": {"rope_theta": 1e6} | scaling | original})
    windows = layer_windows(fields, window_size(fields, 8192), lambda layer: layer % 4 != 0)
    dim, positions = head_size(fields, 128), fields.integer("max_position_embeddings", 131072)
    return dense(
        fields,
        windows=windows,
        max_position=131072,
        kv_heads=8,
        head_dim=128,
        mlp_bias=fields.flag("mlp_bias"),
        ropes=(rope(fields, dim, positions, theta=1e6),) * len(windows),
    )


def exaone(hf: Mapping[str, Any]) -> DecoderSpec:
    """EXAONE 3 and 3.5: Llama with other names."""
    older = {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
    fields = ConfigReader({"rms_norm_eps": 1e-5} | {older.get(name, name): value for name, value in hf.items()})
    bias, dim = fields.flag("attention_bias"), head_size(fields)
    positions = fields.integer("max_position_embeddings", 4096)
    return dense(
        fields,
        max_position=4096,
        kv_heads=8,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        ropes=(rope(fields, dim, positions, theta=5e5),) * fields.integer("num_hidden_layers"),
        renames=EXAONE + HEADLESS,
    )


def exaone4(hf: Mapping[str, Any]) -> DecoderSpec:
    """EXAONE 4: norms of heads, others after attention and MLP alone; with windows, only their layers have rope."""
    fields = ConfigReader({"rms_norm_eps": 1e-5} | dict(hf))
    window = window_size(fields, 4096)
    every = fields.integer("sliding_window_pattern", 4, minimum=0) if window else 0
    windows = layer_windows(fields, window, lambda layer: every > 0 and (layer + 1) % every != 0)
    table = rope(fields, head_size(fields), fields.integer("max_position_embeddings", 2048))
    return dense(
        fields,
        windows=windows,
        max_position=2048,
        kv_heads=32,
        qk_norm=True,
        ropes=tuple(table if one or not window else NO_ROPE for one in windows),
        in_block={"norms": AFTER},
    )


def internlm3(hf: Mapping[str, Any]) -> DecoderSpec:
    """InternLM 3: Llama, whose biases its config calls otherwise."""
    older = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    values = {older[name]: hf[name] for name in older if name in hf} | dict(hf)
    return llama({"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128} | values)


def mistral(hf: Mapping[str, Any]) -> DecoderSpec:
    """Mistral: no biases, one window for all layers."""
    fields = ConfigReader(hf)
    windows = (window_size(fields, 4096),) * fields.integer("num_hidden_layers")
    return dense(fields, windows=windows, max_position=131072, kv_heads=8)


def _windows_from(fields: ConfigReader) -> tuple[int, ...]:
    """Windows by `layer_types`, or else from layer `max_window_layers` on."""
    first = fields.integer("max_window_layers", 28, minimum=0)
    return layer_windows(fields, window_if_used(fields), lambda layer: layer >= first)


def qwen2(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 2 and 2.5: biases on q, k and v; windows on some layers."""
    fields = ConfigReader(hf)
    windows = _windows_from(fields)
    return dense(fields, windows=windows, max_position=32768, kv_heads=32, qkv_bias=True)


def qwen3(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 3: norms on query and key heads, optional biases, windows on some layers."""
    fields = ConfigReader(hf)
    bias = fields.flag("attention_bias")
    return dense(
        fields,
        windows=_windows_from(fields),
        max_position=32768,
        kv_heads=32,
        head_dim=128,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def ministral(hf: Mapping[str, Any]) -> DecoderSpec:
    """Ministral: windows on the layers that `layer_types` names, else on all."""
    fields = ConfigReader(hf)
    windows = layer_windows(fields, window_size(fields, 4096), lambda layer: True)
    return dense(fields, windows=windows, max_position=131072, kv_heads=8)


def ministral3(hf: Mapping[str, Any]) -> DecoderSpec:
    """Ministral 3: queries grow with the logarithm of the number of original contexts before them."""
    fields = ConfigReader({"rms_norm_eps": 1e-5, "sliding_window": None} | dict(hf))
    if not rope_values(fields).values:
        fields = ConfigReader(dict(fields.values) | {"rope_parameters": MINISTRAL3_ROPE})
    scaling = rope_values(fields)
    growth = scaling.number("llama_4_scaling_beta") if scaling.values.get("llama_4_scaling_beta") else 0.0
    by = QueryGrowth(growth, scaling.integer("original_max_position_embeddings")) if growth else None
    return dense(
        fields,
        windows=(window_size(fields, 0),) * fields.integer("num_hidden_layers"),
        max_position=262144,
        kv_heads=8,
        head_dim=128,
        in_attention={"query_growth": by},
    )


def smollm3(hf: Mapping[str, Any]) -> DecoderSpec:
    """SmolLM 3: layers without rope, by `no_rope_layers` (where 0 means none) or else every fourth."""
    fields = ConfigReader(hf)
    layers, bias = fields.integer("num_hidden_layers"), fields.flag("attention_bias")
    every = fields.integer("no_rope_layer_interval", 4)
    turned = fields.values.get("no_rope_layers")
    turned = [(layer + 1) % every != 0 for layer in range(layers)] if turned is None else turned
    if not isinstance(turned, list) or len(turned) < layers or not all(one in (0, 1) for one in turned):
        raise fields.refuse("no_rope_layers", f"must be a list of 0 and 1 for {layers} layers")
    windows = layer_windows(fields, window_if_used(fields, 0, minimum=0), lambda layer: not turned[layer])
    dim, positions = head_size(fields), fields.integer("max_position_embeddings", 32768)
    table = rope(fields, dim, positions, theta=2e6)
    return dense(
        fields,
        windows=windows,
        max_position=32768,
        kv_heads=4,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        ropes=tuple(table if turned[layer] else NO_ROPE for layer in range(layers)),
        tied=True,
    )


def seed_oss(hf: Mapping[str, Any]) -> DecoderSpec:
    """Seed-OSS: biases, one attribute for each kind."""
    fields = ConfigReader(hf)
    return dense(
        fields,
        max_position=524288,
        kv_heads=8,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias", True),
        out_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def ernie4_5(hf: Mapping[str, Any]) -> DecoderSpec:
    """ERNIE 4.5 without experts: neighbours rotate as pairs."""
    fields = ConfigReader(hf)
    bias, layers = fields.flag("use_bias"), fields.integer("num_hidden_layers")
    dim, positions = head_size(fields, 128), fields.integer("max_position_embeddings", 131072)
    return dense(
        fields,
        max_position=131072,
        kv_heads=2,
        head_dim=128,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norm=NormSpec(fields.number("rms_norm_eps", 1e-5)),
        ropes=(rope(fields, dim, positions, theta=5e5, interleaved=True),) * layers,
        tied=True,
    )


def hunyuan(hf: Mapping[str, Any]) -> DecoderSpec:
    """HunYuan without experts: norms of query and key heads after the rotation."""
    fields = ConfigReader(hf)
    bias, layers = fields.flag("attention_bias"), fields.integer("num_hidden_layers")
    dim, positions = head_size(fields), fields.integer("max_position_embeddings", 2048)
    scaling = rope_values(fields)
    if scaling.values.get("alpha") and scaling.text("rope_type", scaling.text("type", "default")) == "dynamic":
        plain = ConfigReader({key: value for key, value in hf.items() if not key.startswith("rope_")})
        theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
        table = rope(plain, dim, positions, theta=theta * scaling.number("alpha") ** (dim / (dim - 2)))
    else:
        table = rope(fields, dim, positions)
    return dense(
        fields,
        max_position=2048,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        norm=NormSpec(fields.number("rms_norm_eps", 1e-5)),
        ropes=(table,) * layers,
        in_attention={"norm_last": True, "norm_names": ("query_layernorm", "key_layernorm")},
    )
