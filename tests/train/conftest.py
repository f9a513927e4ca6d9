"""The kernels that the tests compute with, the families they run, and the torch references afterwards."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiers import slow_except
from tests.tiny_models import tiny_config, write_checkpoint

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-no-groups-gelu": ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-mixed-wide": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": MIXED,
            "head_dim": 32,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("gemma3_text", {}),
}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "glm4_moe": ("glm4_moe", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
}


@pytest.fixture(autouse=True)
def kernels(compiled: None) -> None:
    """Every test computes with the compiled ops."""


EVERY = slow_except(
    FAMILIES, "llama-biases-tied", "llama-no-groups-gelu", "qwen3-mixed-wide", "gemma3"
)  # they have all parts


@pytest.fixture(params=EVERY)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of each family, with norms and biases that are not trivial."""
    name, changes = FAMILIES[request.param]
    return write_checkpoint(tmp_path / request.param, tiny_config(name, **changes))
