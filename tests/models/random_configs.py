"""Random config.json of tiny models of every family: odd sizes, optional attributes, ropes, old and new spellings."""

from __future__ import annotations

import random
from typing import Any

from tests.tiny_families import FAMILIES
from tests.tiny_models import tiny_config

HEAD_DIMS = (4, 6, 8, 20, 40, 80, 96, 192, 320)
SIZES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (33, 97, 128, 255, 320),
    "intermediate_size": (7, 16, 31, 64),
    "num_hidden_layers": (1, 2, 3, 5),
    "rms_norm_eps": (1e-6, 1e-3),
    "max_position_embeddings": (512, 600),
}
ADDED: dict[str, tuple[Any, ...]] = {  # also to configs of families that do not read them
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "use_sliding_window": (True, False),
    "sliding_window": (1, 2, 3, 16, 24, 600),
    "max_window_layers": (0, 1, 28),
    "sliding_window_pattern": (1, 2, 3),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0], [1, 2], None),
    "rope_interleave": (True, False),
    "norm_topk_prob": (True, False),
    "use_qk_norm": (False,),
}
OPTIONAL: dict[str, tuple[Any, ...]] = {  # where the family's config has them
    "use_bias": (True, False),
    "use_qk_norm": (True, False),
    "first_k_dense_replace": (0, 1, 9),
    "n_shared_experts": (1, 2),
    "shared_expert_intermediate_size": (8, 40),
    "moe_intermediate_size": (8, 31),
    "routed_scaling_factor": (0.7, 1.0, 2.5),
    "moe_num_shared_experts": (0, 1, 2),
    "num_dense_layers": (0, 1, 3),
    "shared_intermediate_size": (16, 33),
    "attn_logit_softcapping": (None, 5.0),
    "query_pre_attn_scalar": (8, 256),
    "final_logit_softcapping": (None, 3.0),
    "embedding_multiplier": (1.0, 12.0),
    "logits_scaling": (1.0, 8.0, 3.0),
    "residual_multiplier": (0.2, 1.0),
    "logit_scale": (0.0625, 2.0),
    "conv_L_cache": (1, 2, 4),
    "conv_bias": (True, False),
    "linear_num_key_heads": (1, 2),
    "linear_key_head_dim": (8, 20),
    "linear_value_head_dim": (8, 24),
    "linear_conv_kernel_dim": (2, 4),
    "mamba_d_state": (8, 20),
    "mamba_d_conv": (2, 4),
    "mamba_head_dim": (8, 12),
    "ssm_state_size": (8, 20),
    "state_size": (8, 20),
    "layer_norm_epsilon": (1e-5, 1e-3),
    "scale_depth": (None, 1.4),
    "dim_model_base": (None, 16),
    "position_embedding_type": ("rope", "nope", None),
    "layer_norm_eps": (1e-5, 1e-3),
    "rotary_pct": (0.25, 0.5, 1.0),
    "use_parallel_residual": (True, False),
    "block_auto_adjust_ff_dim": (True, False),
    "qk_nope_head_dim": (4, 12),
    "qk_rope_head_dim": (4, 8, 16),
    "v_head_dim": (4, 20),
    "kv_lora_rank": (8, 18),
    "q_lora_rank": (None, 12),
}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu", "relu", "relu2")
YARN: dict[str, tuple[Any, ...]] = {
    "original_max_position_embeddings": (16, 32, 128),
    "beta_fast": (1, 16.0, 32),
    "beta_slow": (0.5, 1, 2.0),
    "attention_factor": (0.5, 1.0),
    "mscale": (0, 0.7),
    "mscale_all_dim": (0, 1.0),
}

# transformers fails without it; a Gemma 4 so narrow would have heads of 256
NEED_HEAD_DIM = ("gemma4_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "mixtral")
OF_HIDDEN_SIZE = ("gpt2", "gpt_neox", "opt")  # whose heads divide it


def random_config(family: str, seed: int) -> dict[str, Any]:
    """config.json of a tiny model of one of the `FAMILIES`, which transformers reads, too."""
    rng = random.Random(f"{family} {seed}")
    hf = tiny_config(family)
    for options, share in ((SIZES, 1.0), (ADDED, 0.3), (OPTIONAL, 0.5)):
        for name, values in options.items():
            if (options is not OPTIONAL or name in hf) and rng.random() < share:
                hf[name] = rng.choice(values)
    if family == "ernie4_5_moe":
        hf["use_bias"] = False  # is not served with experts
    elif family == "deepseek_v2":
        hf["norm_topk_prob"] = False  # likewise
    elif family == "granitemoehybrid":
        hf["mamba_n_heads"] = 1  # transformers checks it
    elif family == "bamba":
        hf |= {"mamba_d_head": "auto", "mamba_n_groups": (groups := rng.choice((1, 2)))}
        hf["mamba_n_heads"] = groups * rng.choice((1, 2))
    elif family == "falcon_h1":
        hf["mamba_n_heads"] = hf["mamba_d_ssm"] // (dim := rng.choice((8, 16, 20)))
        hf |= {"mamba_d_head": rng.choice((dim, "auto")), "mamba_conv_bias": rng.random() < 0.5}
        hf |= {"attention_in_multiplier": 1.0} if hf.get("attention_bias") else {}
        hf |= {"mlp_multipliers": [1.0, 0.5]} if hf.get("mlp_bias") else {}
    elif family == "nemotron_h":
        hf["mamba_num_heads"] = (groups := rng.choice((1, 2))) * rng.choice((1, 2, 3))
        hf |= {"n_groups": groups, "conv_kernel": rng.choice((2, 4)), "use_bias": rng.random() < 0.5}
        hf |= {"use_conv_bias": rng.random() < 0.5, "mlp_hidden_act": rng.choice(ACTIVATIONS)}
    elif "linear_num_key_heads" in hf:
        hf["linear_num_value_heads"] = hf["linear_num_key_heads"] * rng.choice((1, 2, 3))
    _heads(rng, hf, family)
    if family == "mamba2":
        hf |= {
            "num_heads": 2 * (groups := rng.choice((1, 2, 4))),
            "n_groups": groups,
            "conv_kernel": rng.choice((2, 4)),
        }
        hf |= {"hidden_size": groups * (half := rng.choice((6, 8, 12))), "head_dim": half}
    _layers(rng, hf, family)
    if any(name in hf for name in COUNTS):
        _experts(rng, hf)
    else:
        only_silu = "linear_num_key_heads" in hf or family in ("bamba", "mamba2", "nemotron_h", "falcon_h1")
        for name in () if only_silu else ("hidden_act", "hidden_activation"):
            if name in hf and rng.random() < 0.5:
                hf[name] = rng.choice(ACTIVATIONS)
    _ropes(rng, hf, family)
    return hf


def _heads(rng: random.Random, hf: dict[str, Any], family: str) -> None:
    heads = rng.choice((1, 2, 3, 4, 6))
    hf |= {"num_attention_heads": heads, "hidden_size": heads * rng.choice((6, 8, 10, 16, 20))}
    hf["num_key_value_heads"] = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
    if "kv_lora_rank" in hf:
        hf |= {"num_key_value_heads": heads, "head_dim": hf["qk_rope_head_dim"]}
    elif family in OF_HIDDEN_SIZE:
        hf["hidden_size"] = heads * rng.choice((8, 16, 24))
        del hf["head_dim"]
    elif family == "bamba" or "rotary_dim" in hf or "partial_rotary_factor" in hf | (hf["rope_parameters"] or {}):
        hf["head_dim"] = rng.choice((8, 16, 24))  # any part is even
        if family == "stablelm":  # which does not read head_dim
            hf["hidden_size"] = heads * hf.pop("head_dim")
        if "rotary_dim" in hf:
            hf["rotary_dim"] = rng.choice((4, 8, None))
    elif family in ("cohere2", "olmoe") or (family not in NEED_HEAD_DIM and rng.random() < 0.5):
        del hf["head_dim"]  # which those two do not read
    else:
        hf["head_dim"] = rng.choice(HEAD_DIMS)


def _layers(rng: random.Random, hf: dict[str, Any], family: str) -> None:
    layers = hf["num_hidden_layers"]
    if family == "nemotron_h":
        kinds = [rng.choice(("M", "M-", "*", "*-")) for _ in range(layers)]
        del hf["layers_block_type"], hf["num_hidden_layers"]
        hf["hybrid_override_pattern"] = "".join(kinds)
    if "layer_types" in hf:
        kinds = sorted(set(hf["layer_types"]))
        if kinds == ["full_attention", "sliding_attention"] and rng.random() < 0.3:
            del hf["layer_types"]
        else:
            hf["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
    if "no_rope_layers" in hf:
        hf["no_rope_layers"] = rng.choice((None, [rng.randrange(2) for _ in range(layers)]))
    if "mlp_layer_types" in hf:
        hf["mlp_layer_types"] = rng.choice((None, [rng.choice(("dense", "sparse")) for _ in range(layers)]))
    if family in ("mistral", "mixtral", "starcoder2", "phi3") and rng.random() < 0.3:
        hf["sliding_window"] = None


def _experts(rng: random.Random, hf: dict[str, Any]) -> None:
    name = next(name for name in COUNTS if name in hf)
    count = available = hf[name] and rng.choice((2, 4, 8))
    hf[name] = count
    if not count:
        return
    if "n_group" in hf:
        groups = rng.choice([one for one in (1, 2, 4) if count // one >= 2])
        hf |= {"n_group": groups, "topk_group": rng.randint(1, groups)}
        available = count // groups * hf["topk_group"]
    hf |= dict.fromkeys((one for one in CHOSEN if one in hf), rng.randint(1, available))


def _ropes(rng: random.Random, hf: dict[str, Any], family: str) -> None:
    """Another rope, perhaps as transformers 4 spelled it."""
    parameters = hf["rope_parameters"]
    if family in ("gpt2", "mamba2", "opt"):
        del hf["rope_parameters"]  # transformers reads some of its attributes though it has no rope
        return
    if family == "ministral3":  # which needs both of these
        growth = {"llama_4_scaling_beta": rng.choice((0.1, 1.0)), "original_max_position_embeddings": 24}
        hf["rope_parameters"] = _rope(rng, hf) | growth
        return
    if any(isinstance(value, dict) for value in parameters.values()):
        hf["rope_parameters"] = {kind: _rope(rng, hf) for kind in parameters}
        for rope in hf["rope_parameters"].values() if family == "gemma4_text" else ():  # which needs it
            rope |= {"original_max_position_embeddings": 64} if rope["rope_type"] == "yarn" else {}
        return
    rope = {"rope_type": "default", "rope_theta": 500} if family == "phi3" else _rope(rng, hf)
    if "partial_rotary_factor" in parameters:
        rope["partial_rotary_factor"] = rng.choice((0.25, 0.5, 1.0))
    elif "partial_rotary_factor" in hf:
        hf["partial_rotary_factor"] = rng.choice((0.25, 0.5, 0.75, 1.0))
    if rng.random() < 0.5:
        hf["rope_parameters"] = rope
        return
    del hf["rope_parameters"]
    hf |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope["rope_type"] != "default":
        if rng.random() < 0.5:
            rope["type"] = rope.pop("rope_type")
        hf["rope_scaling"] = rope


def _rope(rng: random.Random, hf: dict[str, Any]) -> dict[str, Any]:
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    kinds = ("default", "linear", "yarn", "llama3", *(("dynamic",) if dim > 8 else ()))
    rope: dict[str, Any] = {"rope_type": rng.choice(kinds), "rope_theta": rng.choice((500, 10000.0, 1e6))}
    if rope["rope_type"] != "default":
        rope["factor"] = rng.choice((1.5, 4, 40.0))
    if rope["rope_type"] == "llama3":
        rope |= {
            "low_freq_factor": 1,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": rng.choice((32, 64)),
        }
    if rope["rope_type"] == "yarn":
        rope |= {name: rng.choice(values) for name, values in YARN.items() if rng.random() < 0.4}
    return rope


def every(seeds: int) -> list[tuple[str, int]]:
    """All (family, seed) pairs, with `seeds` configurations of each family."""
    return [(family, seed) for seed in range(seeds) for family in sorted(FAMILIES)]
