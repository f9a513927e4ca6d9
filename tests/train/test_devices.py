"""Which devices a policy can be asked for, and what each refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import StartError
from tokserve.ops import devices
from tokserve.train import PolicyModel, exact


def test_a_device_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match="device 'xpu' must be one of cpu, cuda"):
        PolicyModel.from_pretrained("nowhere", device="xpu")
    with pytest.raises(StartError, match="device 'gpu' must be one of"):
        PolicyModel.from_pretrained("nowhere", device="gpu")
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    with pytest.raises(StartError, match="device 'cuda': torch sees no GPU here"):
        PolicyModel.from_pretrained("nowhere", device="cuda")
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "current_gpu", lambda: 0)
    assert devices.kind_of("cuda") == devices.kind_of("cuda:0") == "cuda"
    with pytest.raises(StartError, match=r"device 'cuda:1' is not this process's .* torch.cuda.set_device\(1\)"):
        devices.kind_of("cuda:1")


def test_weights_that_were_moved_are_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("qwen3"))
    policy = PolicyModel.from_pretrained(directory).to("meta")
    with pytest.raises(ValueError, match="the policy's weights are on meta, but it was loaded for cpu"):
        policy.logprobs([[1, 2, 3]], [1])
    model = exact(AutoModelForCausalLM.from_pretrained(directory))
    model.to("meta")
    with pytest.raises(TypeError, match="is on meta: this exact model computes on cpu"):
        model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(TypeError, match="is on meta"):
        exact(model)
