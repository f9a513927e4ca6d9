"""What config.json says of a tiny model of every family, beyond what all of them have in common (`tiny_models`)."""

from __future__ import annotations

from typing import Any

MULTIPLIERS = {  # of Granite
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.9,
}
LATENT = {  # attention
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "head_dim": 8,
}
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
    "bamba": (
        "BambaForCausalLM",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_head": 16,
            "mamba_d_state": 24,
            "mamba_chunk_size": 16,
        },
    ),
    "arcee": ("ArceeForCausalLM", {"hidden_act": "relu2"}),
    "exaone4": (
        "Exaone4ForCausalLM",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "stablelm": (
        "StableLmForCausalLM",
        {
            "use_qkv_bias": True,
            "layer_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "nemotron": (
        "NemotronForCausalLM",
        {
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "solar_open": (
        "SolarOpenForCausalLM",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            "num_hidden_layers": 5,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 24,
            "chunk_size": 16,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 24,
            "chunk_size": 16,
            "residual_in_fp32": False,
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
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2",
        [2, 3, 3],
        {"hidden_act": "silu", "window_size": 32, "fullatt_block_indexes": [1, 3]},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        [4, 2, 2],
        _LEARNED | {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_moe",
        [4, 2, 2],
        _LEARNED | {"deepstack_visual_indexes": [1]},
    ),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", [2, 1, 1], _LEARNED),
}
