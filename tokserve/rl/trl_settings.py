"""The settings of TRL's trainers that are about generation: what the server is sent, and which are refused.

Where rollouts do not go through TRL's own client (`RolloutFunction`, `ExactGRPOTrainer`), each setting is passed on or
refused by name: none is silently without effect.
"""

from __future__ import annotations

import dataclasses
from typing import Any

LOGPROBS_MODE = "temperature"  # TRL's losses are over the whole vocabulary at the temperature
PASSED = (  # fields of GRPOConfig that `sampling_of` and the callers send in a request's terms
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_completion_length",
    "generation_kwargs",
    "chat_template_kwargs",
    "num_generations",
    "num_generations_eval",
    "vllm_structured_outputs_regex",
)
OTHERS = (  # beginnings of names that are not about generation: the loss, and where TRL's own client finds a server
    "vllm_importance_sampling_",
    "vllm_server_",
    "vllm_group_port",
    "vllm_mode",
)
OF_TRANSFORMERS = (
    "cache_implementation",
    "use_transformers_paged",
    "use_transformers_continuous_batching",
    "transformers_continuous_batching_config",
)
SET_BY_CALLERS = ("n", "logprobs", "logprobs_format")  # of generation_kwargs: the trainer's own, not to be replaced


def sampling_of(trainer: Any) -> dict[str, Any]:
    """The sampling parameters of a trainer of TRL, as the server calls them.  Raises ValueError, which names the
    setting, for one that the server's rollouts would not have."""
    args = trainer.args
    extra = dict(args.generation_kwargs or {})
    for name in SET_BY_CALLERS:
        if name in extra:
            raise ValueError(f"generation_kwargs: {name} cannot be set here, the trainer has its own")
    regex = args.vllm_structured_outputs_regex
    return (
        {
            "temperature": trainer.temperature,
            "top_p": trainer.top_p,
            "top_k": max(trainer.top_k, 0),
            "min_p": trainer.min_p or 0.0,
            "repetition_penalty": trainer.repetition_penalty,
            "max_tokens": trainer.max_completion_length,
            "logprobs_mode": LOGPROBS_MODE,
            "stop_token_ids": sorted(trainer.eos_token_ids),
        }
        | ({} if regex is None else {"structured_outputs": {"regex": regex}})
        | extra
    )


def check_settings(args: Any, *, vllm: bool = False) -> None:
    """Refuse settings that have no effect on a server's rollouts.  `vllm`: TRL also talks to a server itself, so that
    settings of its client are used.  Raises ValueError, which names the setting."""
    for field in dataclasses.fields(args):
        name, value = field.name, vars(args)[field.name]
        if not _without_effect(name) or (vllm and name.startswith("vllm_")) or value in (None, False, field.default):
            continue
        raise ValueError(f"{name}={value!r} has no effect on the rollouts of a tokserve server: leave it out")


def _without_effect(name: str) -> bool:
    if name in OF_TRANSFORMERS:
        return True
    return name.startswith("vllm_") and name not in PASSED and not name.startswith(OTHERS)
