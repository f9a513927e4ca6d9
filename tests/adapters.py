"""PEFT adapter directories made by hand, and checkpoints that have an adapter merged into their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint of one file."""
    return load_file(checkpoint / "model.safetensors")


def write_adapter(
    directory: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    targets: Sequence[str] = LINEARS,
    dtype: torch.dtype = torch.float32,
    gain: float = 0.5,
    tensors: dict[str, Tensor | None] | None = None,
    **config: Any,
) -> Path:
    """A PEFT directory for the checkpoint `base`; `tensors` replace some (None: are left out), `config` entries of
    adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    ranks = config.get("rank_pattern") or {}
    for name, weight in weights(base).items():
        module = name.removesuffix(".weight")
        target = module.rpartition(".")[2]
        if target in targets:
            r = ranks.get(target, rank)
            outputs, inputs = weight.shape
            down = torch.randn(r, inputs, generator=generator) / inputs**0.5
            up = torch.randn(outputs, r, generator=generator) * gain / r**0.5
            stored[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype)
            stored[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype)
    for name, tensor in (tensors or {}).items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    directory.mkdir(parents=True, exist_ok=True)
    save_file(stored, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": list(targets),
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": str(base),
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
    } | config
    (directory / "adapter_config.json").write_text(json.dumps(written))
    return directory


def merge(directory: Path, base: Path, adapter: Path) -> Path:
    """The checkpoint `base` with W + scale * B A in place of each W."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    result, parts = weights(base), load_file(adapter / "adapter_model.safetensors")
    for name, down in parts.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = parts[name.replace("lora_A", "lora_B")]
            alpha = config["alpha_pattern"].get(module.rpartition(".")[2], config["lora_alpha"])
            scale = alpha / (len(down) ** 0.5 if config["use_rslora"] else len(down))
            weight = result[f"{module}.weight"]
            merged = weight.double() + scale * up.double() @ down.double()
            result[f"{module}.weight"] = merged.to(weight.dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(result, directory / "model.safetensors", metadata={"format": "pt"})
    for file in base.glob("*.json"):
        (directory / file.name).write_text(file.read_text())
    return directory
