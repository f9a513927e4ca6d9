"""What scripts for vLLM read of the model: its configuration under vLLM's names, and its tokenizer from transformers.

Requests do not go through these: prompts and outputs go through `text`, which has no model's Python code.
"""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import Any

import msgspec

from tokserve import checkpoint
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.protocol.messages import Ready
from tokserve.protocol.params import SamplingParams


class ModelView:
    """The model of an engine that is ready.  `defaults`: the sampling parameters that it recommends."""

    def __init__(self, config: Config, ready: Ready, defaults: SamplingParams) -> None:
        self._ready = ready
        self._defaults = defaults
        self._options = config.model
        self.model = config.model.model
        self.tokenizer = config.model.tokenizer or config.model.model
        self.served_model_name = (config.server.served_model_name or [self.model])[0]
        self.max_model_len = ready.max_model_len
        self.max_logprobs = config.model.max_logprobs
        self.quantization = config.model.quantization
        self.runner_type = config.model.runner
        self.seed = config.model.seed

    @cached_property
    def hf_config(self) -> Any:
        """The configuration as a `PretrainedConfig` of transformers, with `hf_overrides`.  Raises StartError."""
        transformers = importlib.import_module("transformers")
        try:
            return transformers.AutoConfig.from_pretrained(self.model, **(self._options.hf_overrides or {}))
        except (OSError, ValueError, KeyError) as error:
            raise StartError(f"transformers cannot read config.json of {self.model}: {error}") from error

    @property
    def hf_text_config(self) -> Any:
        """That of the language model."""
        return self.hf_config.get_text_config()

    @property
    def dtype(self) -> Any:
        """The type of weights and activations, as torch has it."""
        return getattr(importlib.import_module("torch"), str(self._ready.facts["dtype"]))

    def get_vocab_size(self) -> int:
        return self._ready.vocab_size

    def get_hidden_size(self) -> int:
        return int(self._ready.facts["hidden_size"])

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """The recommended sampling parameters that are not the usual ones."""
        usual = msgspec.structs.asdict(SamplingParams())
        return {name: value for name, value in msgspec.structs.asdict(self._defaults).items() if value != usual[name]}


def transformers_tokenizer(config: Config, chat_template: Any = None) -> Any:
    """The checkpoint's tokenizer as transformers loads it, with this chat template and vLLM's side of truncation.
    Raises StartError."""
    model = config.model
    directory = checkpoint.locate(model.tokenizer or model.model, weights=False)
    transformers = importlib.import_module("transformers")
    side = "right" if model.runner == "pooling" else "left"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, truncation_side=side)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise StartError(f"transformers cannot load the tokenizer of {directory}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
