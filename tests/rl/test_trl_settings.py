"""Settings of TRL about generation: passed on, or refused by name (rl-faults F11).  Without TRL: trl_runs.py has it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rl.distribution import rl

settings = importlib.import_module(f"{rl.__name__}.trl_settings")


@dataclass
class Config:
    """The fields of a GRPOConfig that are about generation."""

    learning_rate: float = 1e-6
    generation_kwargs: dict[str, Any] | None = None
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_mode: str = "colocate"
    vllm_importance_sampling_mode: str = "token"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_enable_sleep_mode: bool = False
    vllm_of_a_later_version: int | None = None
    cache_implementation: str | None = None
    use_transformers_paged: bool = False
    transformers_continuous_batching_config: dict[str, Any] | None = field(default=None)


def sampling(**config: Any) -> dict[str, Any]:
    trainer = SimpleNamespace(
        args=Config(**config),
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=None,
        repetition_penalty=1.1,
        max_completion_length=7,
        eos_token_ids=[2, 1],
    )
    sampled: dict[str, Any] = settings.sampling_of(trainer)
    return sampled


def test_what_the_server_has_is_passed_in_its_terms() -> None:
    basic = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "max_tokens": 7,
        "logprobs_mode": "temperature",
        "stop_token_ids": [1, 2],
    }
    assert sampling() == basic
    assert sampling(vllm_structured_outputs_regex="a+") == basic | {"structured_outputs": {"regex": "a+"}}
    extra = {"seed": 3, "structured_outputs": {"choice": ["b"]}}
    assert sampling(vllm_structured_outputs_regex="a+", generation_kwargs=extra) == basic | extra, "as in TRL"
    for name in ("n", "logprobs"):
        with pytest.raises(ValueError, match=f"generation_kwargs: {name}"):
            sampling(generation_kwargs={name: 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_gpu_memory_utilization", 0.5),
        ("vllm_enable_sleep_mode", True),
        ("vllm_of_a_later_version", 1),
        ("cache_implementation", "static"),
        ("use_transformers_paged", True),
        ("transformers_continuous_batching_config", {"a": 1}),
    ],
)
def test_what_has_no_effect_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        settings.check_settings(Config(**{name: value}))
    if name.startswith("vllm_"):
        settings.check_settings(Config(**{name: value}), vllm=True)


def test_settings_of_the_loss_and_of_the_server_are_none_of_them() -> None:
    settings.check_settings(
        Config(
            vllm_server_base_url="http://127.0.0.1:8000",
            vllm_mode="server",
            vllm_importance_sampling_mode="sequence",
            generation_kwargs={"seed": 1},
            vllm_structured_outputs_regex="a",
            learning_rate=1.0,
        )
    )
