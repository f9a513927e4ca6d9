"""Checkpoints and config.json as transformers saves them, older and odd forms of them, and random ones, against its
forward."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models.driver import Driver, prefill, random_ids
from tests.models.random_configs import every, random_config
from tokserve import checkpoint
from tokserve.families.hf.config import with_architecture
from tokserve.models.load import load_decoder

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 33,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
Edit = Callable[[dict[str, Any]], object]


def _older(config: dict[str, Any]) -> None:
    """The spelling of transformers 4."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")


def _minimal(config: dict[str, Any]) -> None:
    kept = {"model_type", "architectures", *SIZES} - {"num_key_value_heads", "max_position_embeddings", "pad_token_id"}
    for name in config.keys() - kept:
        del config[name]


CASES: dict[str, tuple[str, dict[str, Any], Edit]] = {
    "exaone": ("exaone", {"head_dim": 20, "mlp_bias": True}, dict),
    "exaone-hub": ("exaone", {}, lambda config: config.update(architectures=["ExaoneForCausalLM"])),
    "internlm3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}, dict),
    "cohere2-head-dim": ("cohere2", {"head_dim": 20}, dict),
    "gemma-gelu": ("gemma", {"head_dim": 16}, lambda config: config.update(hidden_act="gelu", hidden_activation=None)),
    "gemma3-capped-scores": ("gemma3_text", {"head_dim": 16, "attn_logit_softcapping": 2.0}, dict),
    "lfm2-moe-small-scores": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention"],
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "num_dense_layers": 0,
            "moe_intermediate_size": 24,
            "use_expert_bias": False,
            "block_auto_adjust_ff_dim": False,
        },
        dict,
    ),
    "lfm2-moe-activation": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention"],
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 24,
            "hidden_act": "gelu_pytorch_tanh",
        },
        dict,
    ),
    "no-architectures": ("llama", {}, lambda config: config.pop("architectures")),
    "no-model-type": ("qwen2", {}, lambda config: config.pop("model_type")),
    "older": ("mistral", {"head_dim": 16}, _older),
    "minimal": ("llama", {"num_key_value_heads": 4}, _minimal),
    "another-architecture-first": (
        "llama",
        {},
        lambda config: config.update(architectures=["StarForCausalLM", "LlamaForCausalLM"]),
    ),
    "infinity": ("llama", {}, lambda config: config.update(limits=[0.0, {"__float__": "Infinity"}])),
}


pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes, edit = CASES[name]
    config = AutoConfig.for_model(model_type, **SIZES | changes)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in reference.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.12
    reference.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    edit(hf)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    decoder = load_decoder(
        tmp_path,
        with_architecture(checkpoint.hf_config(tmp_path)),
        dtype="float32",
        head_dtype="auto",
        load_format="auto",
        seed=0,
    )
    ids = random_ids(60, SIZES["vocab_size"])
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert (prefill(decoder, ids).log_softmax(-1) - expected).abs().max() < 1e-4


def written(directory: Path, hf: dict[str, Any], seed: int) -> PreTrainedModel:
    """transformers' model of this config.json with random weights, saved beside that."""
    (directory / "config.json").write_text(json.dumps(hf))
    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    corrections = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
    for name, tensor in [*model.named_parameters(), *corrections]:
        if tensor.ndim > 1:  # sharp enough for a difference to show
            tensor.data = torch.randn(tensor.shape) * (0.3 if "embed_tokens" in name else 1.2 / tensor.shape[-1] ** 0.5)
        else:
            tensor.data += torch.randn(tensor.shape) * 0.15
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(hf))  # as it was
    return model


RANDOM = [one if one[1] == 0 else pytest.param(*one, marks=pytest.mark.slow) for one in every(10)]


@pytest.mark.some(18)
@pytest.mark.parametrize(("family", "seed"), RANDOM)
def test_random_configurations(family: str, seed: int, tmp_path: Path) -> None:
    hf = random_config(family, seed)
    reference = written(tmp_path, hf, seed)
    decoder = load_decoder(
        tmp_path,
        checkpoint.hf_config(tmp_path),
        dtype="float32",
        head_dtype="auto",
        load_format="auto",
        seed=0,
        max_model_len=128,
    )
    ids, driver, cut = random_ids(70, hf["vocab_size"], seed), Driver(decoder, length=128), 1 + 7 * seed
    actual = torch.cat([driver.step({0: ids[:cut]})[0], driver.step({0: ids[cut:]})[0]]).log_softmax(-1)
    with torch.no_grad():
        single, expected = (
            model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
            for model in (reference, deepcopy(reference).double())
        )
    sharp = float((single - expected).abs().max())  # what rounding makes of random weights
    assert (actual - expected).abs().max() < 20 * sharp + 1e-4 * max(1.0, float(expected.std())), hf
