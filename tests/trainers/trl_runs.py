"""Short runs of TRL's trainer with `tokserve.rl.trl`, in TRL's environment: `trl_runs.py URL MODEL_DIR KEY`.

Seeds differ within a step and are the same in the next run and after a checkpoint (rl-faults F6, newcomer-3 D7);
settings of generation are passed on or refused by name (F11); a body of any size is sent (E3); and the environment's
proxies, which lead nowhere here, are not used for this machine (E6).
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from tokserve.rl import trl as pieces
from tokserve.rl import trl_settings

URL, MODEL_DIR, KEY = sys.argv[1:]
PROMPT = [{"role": "user", "content": "Reverse the word abcdefgh."}]
BASIC: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "max_completion_length": 24,
    "temperature": 2.0,
    "learning_rate": 1e-4,
    "seed": 5,
    "max_steps": 1,
    "save_strategy": "no",
    "lr_scheduler_type": "constant",
    "mask_truncated_completions": False,
}
SERVER_MODE = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": URL}


def trained(rollouts: str, directory: str, resume: str | None = None, **options: Any) -> list[str]:
    """Train; the completions of all calls, in their order."""
    seen: list[str] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        seen.extend(texts)
        return [len(text) % 7 / 7 for text in texts]

    mode = SERVER_MODE if rollouts == "use_tokserve" else {}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
        args=GRPOConfig(output_dir=directory, **{**BASIC, **mode, **options}),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * 64),
        eval_dataset=Dataset.from_list([{"prompt": PROMPT}]),
        rollout_func=pieces.RolloutFunction(URL, api_key=KEY) if rollouts == "RolloutFunction" else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    return seen


def check_seeds(rollouts: str) -> None:
    """Four calls in one step have different seeds, and the next run has the same ones."""
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "generation_kwargs": {"min_tokens": 24}}
    with tempfile.TemporaryDirectory() as directory:
        first = trained(rollouts, directory, **options)
        assert len(first) == 32 and len({*first}) == 32, f"{rollouts}: {len({*first})} of {len(first)} are unique"
        assert trained(rollouts, directory, **options) == first, f"{rollouts}: the next run has other completions"
        assert trained(rollouts, directory, **options | {"seed": 6}) != first


def check_resumed(rollouts: str) -> None:
    """A run that goes on from a checkpoint has the completions that it would have had, with evaluations too."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    with tempfile.TemporaryDirectory() as directory:
        complete = trained(rollouts, directory, **options)
        rest = trained(rollouts, directory, str(Path(directory) / "checkpoint-2"), **options)
        assert len(complete) == 48 and rest == complete[-len(rest) :] and len(rest) == 24, f"{rollouts}: {len(rest)}"


def check_settings() -> None:
    """Each setting about generation is known here, and is passed on or refused by name."""
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    names -= {field.name for field in dataclasses.fields(TrainingArguments)}
    pattern = (
        r"vllm_|transformers|cache|generation|temperature$|top_[pk]|min_p|repetition|completion_length|chat_template"
    )
    about = {name for name in names if re.match(pattern, name) or "generations" in name}
    others = {"generation_batch_size", "steps_per_generation"}  # how TRL forms its batches
    known = {*trl_settings.PASSED, *trl_settings.OF_TRANSFORMERS, *others}
    unknown = {name for name in about - known if not name.startswith("vllm_")}
    assert not unknown and {*trl_settings.PASSED, *trl_settings.OF_TRANSFORMERS} <= names, unknown
    with tempfile.TemporaryDirectory() as directory:
        texts = trained("RolloutFunction", directory, vllm_structured_outputs_regex="[a-z]{4}")
        assert all(re.fullmatch("[a-z]{4}", text) for text in texts), texts
        refused: dict[str, Any] = {
            "cache_implementation": "static",
            "vllm_enable_sleep_mode": True,
            "vllm_max_model_length": 64,
            "vllm_gpu_memory_utilization": 0.5,
            "use_transformers_continuous_batching": True,
            "generation_kwargs": {"n": 2},
        }
        for name, value in refused.items():
            try:
                trained("RolloutFunction", directory, **{name: value})
            except ValueError as error:
                assert name in str(error), error
            else:
                raise AssertionError(f"{name} was accepted")


def check_size() -> None:
    """More prompts and ids than one body of the server may have."""
    client = vllm_generation.VLLMClient(base_url=URL)
    prompts = [[5, 6, 7] * 170 for _ in range(4100)]
    output = client.generate(prompts, n=1, max_tokens=1, temperature=0.0)
    assert output["prompt_ids"] == prompts and len(output["completion_ids"]) == len(output["logprobs"]) == len(prompts)


if __name__ == "__main__":
    pieces.use_tokserve(api_key=KEY)
    pieces.use_tokserve(api_key=KEY)
    check_size()
    check_settings()
    for kind in ("use_tokserve", "RolloutFunction"):
        check_seeds(kind)
        check_resumed(kind)
