"""Families without a spec function, against transformers: logits, greedy tokens, chunks, refusals, updates, LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models.driver import Driver, prefill, random_ids
from tokserve.base.errors import StartError
from tokserve.families.hf.load import load_module
from tokserve.families.hf.model import TransformersModel
from tokserve.features.lora.layer import LoraSlots
from tokserve.features.offline.llm import LLM
from tokserve.features.weights.staging import Staging
from tokserve.layers.low_rank import LowRank
from tokserve.protocol.params import SamplingParams
from tokserve.train import PolicyModel

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "stablelm": {"use_qkv_bias": True},
    "gpt_neox": {},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 64},
    "qwen2": {},
    "phi": {},
    "exaone4": {"sliding_window": 24},
    "nemotron": {"head_dim": 16},
    "ministral3": {},
    "cohere": {"use_qk_norm": True, "logit_scale": 1.5},
    "apertus": {},
    "llama4_text": {"intermediate_size_mlp": 96, "num_local_experts": 4, "head_dim": 16, "num_hidden_layers": 4},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    "arcee": {},
    "helium": {"head_dim": 16},
    "exaone_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": 24,
    },
    "afmoe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
        "sliding_window": 24,
        "head_dim": 16,
    },
    "sarvam_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
    },
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "axk1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8,
        "sliding_window": 24,
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
FAST = ("gpt_neox", "opt", "exaone_moe")
EVERY = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


pytestmark = pytest.mark.usefixtures("compiled")


def checkpoint(name: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """A saved model whose norms are not the identity and whose biases are not zero."""
    config = AutoConfig.for_model(name, **SIZES | FAMILIES.get(name, {}) | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.ndim == 1 else 0.12)
    model.save_pretrained(directory)
    return model


def converted(directory: Path, **options: Any) -> TransformersModel:
    hf = json.loads((directory / "config.json").read_text())
    defaults: dict[str, Any] = {"dtype": "float32", "head_dtype": "auto", "load_format": "auto", "seed": 0}
    return load_module(directory, hf, **{"max_model_len": 512} | defaults | options)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", EVERY)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    reference, ids = checkpoint(name, tmp_path), random_ids(100, 320)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    model = converted(tmp_path)
    actual = prefill(model, ids).log_softmax(-1)
    assert expected.std() > 0.3 and (actual - expected).abs().max() < 2e-4
    prompt = random_ids(11, 320, seed=3)
    with torch.no_grad():
        expected_tokens = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=64, do_sample=False
        )[0, len(prompt) :].tolist()
    driver, pending, greedy = Driver(model), prompt, []
    while len(greedy) < len(expected_tokens):
        pending = [int(driver.step({0: pending})[0][-1].argmax())]
        greedy += pending
    assert greedy == expected_tokens


@pytest.mark.parametrize("name", EVERY)
def test_chunks_and_other_rows_do_not_matter(name: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path)
    model, ids = converted(tmp_path), random_ids(60, 320)
    expected = prefill(model, ids)
    driver = Driver(model, rows=2, length=60)
    driver.step({1: ids[:7]})
    parts = [driver.step({0: ids[:17]})[0], driver.step({1: ids[7:9], 0: ids[17:50]})[1]]
    parts += [driver.step({0: [token], 1: [3]}, ends=[0])[0] for token in ids[50:]]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {}, "BloomForCausalLM.* it takes no position_ids"),
    ("falcon", {"alibi": False}, "FalconForCausalLM.* does not use transformers' attention interface"),
    ("falcon", {"alibi": True}, "FalconForCausalLM: alibi is not supported"),
    ("diffllama", {}, "DiffLlamaForCausalLM: a layer that attends twice"),
    ("doge", {"sliding_window": None}, "DogeForCausalLM: attention with a mask of its own"),
    ("bert", {}, "BertLMHeadModel: attention that is not causal"),
    ("roberta", {"is_decoder": True, "pad_token_id": 1}, "RobertaForCausalLM .* does not count positions from 0"),
    ("xglm", {"d_model": 64, "attention_heads": 4}, "XGLMForCausalLM .* 0 of 3 layers"),
    ("llama4_text", {"attention_chunk_size": 256}, "attention_chunk_size 256 .* give --max-model-len 256"),
    ("llama4_text", {"floor_scale": 512}, "floor_scale 512 .* give --max-model-len 511"),
    (
        "stablelm",
        {"max_position_embeddings": 256, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "max_position_embeddings 256 .* give --max-model-len 256",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [*REFUSED[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in REFUSED[2:])],
)
def test_what_cannot_be_served_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint(name, tmp_path, **changes)
    with pytest.raises(StartError, match=message):
        converted(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "no causal language model"),
        (
            {"architectures": ["StarForCausalLM"], "model_type": "star", "auto_map": {"AutoConfig": "star.Config"}},
            "StarForCausalLM is not supported: auto_map .* its model_type 'star' is neither built in nor known to",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, found 1000000000"),
        ({"hidden_act": "swish9"}, "StableLmForCausalLM .* does not know 'swish9', which config.json names"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoints are not supported"),
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "code of the checkpoint's own, which is never run"),
    ],
)
def test_configs_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint("stablelm", tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text()) | changes
    with pytest.raises(StartError, match=message):
        load_module(tmp_path, hf, dtype="float32", head_dtype="auto", load_format="auto", seed=0)


def test_an_update_has_the_checkpoints_names(tmp_path: Path) -> None:
    for name in ("gpt_neox", "opt"):
        reference, ids = checkpoint(name, tmp_path / name), random_ids(30, 320)
        model = converted(tmp_path / name)
        before = prefill(model, ids)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(0.9)
            expected = reference(torch.tensor([ids])).logits[0]
        reference.save_pretrained(tmp_path / "next")
        staging = Staging(model.blank())
        for key, entry in converted(tmp_path / "next").provenance._files[0][0].items():
            staging.push(key, load_file(entry.file)[key])
        fresh = staging.finish()
        torch.testing.assert_close(prefill(fresh, ids), expected, atol=2e-4, rtol=0)
        assert torch.equal(prefill(model, ids), before)
        sums, _ = fresh.provenance.checksums(fresh.spec.renames, tied=fresh.spec.tied)
        assert set(sums) == set(model.provenance.checksums(model.spec.renames, tied=False)[0])


def test_an_adapter_adds_to_its_projections(tmp_path: Path) -> None:
    checkpoint("gpt_neox", tmp_path)
    model, ids = converted(tmp_path), random_ids(20, 320)
    target = "gpt_neox.layers.1.attention.query_key_value"
    assert model.adapter_targets()[target] == (target, "query_key_value")
    linear = model.named_linears()[target]
    linear.lora = LoraSlots(linear.inputs, linear.shards, 1, 4, linear.dtype)
    factors = torch.randn(4, linear.inputs), torch.randn(linear.outputs, 4) * 0.1
    linear.lora.place(0, "query_key_value", LowRank(*factors, 1.0))
    driver = Driver(model, length=20)
    plain = driver.step({0: ids})[0]
    adapted = torch.zeros(20, 3 * 64)
    linear.lora.add(adapted, torch.ones(20, 64), torch.zeros(20, dtype=torch.int32))
    torch.testing.assert_close(adapted[0], factors[1] @ (factors[0] @ torch.ones(64)), atol=1e-4, rtol=1e-4)
    assert torch.equal(plain, prefill(model, ids))


def test_a_policy_of_such_a_family_is_refused(tmp_path: Path) -> None:
    checkpoint("helium", tmp_path)
    with pytest.raises(StartError, match="HeliumForCausalLM is not supported"):
        PolicyModel.from_pretrained(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "impl"), [("helium", "auto"), ("gpt_neox", "transformers"), ("qwen2", "transformers")]
)
def test_served_with_cache_and_batch(name: str, impl: str, tmp_path: Path) -> None:
    reference = checkpoint(name, tmp_path)
    prompts = [random_ids(40, 320, 1), [*random_ids(40, 320, 1), 5, 6], random_ids(9, 320, 2)]
    with LLM(str(tmp_path), model_impl=impl, tokens_only=True, max_num_batched_tokens=32) as llm:
        facts = llm._llm.ready.facts
        assert facts["exact"] is False and facts["model_impl"] == "transformers"
        for _ in range(2):  # the second time from the cache
            for prompt, result in zip(
                prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), False), strict=True
            ):
                with torch.no_grad():
                    expected = reference.generate(
                        torch.tensor([prompt]),
                        attention_mask=torch.ones(1, len(prompt)),
                        max_new_tokens=12,
                        do_sample=False,
                    )[0, len(prompt) :].tolist()
                assert list(result.outputs[0].token_ids) == expected


def test_quantization_options_count(tmp_path: Path) -> None:
    """The group size and the head's own quantization, as for a family with a spec function."""
    checkpoint("qwen2", tmp_path)
    ids = random_ids(12, 320, 1)

    def logits(**options: Any) -> torch.Tensor:
        hf = json.loads((tmp_path / "config.json").read_text())
        model = load_module(tmp_path, hf, dtype="float32", head_dtype="auto", load_format="auto", seed=0, **options)
        return prefill(model, ids)

    plain, head = logits(), logits(quantize_lm_head=True)
    groups = [logits(quantization="int4", group_size=size) for size in (32, 64)]
    for one, other in ((plain, head), (plain, groups[0]), (groups[0], groups[1])):
        assert not torch.equal(one, other)
