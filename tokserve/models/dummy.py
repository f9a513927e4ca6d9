"""Random weights for a real or tiny config, so that a server can be run and tested with no download.

A tensor's values follow from its name and the seed alone.  They are scaled so that the model behaves like
a trained one: logits with a spread of about 2, attention with peaks, output that varies with the context.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokserve.checkpoint import flat
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter
from tokserve.layers.siglip import SiglipSpec
from tokserve.models.decoder import rope_tables
from tokserve.models.encoder import EncoderSpec, make_model
from tokserve.models.registry import decoder_spec
from tokserve.models.spec import DecoderSpec
from tokserve.models.weights import INDEX, SINGLE

MULTIPLIERS = {  # of Granite
    "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 0.9,
}  # fmt: skip
LATENT = {  # attention
    "num_key_value_heads": 4, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 32,
    "q_lora_rank": 40, "head_dim": 8,
}  # fmt: skip
# family -> (architecture, attributes beyond the common ones)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "use_sliding_window": False, "attention_bias": False}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 10,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 72,
            "use_sliding_window": False,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma": ("GemmaForCausalLM", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "attn_logit_softcapping": 8.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 512}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        MULTIPLIERS,
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 160,
            "position_embedding_type": "rope",
            **MULTIPLIERS,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 1]}),
    "glm": ("GlmForCausalLM", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4ForCausalLM", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "ministral": (
        "MinistralForCausalLM",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "cohere": ("CohereForCausalLM", {"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 1.1}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
            "logit_scale": 1.1,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "sliding_window": 24,
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"tie_word_embeddings": True, "use_bias": True}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "conv_bias": True,
            "norm_eps": 1e-5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "norm_eps": 1e-5,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {"attention_bias": True}),
    "olmoe": (
        "OlmoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "norm_topk_prob": True},
    ),
    "flex_olmo": ("FlexOlmoForCausalLM", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48, **MULTIPLIERS},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "shared_intermediate_size": 72,
            **MULTIPLIERS,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            "tie_word_embeddings": True,
            "use_bias": False,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "dots1": (
        "Dots1ForCausalLM",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "rotary_dim": 8},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": 2, "intermediate_size": 48}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "mscale": 0.8,
                "mscale_all_dim": 0.6,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        {
            **LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        {**LATENT, "tie_word_embeddings": True, "scale_emb": 6.0, "scale_depth": 1.2, "dim_model_base": 96},
    ),
    "youtu": ("YoutuForCausalLM", {**LATENT, "tie_word_embeddings": True}),
}

_LEARNED = {"num_position_embeddings": 36, "hidden_act": "gelu_pytorch_tanh"}
# family -> (architecture, family of its text model, mrope_section, attributes of its tower)
VISION_FAMILIES: dict[str, tuple[str, str, list[int], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration", "qwen2", [2, 3, 3],
        {"hidden_act": "silu", "window_size": 32, "fullatt_block_indexes": [1, 3]},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration", "qwen3", [4, 2, 2], _LEARNED | {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration", "qwen3_moe", [4, 2, 2], _LEARNED | {"deepstack_visual_indexes": [1]},
    ),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", [2, 1, 1], _LEARNED),
}  # fmt: skip

NORMS = (
    "layernorm.weight", "operator_norm.weight", "ffn_norm.weight", "linear_attn.norm.weight", "norm1.weight",
    "norm2.weight", "ln_q.weight", "merger.norm.weight", "mm_soft_emb_norm.weight",
)  # fmt: skip
GAINS = {
    "lm_head": 2.0, "q_proj": 1.5, "k_proj": 1.5, "qkv_proj": 1.3, "o_proj": 0.6, "out_proj": 0.3,
    "down_proj": 1.6, "output_linear": 1.6, "c_proj": 1.6,
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model of one of the `FAMILIES`; `changes` replace attributes."""
    architecture, attributes = FAMILIES[family]
    common: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }
    return common | attributes | changes


def tiny_gemma_vision_config(window: int = 24, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny Gemma 3 that reads images, of 16 tokens each; `changes` replace attributes of the tower."""
    inner = tiny_config("gemma3_text", sliding_window=window)
    tower: dict[str, Any] = {
        "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 3, "image_size": 32, "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 16,
        "image_token_index": 300, "boi_token_index": 301, "eoi_token_index": 302, "tie_word_embeddings": True,
        "text_config": inner | {"model_type": "gemma3_text"}, "vision_config": tower | changes, "dtype": "float32",
    }  # fmt: skip


def tiny_vision_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model of one of the `VISION_FAMILIES`; `changes` replace attributes of the tower."""
    architecture, text, sections, tower = VISION_FAMILIES[family]
    inner = tiny_config(text)
    rope = inner["rope_parameters"] | {"mrope_section": sections}
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = 2 * sum(sections) / inner["head_dim"]
    inner |= {"rope_parameters": rope | ({} if family == "qwen2_5_vl" else {"mrope_interleaved": True})}
    common: dict[str, Any] = {
        "depth": 4, "hidden_size": 48, "num_heads": 3, "intermediate_size": 80, "in_channels": 3, "patch_size": 8,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": inner["hidden_size"],
        "model_type": family,
    }  # fmt: skip
    return {
        "architectures": [architecture], "model_type": family, "tie_word_embeddings": inner["tie_word_embeddings"],
        "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303,
        "text_config": inner | {"model_type": f"{family}_text"}, "vision_config": common | tower | changes,
        "dtype": "float32",
    }  # fmt: skip


def tensors(parameters: Mapping[str, Parameter], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 values) for each parameter of a model."""
    tied = "lm_head.weight" not in parameters
    for name, parameter in parameters.items():
        tensor = values(name, parameter.shape, seed, tied=tied)
        yield name, tensor - parameter.offset if parameter.offset else tensor


def values(name: str, shape: tuple[int, ...], seed: int, *, tied: bool) -> Tensor:
    """Normal values whose scale depends on what the tensor is for, in float32.

    A tied embedding is small and the final norm makes up for it: else a token's own embedding in the residual
    stream would make every model repeat its input.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    convolves = len(shape) > 3  # a patch is its input
    mean, deviation = _scale(name, math.prod(shape[1:]) if convolves else shape[-1], tied)
    return torch.empty(shape).normal_(mean, deviation, generator=generator)


def _scale(name: str, width: int, tied: bool) -> tuple[float, float]:
    """Mean and deviation.  A projection's deviation is a gain over the root of its input width; attention puts less
    into the residual stream than the feed-forward, else all positions of a deep model end up alike.
    """
    small = 0.02
    if name.endswith((".bias", "_bias")):
        return 0.0, 0.1
    if name in ("model.norm.weight", "model.embedding_norm.weight"):
        middle = 2.0 / (small * width**0.5) if tied else 1.0
        return middle, 0.1 * middle
    if name.endswith(("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")):
        return 1.5, 0.1
    if name.endswith(NORMS):
        return 1.0, 0.1
    if name.endswith(("pos_embed.weight", "position_embedding.weight")):
        return 0.0, 0.5
    if name == "model.embed_tokens.weight":
        return 0.0, small if tied else 0.15
    if name.endswith("A_log"):  # as trained models are: e^A_log from 0.5 to 8
        return 0.7, 0.7
    if name.endswith("dt_bias"):
        return -2.0, 1.0
    if name.endswith(".sinks"):
        return 0.5, 1.0
    part = name.removesuffix(".weight").rpartition(".")[2]
    return 0.0, GAINS.get(part, 1.0) / width**0.5


def write_checkpoint(directory: Path, hf: Mapping[str, Any], *, seed: int = 0, shards: int = 1) -> Path:
    """Write config.json and random weights in the config's dtype as a Hugging Face checkpoint; returns `directory`.

    `shards` > 1: that many files and an index.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(hf), indent=2) + "\n")
    dtype = getattr(torch, hf.get("dtype") or "float32")
    spec, options = decoder_spec(flat(dict(hf))), LayerOptions(dtype)
    parameters = make_model(spec, options, options, rope_tables(spec, 1)).parameters_by_name()
    named = {name: tensor.to(dtype) for name, tensor in tensors(parameters, seed)}
    if spec.vision is not None:
        named = _as_released(named, spec)
    if isinstance(spec, EncoderSpec):
        named = {_stored_name(name, spec): tensor for name, tensor in named.items()}
    if shards == 1:
        save_file(named, directory / SINGLE, metadata={"format": "pt"})
        return directory
    places: dict[str, str] = {}
    for part in range(shards):
        file = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        held = {name: tensor for number, (name, tensor) in enumerate(named.items()) if number % shards == part}
        save_file(held, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(held, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return directory


def _stored_name(name: str, spec: EncoderSpec) -> str:
    """What an encoder's checkpoints call a tensor of this name."""
    pairs = [(old, new) for old, new in spec.renames if new and not old.startswith(".")]
    return next((old + name.removeprefix(new) for old, new in pairs if name.startswith(new)), name)


def _as_released(named: dict[str, Tensor], spec: DecoderSpec) -> dict[str, Tensor]:
    """The tensors of a model that reads images as checkpoints have them: another prefix, experts in one tensor."""
    assert spec.vision is not None
    tower = spec.vision.name
    if isinstance(spec.vision, SiglipSpec):
        places = (tower, spec.vision.projector_name)
        return {
            name.removeprefix("model.") if name.startswith(places) else f"language_model.{name}": tensor
            for name, tensor in named.items()
        }
    renamed = {
        name if name.startswith(tower) else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in named.items()
    }
    for layer, mixture in spec.mixtures.items():
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([renamed.pop(f"{prefix}{expert}.{one}.weight").t() for expert in range(mixture.experts)])
            for one in mixture.names
        )
        renamed[prefix + "gate_up_proj"] = torch.cat((gate, up), dim=2).contiguous()
        renamed[prefix + "down_proj"] = down.contiguous()
    return renamed
