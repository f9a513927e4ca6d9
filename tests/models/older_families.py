"""Configurations of GPT-2, OPT, Phi and GPT-NeoX that `test_parity` compares with transformers."""

from __future__ import annotations

from typing import Any

OLDER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-scales": (
        "gpt2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
            "n_inner": 100,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "opt": ("opt", {}),
    "opt-no-biases": (
        "opt",
        {
            "enable_bias": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
            "max_position_embeddings": 151,
        },
    ),
    "phi": ("phi", {}),
    "phi-tied": ("phi", {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 4, "hidden_act": "gelu"}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-sequential": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rope_parameters": None,
            "rotary_emb_base": 5e3,
            "rotary_pct": 1.0,
            "hidden_size": 96,
            "head_dim": None,
        },
    ),
}
