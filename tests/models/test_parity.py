"""Logits against transformers on the same checkpoint: every family, option, rope type, dtype and kind of kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models.driver import Driver, cache_argument, prefill, random_ids
from tests.models.older_families import OLDER_FAMILIES
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import checkpoint
from tokserve.models.decoder import Decoder
from tokserve.models.load import load_decoder

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SCANS = {  # what state-space layers of Granite 4 add
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
    "position_embedding_type": None,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
GEMMA4_SMALL = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 320,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama-null-sizes": ("llama", {"num_key_value_heads": None, "head_dim": None}),
    "llama-one-kv-head-gelu": ("llama", {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-wide-heads": ("mistral", {"head_dim": 32, "rms_norm_eps": 1e-2}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": False},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-untied-biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 32}),
    "qwen3-mixed": ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": MIXED}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True, "num_experts": 7, "head_dim": 32},
    ),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "norm_topk_prob": True},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 24, "hidden_act": "gelu_pytorch_tanh", "head_dim": None}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-default-windows": ("gpt_oss", {"layer_types": None, "num_experts_per_tok": 1, "attention_bias": False}),
    "glm4-moe": ("glm4_moe", {}),
    "glm4-moe-plain": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 2},
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3-untied-biases": (
        "gemma3_text",
        {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 32, "layer_types": MIXED},
    ),
    "gemma3-older": (
        "gemma3_text",
        {
            "rope_parameters": None,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 1e6,
            "rope_local_base_freq": 5e3,
            "layer_types": None,
            "sliding_window_pattern": 2,
            "num_hidden_layers": 4,
        },
    ),
    "rope-theta": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "rope-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "rope-yarn": ("qwen2", {"rope_parameters": YARN}),
    "rope-yarn-factor": ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}}),
    "rope-yarn-mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * number for number in range(6)],
    "long_factor": [1.0 + number for number in range(6)],
}
CASES |= {
    "gemma": ("gemma", {}),
    "gemma-biases": ("gemma", {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 256}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 96, "query_pre_attn_scalar": 96},
    ),
    "gemma3-caps": ("gemma3_text", {"final_logit_softcapping": 7.0}),
    "gemma4": ("gemma4_text", {}),
    "gemma4-small": ("gemma4_text", GEMMA4_SMALL),
    "gemma4-experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4-values": (
        "gemma4_text",
        {
            "attention_k_eq_v": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 7.0,
            "layer_types": None,
            "num_hidden_layers": 4,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 20, "num_key_value_heads": 1, "partial_rotary_factor": 1.0}),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75}},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-odd": (
        "olmo2",
        {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 24, "intermediate_size": 157},
    ),
    "olmo3": ("olmo3", {}),
    "olmo3-older": (
        "olmo3",
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {k: YARN[k] for k in YARN if k != "rope_theta"}},
    ),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite4": ("granitemoehybrid", {}),
    "granite4-no-rope": ("granitemoehybrid", {"position_embedding_type": None, "attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3-windows": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3-interval": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    "glm": ("glm", {}),
    "glm-whole": ("glm", {"partial_rotary_factor": 1.0, "head_dim": 20, "attention_bias": False}),
    "glm4": ("glm4", {"num_key_value_heads": 1}),
    "ministral": ("ministral", {}),
    "ministral3": ("ministral3", {}),
    "llama4": ("llama4_text", {}),
    "llama4-plain": (
        "llama4_text",
        {
            "moe_layers": None,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [],
            "attention_chunk_size": None,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "ministral3-window": (
        "ministral3",
        {"sliding_window": 20, "rope_parameters": YARN | {"llama_4_scaling_beta": 1.5}, "head_dim": 32},
    ),
    "cohere": ("cohere", {}),
    "cohere-biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 16}),
    "cohere2": ("cohere2", {}),
    "cohere2-pattern": ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-plain": ("starcoder2", {"use_bias": False, "sliding_window": None, "hidden_act": "gelu"}),
    "seed-oss": ("seed_oss", {}),
    "seed-oss-relu": ("seed_oss", {"attention_out_bias": False, "mlp_bias": False, "hidden_act": "relu"}),
    "ernie": ("ernie4_5", {}),
    "ernie-no-bias": ("ernie4_5", {"use_bias": False, "head_dim": 80, "tie_word_embeddings": False}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0}},
    ),
    "llama-odd-sizes": (
        "llama",
        {
            "vocab_size": 323,
            "hidden_size": 48,
            "head_dim": 20,
            "num_key_value_heads": 1,
            "intermediate_size": 157,
            "attention_bias": True,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next-all-layers": (
        "qwen3_next",
        {
            "layer_types": None,
            "full_attention_interval": 2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 40,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-tied": (
        "qwen3_5_text",
        {"tie_word_embeddings": True, "linear_num_value_heads": 6, "linear_value_head_dim": 20, "attention_bias": True},
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}),
    "lfm2": ("lfm2", {}),
    "lfm2-moe": ("lfm2_moe", {}),
    "lfm2-adjusted": (
        "lfm2",
        {
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.3,
            "conv_bias": False,
            "conv_L_cache": 5,
            "tie_word_embeddings": False,
        },
    ),
}
CASES |= {
    "olmoe": ("olmoe", {}),
    "olmoe-plain": ("olmoe", {"norm_topk_prob": False, "attention_bias": True, "num_key_value_heads": 1}),
    "flex-olmo": ("flex_olmo", {}),
    "granite-moe": ("granitemoe", {}),
    "granite-moe-biases": (
        "granitemoe",
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "granite-moe-shared": ("granitemoeshared", {}),
    "granite-moe-unshared": ("granitemoeshared", {"shared_intermediate_size": 0}),
    "granite4-experts": (
        "granitemoehybrid",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
    ),
    "bamba": ("bamba", {}),
    "bamba-biases": (
        "bamba",
        {
            "mamba_n_heads": 4,
            "mamba_n_groups": 1,
            "mamba_d_head": "auto",
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite4-hybrid": ("granitemoehybrid", SCANS),
    "granite4-hybrid-experts": (
        "granitemoehybrid",
        SCANS | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48, "mamba_n_groups": 1},
    ),
    "cwm": ("cwm", {}),
    "cwm-default": ("cwm", {"layer_types": None, "rope_parameters": None, "mlp_bias": True, "num_hidden_layers": 5}),
    "olmo": ("olmo", {}),
    "olmo-biases": ("olmo", {"attention_bias": True, "num_key_value_heads": 1, "rope_parameters": YARN}),
    "arcee": ("arcee", {}),
    "arcee-biases": ("arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "exaone4": ("exaone4", {}),
    "exaone4-pattern": ("exaone4", {"layer_types": None, "sliding_window_pattern": 2, "num_key_value_heads": 4}),
    "exaone4-no-windows": ("exaone4", {"layer_types": ["full_attention"] * 3, "sliding_window": None}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False, "head_dim": 16}),
    "nemotron": ("nemotron", {}),
    "nemotron-biases": ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "hidden_act": "gelu"}),
    **OLDER_FAMILIES,
    "solar-open": ("solar_open", {}),
    "solar-open-plain": (
        "solar_open",
        {"n_group": 1, "topk_group": 1, "attention_bias": True, "norm_topk_prob": False},
    ),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1-plain": (
        "falcon_h1",
        {
            "mamba_d_ssm": None,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "attention_in_multiplier": 1.0,
            "mlp_multipliers": None,
            "mlp_bias": True,
            "ssm_multipliers": None,
            "ssm_in_multiplier": 1.0,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "nemotron-h": ("nemotron_h", {}),
    "nemotron-h-biases": (
        "nemotron_h",
        {
            "layers_block_type": None,
            "hybrid_override_pattern": "M*-MM-*",
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
            "mlp_hidden_act": "silu",
        },
    ),
    "mamba2": ("mamba2", {}),
    "mamba2-biases": (
        "mamba2",
        {
            "n_groups": 1,
            "use_bias": True,
            "conv_kernel": 3,
            "time_step_limit": [0.01, 0.2],
            "tie_word_embeddings": True,
        },
    ),
    "ernie-moe": ("ernie4_5_moe", {}),
    "ernie-moe-interval": (
        "ernie4_5_moe",
        {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_start_index": 0},
    ),
    "dots1": ("dots1", {}),
    "dots1-windows": ("dots1", {"layer_types": None, "max_window_layers": 1, "n_group": 1, "attention_bias": True}),
    "minimax-m2": ("minimax_m2", {}),
    "minimax-m2-whole": ("minimax_m2", {"rotary_dim": None, "head_dim": 24, "num_key_value_heads": 1}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "hunyuan-moe-by-layer": ("hunyuan_v1_moe", {"moe_topk": [1, 2, 3], "attention_bias": True}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-greedy": (
        "deepseek_v2",
        {
            "q_lora_rank": 24,
            "topk_method": "greedy",
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4},
        },
    ),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-plain": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": False,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "v_head_dim": 6,
            "kv_lora_rank": 18,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
        },
    ),
    "deepseek-v3-dense": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "qk_rope_head_dim": 34,
            "head_dim": 34,
        },
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "glm4-moe-lite-default": ("glm4_moe_lite", {"mlp_layer_types": None, "q_lora_rank": None}),
    "minicpm3": ("minicpm3", {}),
    "minicpm3-plain": (
        "minicpm3",
        {"scale_depth": None, "dim_model_base": None, "v_head_dim": None, "q_lora_rank": None, "mlp_bias": True},
    ),
    "youtu": ("youtu", {}),
}
FAST = {  # of those that other families' cases cover less than half
    "gemma2",
    "phi3-longrope",
    "olmo2-odd",
    "granite4-no-rope",
    "smollm3-windows",
    "glm4",
    "cohere2",
    "starcoder2",
    "hunyuan-alpha",
    "llama-odd-sizes",
    "qwen3-next",
    "lfm2",
    "bamba",
    "deepseek-v3",
    "ernie-moe",
    "gpt-neox",
    "gpt2",
    "opt",
    "phi",
}
FIRST = list(CASES).index("gemma")  # the cases before it are fast, too
EVERY = [
    name if number < FIRST or name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for number, name in enumerate(CASES)
]
CPP_FAST = pytest.mark.parametrize(
    "kernels", ["cpp", pytest.param("torch", marks=pytest.mark.slow)], indirect=True
)  # the references in torch are checked by test_decoder.py and by ops/test_ops.py, against those in C++
GREEDY = ["llama", "mistral", "qwen2-window", "qwen3", "gemma3", "rope-yarn", "gemma2", "cohere2"]
NEW = [family for family, _ in CASES.values() if family not in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")]
LENGTH = 150  # longer than every window and every original context
LARGEST = 1e-4  # |difference| of float32 logits that the contract allows; about 5e-5 at most on any kernels
# The norm of what a head reads from its state divides rounding errors by the size of that, here and in transformers,
# whose chunked sums are as far from float64 as tokserve's; on few tokens that shows.
OF_STATES = 2e-4


def allowed(hf: dict[str, Any]) -> float:
    """The largest difference of a float32 logit."""
    names = ("linear_num_key_heads", "mamba_n_heads", "mamba_num_heads", "state_size")
    return OF_STATES if any(name in hf for name in names) else LARGEST


def oracle(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def oracle_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def loaded(directory: Path, dtype: str = "float32", **options: Any) -> Decoder:
    hf = json.loads((directory / "config.json").read_text())
    options = {"head_dtype": "auto", "load_format": "auto", "seed": 0} | options
    return load_decoder(directory, hf, dtype=dtype, **options)


@pytest.fixture(scope="module")
def transformers_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """A case's checkpoint in `tiny`, as transformers saves it in `saved_by_transformers`, and transformers' model."""

    @cache
    def load_case(name: str) -> tuple[Path, PreTrainedModel]:
        family, changes = CASES[name]
        directory = tmp_path_factory.mktemp(name)
        model = oracle(write_checkpoint(directory / "tiny", tiny_config(family, **changes)))
        model.save_pretrained(directory / "saved_by_transformers")
        return directory, model

    return load_case


@pytest.mark.some(14)
@pytest.mark.parametrize("name", EVERY)
@CPP_FAST
@pytest.mark.usefixtures("kernels")
def test_float32_logits_equal_transformers(
    name: str, transformers_model: Callable[[str], tuple[Path, PreTrainedModel]]
) -> None:
    directory, model = transformers_model(name)
    family, changes = CASES[name]
    hf = tiny_config(family, **changes)
    ids = random_ids(LENGTH, hf["vocab_size"])
    expected = oracle_logits(model, ids)
    assert expected.std() > 1.5  # sharp enough for a difference to show
    actual = prefill(loaded(directory / "tiny"), ids)
    assert (actual - expected).abs().max() < allowed(hf)
    assert torch.equal(prefill(loaded(directory / "saved_by_transformers"), ids), actual)


@pytest.fixture(scope="module")
def greedy(
    transformers_model: Callable[[str], tuple[Path, PreTrainedModel]],
) -> Callable[[str], tuple[list[int], list[int]]]:
    """A prompt, and the tokens that transformers' model of a case says next, none of them by little."""

    @cache
    def tokens_of(name: str) -> tuple[list[int], list[int]]:
        _, model = transformers_model(name)
        family, changes = CASES[name]
        hf = tiny_config(family, **changes)
        prompt = random_ids(11, hf["vocab_size"], seed=3)
        with torch.no_grad():
            generated = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=64, do_sample=False
            )[0, len(prompt) :].tolist()
        first, second = oracle_logits(model, prompt + generated)[len(prompt) - 1 : -1].topk(2).values.unbind(-1)
        assert (first - second).min() > 2 * allowed(hf)  # so no rounding within the tolerance chooses another token
        return prompt, generated

    return tokens_of


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "name", [*GREEDY, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(set(NEW) & CASES.keys()))]
)
@CPP_FAST
@pytest.mark.usefixtures("kernels")
def test_greedy_decoding_equals_transformers(
    name: str,
    transformers_model: Callable[[str], tuple[Path, PreTrainedModel]],
    greedy: Callable[[str], tuple[list[int], list[int]]],
) -> None:
    prompt, expected = greedy(name)
    driver = Driver(loaded(transformers_model(name)[0] / "tiny"))
    results: list[int] = []
    pending = prompt
    while len(results) < 64:
        pending = [int(driver.step({0: pending})[0][-1].argmax())]
        results += pending
    assert len(set(expected)) > 10
    assert results == expected


def test_dynamic_rope_past_the_original_length_equals_cached_generation(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    hf = tiny_config("llama", max_position_embeddings=32, rope_parameters=rope)
    model = oracle(write_checkpoint(tmp_path, hf))
    ids = random_ids(80, hf["vocab_size"])
    name, cache, rows = cache_argument(model), None, []
    with torch.no_grad():
        for token in ids:
            step = model(torch.tensor([[token]]), use_cache=True, **{name: cache})
            cache = getattr(step, name)
            rows.append(step.logits[0, -1])
    decoder = loaded(tmp_path, max_model_len=128)
    actual = prefill(decoder, ids)
    assert (actual - torch.stack(rows)).abs().max() < LARGEST
    within = oracle_logits(oracle(tmp_path), ids[:32])
    assert (actual[:32] - within).abs().max() < LARGEST
    assert torch.equal(actual[:32], prefill(loaded(tmp_path), ids[:32]))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_older_config_spelling(family: str, tmp_path: Path) -> None:
    hf = tiny_config(family, torch_dtype="float32", rope_theta=5000.0)
    del hf["dtype"], hf["rope_parameters"]
    hf["rope_scaling"] = {"type": "linear", "factor": 2.0}
    model = oracle(write_checkpoint(tmp_path, hf))
    ids = random_ids(LENGTH, hf["vocab_size"])
    assert (prefill(loaded(tmp_path), ids) - oracle_logits(model, ids)).abs().max() < LARGEST


def sharp_checkpoint(directory: Path, family: str) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    }
    if family == "deepseek_v3":  # without experts: the choice of another one is not a small difference
        sizes |= {"num_key_value_heads": 8, "head_dim": 16, "kv_lora_rank": 128, "q_lora_rank": 96}
        sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 4}
    return write_checkpoint(directory, tiny_config(family, dtype="bfloat16", **sizes), seed=1)


class Sharp(NamedTuple):
    """A checkpoint, texts, and transformers' log-probabilities of these in float32 and in bfloat16."""

    directory: Path
    texts: list[list[int]]
    exact: Tensor
    rounded: Tensor


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sharp]:
    @cache
    def load_family(family: str) -> Sharp:
        directory = sharp_checkpoint(tmp_path_factory.mktemp(family), family)
        texts = [random_ids(256, 2048, seed) for seed in range(4)]
        models = oracle(directory), oracle(directory, torch.bfloat16)
        exact, rounded = (torch.cat([oracle_logits(m, ids).log_softmax(-1) for ids in texts]) for m in models)
        return Sharp(directory, texts, exact, rounded)

    return load_family


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma3_text", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
)
@CPP_FAST
@pytest.mark.usefixtures("kernels")
def test_bfloat16_is_as_near_to_float32_as_transformers(family: str, sharp: Callable[[str], Sharp]) -> None:
    directory, texts, exact, rounded = sharp(family)
    decoder, transformers_model = loaded(directory, "bfloat16"), rounded - exact
    actual_error = torch.cat([prefill(decoder, ids).log_softmax(-1) for ids in texts]) - exact
    assert actual_error.abs().mean() <= 1.2 * transformers_model.abs().mean()
    assert actual_error.abs().max() <= 1.2 * transformers_model.abs().max()
    expected, size = (
        (exact.exp() * actual_error).sum(-1),
        (exact.exp() * actual_error.abs()).sum(-1),
    )  # over the draws of each position
    assert expected.mean().abs() <= 0.1 * size.mean()
    assert actual_error.mean().abs() <= 0.1 * actual_error.abs().mean()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.usefixtures("kernels")
def test_float32_head_of_a_bfloat16_model(family: str, tmp_path: Path) -> None:
    directory = sharp_checkpoint(tmp_path, family)
    ids = random_ids(64, 2048)
    exact = oracle_logits(oracle(directory), ids)
    auto = prefill(loaded(directory, "bfloat16"), ids)
    full = prefill(loaded(directory, "bfloat16", head_dtype="float32"), ids)
    assert auto.dtype == full.dtype == torch.float32
    assert (full - exact).abs().mean() <= 1.1 * (auto - exact).abs().mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_serving_dtype_converts_a_float32_checkpoint(dtype: str, tmp_path: Path) -> None:
    hf = tiny_config("llama")
    expected = oracle_logits(oracle(write_checkpoint(tmp_path, hf)), random_ids(40, hf["vocab_size"]))
    decoder = loaded(tmp_path, dtype)
    assert {spec.dtype for spec in decoder.kv_specs()} == {dtype}
    actual = prefill(decoder, random_ids(40, hf["vocab_size"]))
    assert 0 < (actual - expected).abs().mean() < (0.06 if dtype == "bfloat16" else 0.01)


def test_a_qwen3_5_checkpoint_without_its_tower(tmp_path: Path) -> None:
    hf = tiny_config("qwen3_5_text")
    write_checkpoint(tmp_path / "text", hf)
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    others = {"model.visual.merger.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    (tmp_path / "whole").mkdir()
    save_file(renamed | others, tmp_path / "whole" / "model.safetensors")
    inner = {name: value for name, value in hf.items() if name not in ("architectures", "tie_word_embeddings")}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": inner,
        "vision_config": None,
    }
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    read = checkpoint.hf_config(tmp_path / "whole")
    assert read == hf | {"architectures": config["architectures"], "vision_config": None}
    ids = random_ids(40, hf["vocab_size"])
    served = load_decoder(tmp_path / "whole", read, dtype="float32", head_dtype="auto", load_format="auto", seed=0)
    assert torch.equal(prefill(served, ids), prefill(loaded(tmp_path / "text"), ids))
