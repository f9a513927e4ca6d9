"""The policy of every served family: the decoder's logprobs to the bit, and gradients near to float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.driver import random_ids
from tests.models.random_configs import every, random_config
from tests.models.test_saved_configs import written
from tests.tiny_families import FAMILIES
from tests.tiny_models import tiny_config, write_checkpoint
from tests.train import conftest
from tests.train.references import cosine
from tests.train.test_policy import expected, weights
from tokserve.base.errors import StartError
from tokserve.models.weights import SINGLE, model_name
from tokserve.train import PolicyModel, exact, selective_logprobs

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2-untied": ("gemma2", {"tie_word_embeddings": False}),
    "gemma4": ("gemma4_text", {}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"attention_bias": True}),
    "granite": ("granite", {}),
    "granitemoehybrid": ("granitemoehybrid", {"position_embedding_type": None}),
    "smollm3": ("smollm3", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "ministral": ("ministral", {}),
    "ministral3": ("ministral3", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"attention_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-relu2": ("starcoder2", {"hidden_act": "relu2"}),
    "cwm": ("cwm", {}),
    "arcee": ("arcee", {}),
    "exaone4": ("exaone4", {}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {"attention_bias": True}),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {"tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "solar_open": ("solar_open", {}),
    "seed_oss-gelu": ("seed_oss", {"hidden_act": "gelu"}),
    "ernie4_5": ("ernie4_5", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "glm4_moe": ("glm4_moe", {}),
    "olmoe": ("olmoe", {}),
    "flex_olmo": ("flex_olmo", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoeshared": ("granitemoeshared", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "dots1": ("dots1", {}),
    "minimax_m2": ("minimax_m2", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "bamba": ("bamba", {}),
    "granitemoehybrid-states": ("granitemoehybrid", {}),
}
FAST = ("gemma2", "phi3", "olmo2", "cohere", "starcoder2", "qwen2_moe", "gpt_neox", "gpt2")
EVERY = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def checkpoint(name: str, directory: Path) -> Path:
    family, changes = CASES[name]
    return write_checkpoint(directory, tiny_config(family, **changes))


def rows() -> list[list[int]]:
    prompt = random_ids(21, 320, 1)
    return [prompt + random_ids(12, 320, 3), prompt + random_ids(7, 320, 4), random_ids(30, 320, 8)]


TRAINED = {family for family, _ in [*CASES.values(), *conftest.FAMILIES.values()]}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - TRAINED))
def test_families_without_a_case_are_refused_by_name(family: str, tmp_path: Path) -> None:
    """A family that can be trained needs a case; others say who they are and why, before weights are read."""
    config = tiny_config(family)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match=f"^{config['architectures'][0]}: .*cannot be trained"):
        PolicyModel.from_pretrained(tmp_path, dtype="float32")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match=f"{config['architectures'][0]}.*(cannot be trained|not supported)"):
        exact(model)


def test_a_family_that_runs_as_transformers_module_is_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["HeliumForCausalLM"], "model_type": "helium", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match="architecture HeliumForCausalLM is not supported"):
        PolicyModel.from_pretrained(tmp_path, dtype="float32")


@pytest.mark.some(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EVERY)
def test_logprobs_equal_the_decoders(name: str, dtype: str, tmp_path: Path) -> None:
    directory = checkpoint(name, tmp_path)
    policy = PolicyModel.from_pretrained(directory, dtype=dtype)
    for activation_bytes in (1 << 30, 0):
        policy.activation_bytes = activation_bytes
        for row, logprobs in zip(rows(), policy.logprobs(rows(), [5] * 3), strict=True):
            assert torch.equal(logprobs, expected(directory, dtype, row, 5))
    with torch.no_grad():
        assert torch.equal(policy.logprobs(rows()[:1], [5])[0], expected(directory, dtype, rows()[0], 5))


@pytest.mark.parametrize("name", EVERY)
def test_exact_models(name: str, tmp_path: Path) -> None:
    """A transformers model with the server's arithmetic: logprobs to the bit, and the policy's gradients."""
    directory = checkpoint(name, tmp_path)
    policy = PolicyModel.from_pretrained(directory, dtype="float32")
    config = AutoConfig.from_pretrained(directory)
    for dropout in DROPOUTS:
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    reference = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    if name.startswith(("gemma2", "granite", "cohere")):
        with pytest.raises(ValueError, match="scales or caps logits"):
            exact(reference)
        return
    model, row = exact(reference), rows()[0]
    (scored,) = policy.logprobs([row], [1])
    logits = model(torch.tensor([row])).logits
    actual = selective_logprobs(logits[0, :-1], torch.tensor(row[1:]))
    assert torch.equal(actual, scored)
    for values in (actual, scored):
        (values * weights(values)).sum().backward()
    masters = dict(policy.named_parameters())
    gradients = by_master(policy, {n: p.grad for n, p in model.named_parameters()})
    both = [(masters[name].grad, gradient) for name, gradient in gradients.items() if gradient is not None]
    assert len(both) == sum(master.requires_grad for master in masters.values())
    assert cosine(*(torch.cat([pair[i].flatten() for pair in both]) for i in range(2))) > 1 - 1e-6


def test_an_exact_mixture_whose_layers_are_all_dense(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("qwen3_moe", mlp_only_layers=[0, 1, 2]))
    model, row = exact(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)), rows()[0]
    actual = selective_logprobs(model(torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:]))
    assert torch.equal(actual, PolicyModel.from_pretrained(directory, dtype="float32").logprobs([row], [1])[0])


def test_experts_in_one_tensor_are_read_as_those_in_one_each(tmp_path: Path) -> None:
    single = write_checkpoint(tmp_path / "single", tiny_config("qwen3_moe"))
    policy, tensors = PolicyModel.from_pretrained(single, dtype="float32"), load_file(single / SINGLE)
    for name, one in policy._modules_of_decoder.decoder.stacked_parameters().items():
        parts = [tensors.pop(part) for part in one.covers]
        tensors[name] = torch.stack(parts).view(one.parameter.shape)
    (tmp_path / "stacked").mkdir()
    (tmp_path / "stacked" / "config.json").write_bytes((single / "config.json").read_bytes())
    save_file(tensors, tmp_path / "stacked" / SINGLE)
    stacked = PolicyModel.from_pretrained(tmp_path / "stacked", dtype="float32")
    masters = dict(stacked.named_parameters())
    assert masters.keys() == dict(policy.named_parameters()).keys()
    assert all(torch.equal(masters[name], master) for name, master in policy.named_parameters())
    assert torch.equal(stacked.logprobs([[5, 6, 7]], [1])[0], policy.logprobs([[5, 6, 7]], [1])[0])
    stacked.save_pretrained(tmp_path / "saved")


def by_master(policy: PolicyModel, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Gradients of transformers' parameters by the policy's names: transformers has one tensor for all experts."""
    decoder = policy._modules_of_decoder.decoder
    named = {model_name(name, decoder.spec.renames) or name: gradient for name, gradient in gradients.items()}
    for name, stacked in decoder.stacked_parameters().items():
        stacked_grad = named.pop(name)
        assert stacked_grad is not None
        named |= stacked.parts(stacked_grad)
    return named


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_near_to_transformers_in_float64(name: str, tmp_path: Path) -> None:
    directory = checkpoint(name, tmp_path)
    policy = PolicyModel.from_pretrained(directory, dtype="float32")
    scored = policy.logprobs(rows(), [5] * 3)
    torch.stack([(row * weights(row)).sum() for row in scored]).sum().backward()
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    for row in rows():
        logits = model(torch.tensor([row])).logits[0, 4:-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row[5:])[:, None])[:, 0]
        (logprobs * weights(logprobs)).sum().backward()
    reference = by_master(policy, {name: parameter.grad for name, parameter in model.named_parameters()})
    for master, parameter in policy.named_parameters():
        if not parameter.requires_grad:  # a bias of a router's choice, which mostly is a buffer in transformers
            assert reference.pop(master, None) is None
            continue
        gradient = reference.pop(master)
        assert parameter.grad is not None and gradient is not None
        if not gradient.any():  # of an expert that no token has
            assert not parameter.grad.any(), master
        elif not master.endswith("k_proj.bias"):  # zero but for rounding: it shifts all scores of a query alike
            assert cosine(parameter.grad, gradient) > 0.9995, master
    assert not reference


def test_a_saved_policy_is_read_by_transformers(tmp_path: Path) -> None:
    for name in ("phi3", "glm4", "granitemoehybrid"):
        policy = PolicyModel.from_pretrained(checkpoint(name, tmp_path / name), dtype="float32")
        policy.save_pretrained(tmp_path / f"saved-{name}")
        _, report = AutoModelForCausalLM.from_pretrained(tmp_path / f"saved-{name}", output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


RANDOM = [
    one if one in (("llama", 0), ("gemma3_text", 0), ("dots1", 0)) else pytest.param(*one, marks=pytest.mark.slow)
    for one in every(4)
    if one[0] in TRAINED
]
DROPOUTS = ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout")


@pytest.mark.some(2)
@pytest.mark.parametrize(("family", "seed"), RANDOM)
def test_random_configurations(family: str, seed: int, tmp_path: Path) -> None:
    """The policy has the decoder's bits and transformers' gradients, and an exact model of padded rows has both."""
    hf = random_config(family, seed) | dict.fromkeys(DROPOUTS, 0.0)
    written(tmp_path, hf, seed)
    vocab, start = hf["vocab_size"], 5
    shared = random_ids(21, vocab, 1)
    batch = [shared + random_ids(12, vocab, 3), shared + random_ids(7, vocab, 4), random_ids(33, vocab, 8)]
    policy = PolicyModel.from_pretrained(tmp_path, dtype="float32", activation_bytes=0 if seed % 2 else None)
    scored = policy.logprobs(batch, [start] * 3)
    for row, logprobs in zip(batch, scored, strict=True):
        assert torch.equal(logprobs, expected(tmp_path, "float32", row, start))
    torch.stack([(row * weights(row)).sum() for row in scored]).sum().backward()
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    for row in batch:
        logits = model(torch.tensor([row]), use_cache=False).logits[0, start - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row[start:])[:, None])[:, 0]
        (logprobs * weights(logprobs)).sum().backward()
    reference = by_master(policy, {name: parameter.grad for name, parameter in model.named_parameters()})
    check_gradients(policy, reference)
    if policy._modules_of_decoder.decoder.head.multiplier != 1.0 or policy._modules_of_decoder.decoder.head.softcap:
        return
    exact_model = exact(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    longest = max(map(len, batch))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in batch])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
    logits, sums = exact_model(ids, attention_mask=mask).logits, []
    for number, (row, logprobs) in enumerate(zip(batch, scored, strict=True)):
        actual = selective_logprobs(logits[number, start - len(row) - 1 : -1], torch.tensor(row[start:]))
        assert torch.equal(actual, logprobs)
        sums.append((actual * weights(actual)).sum())
    torch.stack(sums).sum().backward()
    check_gradients(
        policy, by_master(policy, {name: parameter.grad for name, parameter in exact_model.named_parameters()})
    )


def check_gradients(policy: PolicyModel, reference: dict[str, Tensor | None]) -> None:
    """All of them, relative to the largest where they are small: what shifts all scores alike has none but rounding."""
    trained = {name: master for name, master in policy.named_parameters() if master.requires_grad}
    largest = max(float(master.grad.norm()) for master in trained.values() if master.grad is not None)
    for name, master in trained.items():
        expected = reference.get(name)
        if master.grad is None or expected is None:  # of an expert or a layer that nothing reaches
            assert not any(one is not None and one.any() for one in (master.grad, expected)), name
            continue
        assert (master.grad - expected).norm() <= 1e-3 * float(expected.norm()) + 1e-5 * largest, name
