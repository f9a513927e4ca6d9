"""Which function makes the spec of which architecture.

A family is a line here; its module is imported when a checkpoint names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tokserve.errors import StartError
from tokserve.models.spec import ConfigReader, DecoderSpec

ARCHITECTURES = {
    "LlamaForCausalLM": "tokserve.models.llama:llama",
    "MistralForCausalLM": "tokserve.models.llama:mistral",
    "Qwen2ForCausalLM": "tokserve.models.llama:qwen2",
    "Qwen3ForCausalLM": "tokserve.models.llama:qwen3",
}


def decoder_spec(hf: Mapping[str, Any]) -> DecoderSpec:
    """The spec for this config.json; StartError if no architecture it names is known."""
    names = ConfigReader(hf).texts("architectures")
    for name in names:
        if name in ARCHITECTURES:
            module, function = ARCHITECTURES[name].split(":")
            spec: DecoderSpec = getattr(import_module(module), function)(hf)
            return spec
    asked = f"architecture {', '.join(names)} is not supported" if names else "config.json names no architecture"
    raise StartError(f"{asked}; supported are: {', '.join(ARCHITECTURES)}")
