"""The two models, and what transformers computes with their weights, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.weights import SOURCES, gguf_file, safetensors_directory

transformers.utils.logging.disable_progress_bar()

TEXTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
]


@dataclass(frozen=True)
class Model:
    """A released model as its GGUF file and as safetensors; `prompts` are `TEXTS` in tokens."""

    name: str
    gguf: Path
    directory: Path
    tokenizer: Any  # transformers'
    prompts: list[list[int]]

    def expected_logprobs(self, tokens: list[int]) -> Tensor:
        """[tokens, vocabulary] float32: transformers' logprobs of what follows each token."""
        with torch.no_grad():
            return reference(self.directory)(torch.tensor([tokens])).logits[0].log_softmax(-1)


@cache
def reference(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model


def load(name: str) -> Model:
    directory = safetensors_directory(name)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return Model(name, gguf_file(name), directory, tokenizer, [tokenizer(text).input_ids for text in TEXTS])


@pytest.fixture(scope="session", params=SOURCES)
def model(request: pytest.FixtureRequest) -> Model:
    return load(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Model:
    return load("smollm2")
