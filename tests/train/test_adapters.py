"""LoRA adapters of a policy: the decoder's bits with the adapter in a slot, gradients, and PEFT directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.adapters import write_adapter
from tests.tiny_models import tiny_config, write_checkpoint
from tests.train import references
from tests.train.references import cosine
from tests.train.test_policy import gradients, half, rollouts, weights
from tokserve.base.errors import RequestError
from tokserve.train import PolicyModel

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def adapted(directory: Path, dtype: str) -> PolicyModel:
    write_checkpoint(directory / "base", tiny_config("qwen3"))
    write_adapter(directory / "adapter", directory / "base", rank=5, targets=TARGETS, gain=0.2)
    policy = PolicyModel.from_pretrained(directory / "base", dtype=dtype)
    policy.load_adapter(directory / "adapter")
    return policy


def merged(directory: Path, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The masters with the adapter added, in float64."""
    config = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    out = {}
    for name, leaf in leaves.items():
        if ".lora_" not in name:
            module = name.removesuffix(".weight")
            down, up = (leaves.get(f"{module}.lora_{part}.weight") for part in "AB")
            out[name] = leaf if down is None or up is None else leaf + scale * up @ down
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_near_to_float64(dtype: str, tmp_path: Path) -> None:
    policy = adapted(tmp_path, dtype)
    rows = rollouts()
    starts = half(rows)
    leaves = {
        name: master.detach().to(torch.bfloat16 if dtype == "bfloat16" else master.dtype).double().requires_grad_()
        for name, master in policy.named_parameters()
    }
    model = merged(tmp_path, leaves)
    for row, start, policy_logprobs in zip(rows, starts, policy.logprobs(rows, starts), strict=True):
        logprobs = references.logprobs(tiny_config("qwen3"), model, row, start)
        if dtype == "float32":
            assert (policy_logprobs.detach() - logprobs.detach()).abs().max() < 1e-4
        (logprobs * weights(logprobs)).sum().backward(retain_graph=True)
    for activation_bytes in (1 << 30, 0):
        policy.activation_bytes = activation_bytes
        actual = gradients(policy, rows, starts)
        assert set(actual) == {name for name in leaves if ".lora_" in name}
        exact = torch.cat([leaves[name].grad.flatten() for name in actual])  # type: ignore[union-attr]
        both = cosine(torch.cat([gradient.double().flatten() for gradient in actual.values()]), exact)
        assert both > (0.9999 if dtype == "float32" else 0.997)


def test_sharing_prefixes_changes_no_bit(tmp_path: Path) -> None:
    policy = adapted(tmp_path, "bfloat16")
    rows = rollouts()
    starts = half(rows)
    expected = policy.logprobs(rows, starts)
    for row, start, logprobs in zip(rows, starts, expected, strict=True):
        assert torch.equal(policy.logprobs([row], [start], share_prefixes=False)[0], logprobs)


def test_a_new_adapter_adds_nothing_until_it_is_trained(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("llama"))
    policy = PolicyModel.from_pretrained(tmp_path, dtype="bfloat16")
    rows, starts = rollouts(), half(rollouts())
    before = policy.logprobs(rows, starts)
    policy.add_adapter(TARGETS, rank=4, alpha=8.0)
    assert all(torch.equal(a, b) for a, b in zip(policy.logprobs(rows, starts), before, strict=True))
    optimizer = torch.optim.AdamW([one for one in policy.parameters() if one.requires_grad], lr=0.01)
    for _ in range(2):
        gradients(policy, rows, starts)
        optimizer.step()
    after = policy.logprobs(rows, starts)
    assert not torch.equal(after[0], before[0])
    with policy.adapter_disabled():
        assert all(torch.equal(a, b) for a, b in zip(policy.logprobs(rows, starts), before, strict=True))
    policy.save_adapter(tmp_path / "adapter")
    policy.save_pretrained(tmp_path / "base")
    again = PolicyModel.from_pretrained(tmp_path / "base", dtype="bfloat16")
    again.load_adapter(tmp_path / "adapter")
    assert all(torch.equal(a, b) for a, b in zip(again.logprobs(rows, starts), after, strict=True))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    policy = adapted(tmp_path, "float32")
    with pytest.raises(ValueError, match="has an adapter already"):
        policy.add_adapter(TARGETS)
    plain = PolicyModel.from_pretrained("demo", dtype="float32")
    with pytest.raises(ValueError, match="has no adapter"):
        plain.save_adapter(tmp_path / "none")
    with pytest.raises(ValueError, match=r"unknown: \['nobody'\]"):
        plain.add_adapter(["nobody", "q_proj"])
    other = write_checkpoint(tmp_path / "other", tiny_config("llama", hidden_size=32))
    with pytest.raises(RequestError, match="do not fit the model"):
        PolicyModel.from_pretrained(other, dtype="float32").load_adapter(tmp_path / "adapter")
