"""Small configurations of whatever architecture transformers has, made from its own defaults by the names of sizes."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

SIZES: dict[int, str] = {
    64: "hidden_size d_model n_embd embedding_size emb_dim",
    96: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim dff "
    "intermediate_size_mlp shared_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size",
    40: "moe_intermediate_size moe_shared_expert_intermediate_size",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads "
    "attention_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    2: "num_key_value_heads num_experts_per_tok moe_topk top_k eos_token_id",
    16: "head_dim d_kv attention_head_dim v_head_dim qk_nope_head_dim global_head_dim swa_head_dim",
    8: "qk_rope_head_dim rotary_dim hidden_size_per_layer_input mamba_d_state ssm_state_size state_size",
    320: "vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings n_positions max_sequence_length max_seq_len seq_length",
    32: "kv_lora_rank q_lora_rank index_head_dim linear_key_head_dim linear_value_head_dim",
    24: "sliding_window",
    1: "n_group topk_group first_k_dense_replace num_dense_layers moe_layer_start_index bos_token_id "
    "decoder_start_token_id",
    0: "pad_token_id",
}
BY_NAME = {name: size for size, names in SIZES.items() for name in names.split()}
LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types")
OTHERS: dict[str, dict[str, Any]] = {  # what else some of them need
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "electra": {"is_decoder": True},
    "ernie": {"is_decoder": True},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 10,
        "layer_types": ["sliding_attention", *["sliding_attention"] * 3, "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 10,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 24},
    "inkling2_loop_text": {"unpadded_vocab_size": 320},
    "inkling2_text": {"unpadded_vocab_size": 320},
    "roberta": {"is_decoder": True},
    "xlm-roberta": {"is_decoder": True},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(model_type: str) -> PretrainedConfig:
    """A configuration of this type with sizes that are small where their names are known."""
    kind = CONFIG_MAPPING[model_type]
    values: dict[str, Any] = kind().to_dict()
    changes = _smaller(values)
    for name, value in values.items():
        if name.endswith("_config") and "text" in name and isinstance(value, dict):
            changes[name] = _smaller(value)
    return kind(**changes | OTHERS.get(model_type, {}))


def _smaller(values: dict[str, Any]) -> dict[str, Any]:
    """The attributes to change; layers get the kinds that transformers gives so few of them."""
    changes: dict[str, Any] = {name: BY_NAME[name] for name in values if name in BY_NAME and type(values[name]) is int}
    return changes | {name: None for name in LAYERS if isinstance(values.get(name), list)}
