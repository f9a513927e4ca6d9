"""tokserve: an LLM inference server; tokens in, tokens out, exactly.  Public names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokserve.version import __version__

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Config",
    "EngineArgs",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from tokserve.client.async_llm import AsyncLLM
    from tokserve.client.engine_args import AsyncEngineArgs, EngineArgs
    from tokserve.client.results import CompletionOutput, RequestOutput
    from tokserve.client.sampling_params import RequestOutputKind, SamplingParams
    from tokserve.config import Config
    from tokserve.features.beams.beam_search import BeamSearchParams
    from tokserve.features.offline.llm import LLM
    from tokserve.features.pooling.pooling_params import PoolingParams
    from tokserve.protocol.adapter_choice import LoRARequest
    from tokserve.protocol.params import StructuredOutputs
    from tokserve.protocol.params import StructuredOutputs as StructuredOutputsParams

_HOMES = {
    "LLM": "tokserve.features.offline.llm",
    "AsyncEngineArgs": "tokserve.client.engine_args",
    "AsyncLLM": "tokserve.client.async_llm",
    "BeamSearchParams": "tokserve.features.beams.beam_search",
    "CompletionOutput": "tokserve.client.results",
    "Config": "tokserve.config",
    "EngineArgs": "tokserve.client.engine_args",
    "LoRARequest": "tokserve.protocol.adapter_choice",
    "PoolingParams": "tokserve.features.pooling.pooling_params",
    "RequestOutput": "tokserve.client.results",
    "RequestOutputKind": "tokserve.client.sampling_params",
    "SamplingParams": "tokserve.client.sampling_params",
    "StructuredOutputs": "tokserve.protocol.params",
    "StructuredOutputsParams": "tokserve.protocol.params:StructuredOutputs",  # vLLM's name
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokserve' has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)
