"""tokserve: an LLM inference server; tokens in, tokens out, exactly.  Public names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokserve.rl.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "Config",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

if TYPE_CHECKING:
    from tokserve.client.async_llm import AsyncLLM
    from tokserve.client.beam_search import BeamSearchParams
    from tokserve.client.inputs import LoRARequest
    from tokserve.client.llm import LLM
    from tokserve.config import Config
    from tokserve.params import SamplingParams, StructuredOutputs

_HOMES = {
    "LLM": "tokserve.client.llm",
    "AsyncLLM": "tokserve.client.async_llm",
    "BeamSearchParams": "tokserve.client.beam_search",
    "LoRARequest": "tokserve.client.inputs",
    "SamplingParams": "tokserve.params",
    "StructuredOutputs": "tokserve.params",
    "Config": "tokserve.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
