"""peft's LoRA on an exact model: the bits of a server that loaded the adapter which peft saves."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.needs import PEFT
from tests.tiny_models import tiny_config, write_checkpoint
from tests.train.references import cosine
from tests.train.test_exact import assert_equal, padded, scored
from tests.train.test_policy import DTYPES, rollouts, weights
from tokserve.train import PolicyModel, exact, selective_logprobs

pytestmark = [
    PEFT.skips(),
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.*:FutureWarning", "ignore:.*(lora_bias|unmerged|tied layer).*:UserWarning"
    ),
]
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
ROWS = rollouts()
STARTS = [1] * len(ROWS)


def peft() -> Any:
    return importlib.import_module("peft")


def base(directory: Path) -> Any:
    path = directory if (directory / "config.json").exists() else write_checkpoint(directory, tiny_config("qwen3"))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def adapted(directory: Path, dtype: str, **config: Any) -> Any:
    """A model with an adapter that is not zero; bfloat16 models are made exact before peft wraps them, others after."""
    options = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": TARGETS,
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    model = base(directory)
    torch.manual_seed(0)
    if dtype == "bfloat16":
        return peft().get_peft_model(exact(model, dtype=dtype), peft().LoraConfig(**options | config))
    return exact(peft().get_peft_model(model, peft().LoraConfig(**options | config)), dtype=dtype)


def served(directory: Path, model: Any, dtype: str) -> PolicyModel:
    """The policy with what peft saves."""
    model.save_pretrained(directory / "adapter")
    policy = PolicyModel.from_pretrained(directory, dtype=dtype)
    policy.load_adapter(directory / "adapter")
    return policy


@pytest.mark.some(2)
@DTYPES
@pytest.mark.parametrize(
    "config", [{}, {"use_rslora": True, "rank_pattern": {"v_proj": 7}, "alpha_pattern": {"o_proj": 3}}]
)
def test_logprobs_are_those_of_the_adapter(dtype: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(tmp_path, dtype, **config)
    policy = served(tmp_path, model, dtype)
    expected = policy.logprobs(ROWS, STARTS)
    assert_equal(model, ROWS, expected)
    actual = model.logprobs(ROWS, STARTS)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    with policy.adapter_disabled(), model.disable_adapter():
        plain = policy.logprobs(ROWS, STARTS)
        assert not torch.equal(plain[0], expected[0])
        assert_equal(model, ROWS, plain)
    assert_equal(model, ROWS, expected)


def test_gradients_and_steps(tmp_path: Path) -> None:
    model = adapted(tmp_path, "float32").train()
    policy = served(tmp_path, model, "float32")
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names
    assert all("lora_" in name for name in names)
    ids, mask = padded(ROWS, "left")
    actual = scored(selective_logprobs(model(ids, attention_mask=mask).logits[:, :-1], ids[:, 1:]), mask)
    for values in (actual, policy.logprobs(ROWS, STARTS)):
        torch.stack([(row * weights(row)).sum() for row in values]).sum().backward()
    parameters = dict(model.named_parameters())
    for name, master in policy.named_parameters():
        peft_parameter = parameters.get(f"base_model.model.{name}".replace(".weight", ".default.weight"))
        if ".lora_" in name:
            assert cosine(peft_parameter.grad, master.grad) > 0.99999, name  # type: ignore[union-attr, arg-type]
    assert all(parameter.grad is None for name, parameter in parameters.items() if name not in names)
    torch.optim.AdamW([parameters[name] for name in names], lr=0.01).step()
    after = served(tmp_path, model, "float32").logprobs(ROWS, STARTS)
    assert not torch.equal(after[0], actual[0])
    assert_equal(model, ROWS, after)


def test_merged_and_swapped_adapters(tmp_path: Path) -> None:
    model = adapted(tmp_path, "float32")
    first = served(tmp_path, model, "float32").logprobs(ROWS, STARTS)
    model.add_adapter("other", peft().LoraConfig(r=9, lora_alpha=1, target_modules=["k_proj"], init_lora_weights=False))
    model.set_adapter("other")
    second = model.logprobs(ROWS, STARTS)
    assert not torch.equal(first[0], second[0])
    model.set_adapter("default")
    assert_equal(model, ROWS, first)
    model.merge_adapter()
    merged = model.logprobs(ROWS, STARTS)
    assert not torch.equal(merged[0], first[0])
    assert torch.allclose(merged[0], first[0], atol=1e-3)
    model.unmerge_adapter()
    plain = model.merge_and_unload()
    plain.save_pretrained(tmp_path / "merged")
    policy = PolicyModel.from_pretrained(tmp_path / "merged", dtype="float32")
    assert_equal(plain, ROWS, policy.logprobs(ROWS, STARTS))


def test_what_the_server_would_not_compute_is_refused(tmp_path: Path) -> None:
    ids = torch.tensor([ROWS[0]])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"use_dora": True}, "Dora"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias is not supported"),
        ({"target_modules": ["embed_tokens"]}, "model.embed_tokens: the server has no Embedding of peft"),
        ({"modules_to_save": ["norm"], "target_modules": ["q_proj"]}, "ModulesToSaveWrapper"),
    ]
    for number, (config, message) in enumerate(cases):
        model = adapted(tmp_path / str(number), "bfloat16", **config)
        with pytest.raises(ValueError, match=message):
            model(ids)
    model = adapted(tmp_path / "dropout", "bfloat16", lora_dropout=0.05)
    assert model.eval()(ids).logits.shape == (1, len(ROWS[0]), 320)
    with pytest.raises(ValueError, match=r"lora_dropout is 0.05"):
        model.train()(ids)
    model.eval().add_adapter("other", peft().LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="adapters default, other are active together"):
        model(ids)
    headed = adapted(tmp_path / "head", "bfloat16", target_modules=["q_proj", "lm_head"])
    with pytest.raises(TypeError, match="lm_head is a Linear now"):
        headed(ids)
