"""What a trainer has of an adapter, by PEFT's names: the tensors and the configuration that PEFT itself saves."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.needs import PEFT
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.rl.adapter_push import adapter_parts

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with two adapters, of which one is active."""
    peft = importlib.import_module("peft")
    transformers = importlib.import_module("transformers")
    path = write_checkpoint(tmp_path_factory.mktemp("base"), tiny_config("qwen3"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    options = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**options), adapter_name="first")
    model.add_adapter("lora_second", peft.LoraConfig(**options | {"r": 2, "rank_pattern": {"q_proj": 5}}))
    return model


@PEFT.skips()
@pytest.mark.parametrize("name", ["first", "lora_second"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_active_adapter_is_what_peft_saves(adapted: Any, name: str, compiled: bool, tmp_path: Path) -> None:
    adapted.set_adapter(name)
    adapted.save_pretrained(tmp_path, selected_adapters=[name])
    saved = load_file(tmp_path / name / "adapter_model.safetensors")
    settings = json.loads((tmp_path / name / "adapter_config.json").read_text())
    module = adapted
    if compiled:  # as torch.compile wraps a module
        module = nn.Module()
        module.add_module("_orig_mod", adapted)
        for attribute in ("peft_config", "active_adapter", "active_adapters"):
            setattr(module, attribute, getattr(adapted, attribute))
    config, tensors = adapter_parts(module)
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[key], saved[key]) for key in saved)
    for field in ("peft_type", "r", "lora_alpha", "rank_pattern", "bias", "use_rslora"):
        assert config[field] == settings[field], field
    assert json.loads(json.dumps(config)) == config and sorted(config["target_modules"]) == ["down_proj", "q_proj"]


def test_what_is_no_adapter_is_refused() -> None:
    for wrong in (nn.Linear(2, 2), {"a": torch.zeros(1)}, 3):
        with pytest.raises(TypeError, match="an adapter is"):
            adapter_parts(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no tensors"):
        adapter_parts(({"r": 1}, {}))
