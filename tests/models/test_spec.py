"""Reading config.json: the same values transformers reads, and a refusal for what is not built."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from tests.tiny_families import FAMILIES
from tests.tiny_models import mixtures_of, tiny_config
from tokserve.base.errors import StartError
from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import RopeSpec
from tokserve.models.block import AROUND
from tokserve.models.decoder import DecoderSpec
from tokserve.models.registry import ARCHITECTURES, decoder_spec

ABSENT = object()


def config(family: str, **changes: Any) -> dict[str, Any]:
    hf = tiny_config(family) | changes
    return {name: value for name, value in hf.items() if value is not ABSENT}


def spec_of(family: str, **changes: Any) -> DecoderSpec:
    return decoder_spec(config(family, **changes))


def windows(spec: DecoderSpec) -> list[int]:
    return [block.attention.window for block in spec.blocks]


def hf_config_of(hf: dict[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(**{name: value for name, value in hf.items() if name != "architectures"})


MIXTURES = {"qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "gpt_oss"}


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_absent_attributes_of_mixtures_mean_what_transformers_assumes(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 6}
    hf = {"architectures": tiny_config(family)["architectures"], "model_type": family, "num_attention_heads": 32}
    expected, spec = hf_config_of(hf | sizes), decoder_spec(hf | sizes)
    attention = spec.blocks[0].attention
    assert attention.kv_heads == expected.num_key_value_heads
    assert attention.dim == (getattr(expected, "head_dim", None) or 128 // 32)
    assert (spec.norm.eps, spec.tied) == (expected.rms_norm_eps, expected.tie_word_embeddings)
    assert spec.max_position == expected.max_position_embeddings
    (rope,) = spec.ropes
    assert rope.theta == expected.rope_parameters["rope_theta"]
    assert rope.dim == attention.dim * expected.rope_parameters.get("partial_rotary_factor", 1.0)
    mixture = mixtures_of(spec)[5]
    assert mixture.router.chosen == expected.num_experts_per_tok
    assert mixture.router.normalize == getattr(expected, "norm_topk_prob", True)
    assert mixture.experts == (getattr(expected, "num_experts", None) or expected.num_local_experts)
    assert mixture.inner == getattr(expected, "moe_intermediate_size", 64)
    dense_layers = getattr(expected, "first_k_dense_replace", 0)
    assert list(mixtures_of(spec)) == list(range(dense_layers, 6))
    if mixture.shared is not None:
        shared = getattr(expected, "shared_expert_intermediate_size", mixture.inner)
        assert mixture.shared.inner == shared
    assert windows(spec) == ([128, 0] * 3 if family == "gpt_oss" else [0] * 6)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_absent_attributes_mean_what_transformers_assumes(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 40}
    architecture = tiny_config(family)["architectures"]
    hf = {"architectures": architecture, "model_type": family, "num_attention_heads": 32} | sizes
    expected, spec = hf_config_of(hf), decoder_spec(hf)
    attention = spec.blocks[0].attention
    assert attention.kv_heads == expected.num_key_value_heads
    assert attention.dim == (128 // 32 if family == "qwen2" else expected.head_dim)
    assert spec.norm.eps == expected.rms_norm_eps
    assert spec.tied == expected.tie_word_embeddings
    assert spec.max_position == expected.max_position_embeddings
    assert spec.ropes == (RopeSpec(attention.dim, expected.rope_parameters["rope_theta"]),)
    assert set(windows(spec)) == {4096 if family == "mistral" else 0}
    assert attention.qkv_bias == (family == "qwen2")
    assert (attention.out_bias, spec.blocks[0].mlp.bias) == (False, False)
    assert attention.qk_norm == (spec.norm if family == "qwen3" else None)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_absent_attributes_are_read_as_those_that_transformers_writes(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 12}
    hf = {"architectures": tiny_config(family)["architectures"], "model_type": family, "num_attention_heads": 32}
    if family == "granitemoehybrid":  # by default it has experts and recurrent layers
        hf |= {"num_local_experts": 0, "layer_types": ["full_attention"] * 12}
    if family == "nemotron_h":  # likewise
        hf["hybrid_override_pattern"] = "M-M*-MM"
    if family == "mamba2":  # by default it is 4096 wide
        hf["num_heads"] = 16
    if family in ("deepseek_v2", "dots1"):
        hf |= {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}
    hf |= sizes
    written = hf_config_of(hf).to_dict() | {"architectures": hf["architectures"]}
    assert decoder_spec(hf) == decoder_spec(written)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_by_layer_equal_transformers(family: str) -> None:
    types = [ABSENT, ["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 3]
    counted = 0
    for used, window, first, kinds in itertools.product(
        (ABSENT, False, True), (ABSENT, None, 8), (ABSENT, 0, 1, 3), types
    ):
        hf = config(family, use_sliding_window=used, sliding_window=window, max_window_layers=first, layer_types=kinds)
        expected = hf_config_of(hf)
        sizes = [expected.sliding_window if kind == "sliding_attention" else 0 for kind in expected.layer_types]
        if None in sizes:  # transformers accepts the config and fails when it makes the mask
            with pytest.raises(StartError, match="layer_types names sliding_attention, but no sliding_window"):
                decoder_spec(hf)
        else:
            counted += any(sizes)
            assert windows(decoder_spec(hf)) == sizes, hf
    assert counted > 5


def test_window_everywhere() -> None:
    assert windows(spec_of("mistral", sliding_window=7)) == list((7, 7, 7))
    assert windows(spec_of("mistral", sliding_window=None)) == list((0, 0, 0))
    assert windows(spec_of("mistral", sliding_window=ABSENT)) == list((4096,) * 3)
    assert windows(spec_of("llama", sliding_window=7)) == list((0, 0, 0))


def gemma(**attributes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 14}
    return (
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_attention_heads": 8}
        | sizes
        | attributes
    )


BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5},
    "sliding_attention": {"rope_type": "default"},
}


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_flat_rope_parameters_are_those_of_layers_without_a_window(family: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    flat = spec_of(family, rope_parameters={**scaling, "rope_theta": 3e5})
    older = spec_of(family, rope_parameters=ABSENT, rope_scaling=scaling, rope_theta=3e5)
    assert {rope.kind for rope in flat.ropes} == {"yarn", "default"}
    assert [block.attention.rope for block in flat.blocks] == [block.attention.rope for block in older.blocks]


def test_null_key_value_heads_are_as_many_as_query_heads() -> None:
    def kv_heads(value: object) -> int:
        return spec_of("mixtral", num_attention_heads=16, num_key_value_heads=value).blocks[0].attention.kv_heads

    assert [kv_heads(value) for value in (None, ABSENT, 2)] == [16, 8, 2]


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 9e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_theta": 5e5, "rope_local_base_freq": 9e3, "rope_scaling": None, "sliding_window_pattern": 3},
        {"rope_parameters": BY_TYPE, "layer_types": ["full_attention"] * 7 + ["sliding_attention"] * 7},
        {"query_pre_attn_scalar": 100, "head_dim": 32, "sliding_window": 16, "tie_word_embeddings": False},
    ],
)
def test_gemma_reads_what_transformers_reads(attributes: dict[str, Any]) -> None:
    hf = gemma(**attributes)
    expected, spec = hf_config_of(hf), decoder_spec(hf)
    assert (spec.tied, spec.max_position) == (expected.tie_word_embeddings, expected.max_position_embeddings)
    assert spec.embedding_multiplier == expected.hidden_size**0.5
    for block, kind in zip(spec.blocks, expected.layer_types, strict=True):
        attention, rope = block.attention, expected.rope_parameters[kind]
        assert (attention.kv_heads, attention.dim) == (expected.num_key_value_heads, expected.head_dim)
        assert attention.scale == expected.query_pre_attn_scalar**-0.5
        assert attention.window == (expected.sliding_window if kind == "sliding_attention" else 0)
        assert (attention.rope.kind, attention.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert attention.rope.factor == rope.get("factor", 1.0)
        assert block.norm == attention.qk_norm == NormSpec(expected.rms_norm_eps, offset=1.0) and block.norms == AROUND
        assert block.mlp.activation == "gelu_tanh"


ROPES: list[dict[str, Any]] = [
    {"rope_parameters": ABSENT},
    {"rope_parameters": ABSENT, "rope_theta": 7.0},
    {"rope_parameters": ABSENT, "rope_theta": 7.0, "rope_scaling": None},
    {"rope_parameters": ABSENT, "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}, "rope_theta": 7.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7.0},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("changes", ROPES)
def test_rope_spellings_equal_transformers(changes: dict[str, Any]) -> None:
    hf = config("llama", **changes)
    expected = hf_config_of(hf)
    expected.standardize_rope_params()  # as its frequency functions do
    parameters = expected.rope_parameters
    (rope,) = decoder_spec(hf).ropes
    assert (rope.kind, rope.theta, rope.dim) == (parameters["rope_type"], parameters["rope_theta"], 16)
    assert rope.factor == parameters.get("factor", 1.0)
    if rope.kind == "yarn":
        assert rope.original == parameters["original_max_position_embeddings"]
    if rope.kind == "dynamic":
        assert rope.original == hf["max_position_embeddings"]


def test_yarn_attributes_reach_the_spec() -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 5.0,
        "factor": None,
        "original_max_position_embeddings": 128,
        "beta_fast": 9,
        "beta_slow": 2.5,
        "truncate": False,
        "mscale": 0.5,
        "mscale_all_dim": 0.25,
    }
    assert spec_of("llama", rope_parameters=parameters).ropes == (
        RopeSpec(
            16, 5.0, "yarn", 4.0, 128, beta_fast=9.0, beta_slow=2.5, truncate=False, mscale=0.5, mscale_all_dim=0.25
        ),
    )
    (rope,) = spec_of("llama", rope_parameters=parameters | {"attention_factor": 0.5}).ropes
    assert rope.attention_factor == 0.5


W4 = {  # compressed-tensors
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}}},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantization 'hqq'"),
    ("llama", {"quantization_config": {}}, "quantization 'unnamed'"),
    ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}, "quantization 'compressed-tensors'"),
    (
        "llama",
        {
            "quantization_config": W4
            | {
                "transform_config": {
                    "config_groups": {
                        "u": {"type": "hadamard", "apply": [{"location": "weight_output"}, {"location": "output"}]},
                        "R3": {"type": "hadamard", "apply": [{"location": "q_attn"}, {"location": "k_cache"}]},
                    }
                }
            }
        },
        "quantization_config asks for transforms (transform_config) at k_cache, output, q_attn;",
    ),
    ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("llama", {"hidden_size": ABSENT}, "hidden_size is missing"),
    ("llama", {"vocab_size": "many"}, "vocab_size must be an integer of at least 1, found 'many'"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, found 0"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, found 1000000000"),
    ("lfm2", {"num_hidden_layers": 4097}, "num_hidden_layers must be at most 4096, found 4097"),
    ("llama", {"num_attention_heads": True}, "num_attention_heads must be an integer of at least 1, found True"),
    ("llama", {"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
    ("llama", {"head_dim": 15}, "head_dim must be even, found 15"),
    ("llama", {"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported; supported are: silu"),
    ("llama", {"rms_norm_eps": "tiny"}, "rms_norm_eps must be a positive number"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
    ("llama", {"rope_parameters": {"rope_type": "axial"}}, "rope_type 'axial' is not supported"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 6 numbers"),
    ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor must rotate an even part of a head of 16"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm is not supported"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is not supported"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias is not supported"),
    ("hunyuan_v1_moe", {"moe_topk": [1]}, "moe_topk has 1 entries for 3 layers"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be False"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be sigmoid"),
    ("deepseek_v3", {"kv_lora_rank": 33}, "kv_lora_rank must be even, found 33"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group is 5, more than n_group 4"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must say dense or sparse"),
    ("granitemoehybrid", {"layer_types": ["mamba2"] * 3}, "layer_types names unsupported kinds: mamba2"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 2}, "layer_types has 2 entries for 3 layers"),
    ("bamba", {"mamba_n_heads": 7}, "mamba_n_heads 7 heads of 16 are not 128 elements"),
    ("bamba", {"mamba_n_groups": 3}, "mamba_n_heads 8 is not a multiple of mamba_n_groups 3"),
    ("bamba", {"time_step_limit": [2, 1]}, "time_step_limit must be two numbers"),
    ("bamba", {"time_step_limit": 1.0}, "time_step_limit must be two numbers"),
    ("deepseek_v3", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; supported are: silu"),
    ("granitemoeshared", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; supported are"),
    ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for experts"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of integers, found 1"),
    ("llama", {"model_type": ["llama"]}, "model_type must be a string, found ['llama']"),
    (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 6},
            "original_max_position_embeddings": 1,
        },
        "original_max_position_embeddings must be 2 or more with longrope, found 1",
    ),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is all"),
    (
        "gemma4_text",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9},
        "vocab_size_per_layer_input is 9",
    ),
    ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers leaves no layer"),
    ("gemma4_text", {"enable_moe_block": True}, "top_k_experts is missing"),
    ("gemma4_text", {"per_layer_config": {"3": {}}}, "per_layer_config names '3'"),
    ("gemma4_text", {"per_layer_config": {"1": {"rms_norm_eps": 1}}}, "per_layer_config.1 has attributes besides"),
    ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2"),
    ("llama4_text", {"no_rope_layers": [1, 2, 1, 0]}, "no_rope_layers must be a list of 0 and 1 for 4 layers"),
    ("llama4_text", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning must be true or false"),
    (
        "llama4_text",
        {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4},
        "names chunked_attention",
    ),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings is missing"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 0 and 1 for 3 layers"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor must be a positive number"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling must be an object"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor must be above low_freq_factor",
    ),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    ("qwen3", {"layer_types": ["full_attention", "conv", "mamba"]}, "unsupported kinds: conv, mamba"),
    ("qwen3", {"layer_types": "full_attention"}, "layer_types must be a list of strings"),
    ("llama", {"hidden_size": 64.5}, "hidden_size must be an integer"),
    ("llama", {"hidden_act": 5}, "hidden_act must be a string, found 5"),
    ("llama", {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "4 or more with dynamic"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
        "rope_theta must not be 1 with yarn",
    ),
    ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ("gemma3_text", {"hidden_activation": "relu6"}, "hidden_activation 'relu6' is not supported"),
    ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1, found 0"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_refusals_name_the_attribute(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError) as caught:
        spec_of(family, **changes)
    assert message in str(caught.value)


def test_transforms_of_weights_alone_are_in_the_weights() -> None:
    offline = {"type": "hadamard", "apply": [{"location": "weight_input"}, {"location": "weight_output"}]}
    for transforms in (None, {}, {"config_groups": {}}, {"config_groups": {"R1": offline}}):
        assert (
            spec_of("llama", quantization_config=W4 | {"transform_config": transforms}).format.name
            == W4["quant_method"]
        )


@pytest.mark.parametrize("names", [["GPTBigForCausalLM"], [], None])
def test_unknown_architectures_are_refused_with_the_list(names: list[str] | None) -> None:
    with pytest.raises(StartError) as caught:
        spec_of("llama", architectures=names)
    for name in [*(names or []), *ARCHITECTURES]:
        assert name in str(caught.value)


def test_a_known_architecture_among_several_is_taken() -> None:
    assert spec_of("qwen3", architectures=["Unknown", "Qwen3ForCausalLM"]).blocks[0].attention.qk_norm
