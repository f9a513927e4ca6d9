"""A LoRA adapter of a policy: its factors' names and first values, and its PEFT directory.

A factor is a float32 parameter beside the weight that it adds to, `....q_proj.lora_A.weight`; PEFT writes the same
names after `base_model.model.`.  The forward pass adds what a server adds that has loaded the directory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokserve.features.lora import adapter_files
from tokserve.features.lora.adapter_files import CONFIG, TENSORS, Sizes

PREFIX = "base_model.model."
MAX_RANK = 1024


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """`config`: of adapter_config.json; `scales`: by module, what the product of its factors is multiplied by."""

    config: dict[str, Any]
    scales: dict[str, float]
    factors: dict[str, Tensor] = field(repr=False)  # by parameter name, float32

    @property
    def rank(self) -> int:
        """The largest of any module."""
        return max(len(self.factors[lora_a_name(module)]) for module in self.scales)


def lora_a_name(module: str) -> str:
    """The name of a module's factor [r, inputs]."""
    return f"{module}.lora_A.weight"


def lora_b_name(module: str) -> str:
    """The name of a module's factor [outputs, r]."""
    return f"{module}.lora_B.weight"


def drawn(
    sizes: Sizes, targets: Sequence[str], rank: int, alpha: float, *, use_rslora: bool, seed: int
) -> TrainedAdapter:
    """A new adapter for the modules whose names end in one of `targets`, which adds nothing yet.  Raises ValueError.
    As PEFT does it, A is uniform in +-1 / sqrt(inputs) and B is zero."""
    if rank < 1 or rank > MAX_RANK:
        raise ValueError(f"rank must be between 1 and {MAX_RANK}, got {rank}")
    unknown = [target for target in targets if not any(_is(module, target) for module in sizes)]
    if unknown or not targets:
        raise ValueError(f"targets must name projections of the model, got {list(targets)}; unknown: {unknown}")
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Tensor] = {}
    for module, (inputs, outputs) in sizes.items():
        if any(_is(module, target) for target in targets):
            bound = 1.0 / math.sqrt(inputs)
            factors[lora_a_name(module)] = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
            factors[lora_b_name(module)] = torch.zeros(outputs, rank)
    scale = alpha / (math.sqrt(rank) if use_rslora else rank)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "use_rslora": use_rslora,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    return TrainedAdapter(config, {module: scale for module in sizes if lora_a_name(module) in factors}, factors)


def read_adapter(directory: Path, sizes: Sizes, renames: tuple[tuple[str, str], ...]) -> TrainedAdapter:
    """An adapter that PEFT or `write` wrote.  Raises RequestError."""
    weights = adapter_files.read_adapter(directory, sizes, renames, MAX_RANK)
    factors: dict[str, Tensor] = {}
    for module, pair in weights.items():
        factors[lora_a_name(module)], factors[lora_b_name(module)] = pair.down.float().clone(), pair.up.float().clone()
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    return TrainedAdapter(config, {module: pair.scale for module, pair in weights.items()}, factors)


def tensors_of(adapter: TrainedAdapter, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the adapter by PEFT's names."""
    return {PREFIX + name: parameters[name].detach().contiguous() for name in adapter.factors}


def write_adapter(directory: Path, adapter: TrainedAdapter, parameters: Mapping[str, Tensor]) -> None:
    """The adapter with these parameters' values as a PEFT directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(adapter.config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors_of(adapter, parameters), directory / TENSORS, metadata={"format": "pt"})


def _is(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
