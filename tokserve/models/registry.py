"""The table of architectures: which function reads the config.json of which.

A family's module is imported when a checkpoint names the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tokserve.errors import StartError
from tokserve.models.config_reader import ConfigReader
from tokserve.models.spec import DecoderSpec

ARCHITECTURES = {
    "Gemma3ForCausalLM": "tokserve.models.gemma:gemma3",
    "Glm4MoeForCausalLM": "tokserve.models.moe:glm4_moe",
    "GptOssForCausalLM": "tokserve.models.gpt_oss:gpt_oss",
    "LlamaForCausalLM": "tokserve.models.llama:llama",
    "MistralForCausalLM": "tokserve.models.llama:mistral",
    "MixtralForCausalLM": "tokserve.models.moe:mixtral",
    "Qwen2ForCausalLM": "tokserve.models.llama:qwen2",
    "Qwen2MoeForCausalLM": "tokserve.models.moe:qwen2_moe",
    "Qwen3ForCausalLM": "tokserve.models.llama:qwen3",
    "Qwen3MoeForCausalLM": "tokserve.models.moe:qwen3_moe",
}


def decoder_spec(hf: Mapping[str, Any]) -> DecoderSpec:
    """The spec for this config.json; StartError if no architecture it names is known."""
    names = ConfigReader(hf).texts("architectures")
    for name in names:
        if name in ARCHITECTURES:
            module, function = ARCHITECTURES[name].split(":")
            spec: DecoderSpec = getattr(import_module(module), function)(hf)
            return spec
    problem = f"architecture {', '.join(names)} is not supported" if names else "config.json names no architecture"
    raise StartError(f"{problem}; supported are: {', '.join(ARCHITECTURES)}")
