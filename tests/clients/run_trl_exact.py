"""`tokserve.train.trl` in TRL's own training loop: no difference between rollouts and the trainer's logprobs.

Runs with this project's interpreter, which has the compiled ops; TRL comes from its environment's packages.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from typing import Any

sys.path.append(os.environ["CLIENT_PACKAGES"])

import torch
from datasets import Dataset
from peft import LoraConfig
from report import Report
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from tokserve.train.trl import ExactGRPOTrainer

STEPS = 5
DIFFERENCE = "sampling/sampling_logp_difference/max"
RATIOS = ("sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/max")
QUESTIONS = [f"Say {word} {count} times." for word in ("yes", "no", "maybe", "often") for count in range(2, 8)]


def arbitrary(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between any two answers: nothing is to be learned but other weights."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum((at + 1) * ord(character) for at, character in enumerate(text)) % 13 / 13 for text in texts]


def trained(report: Report, name: str, **options: Any) -> None:
    """Some steps; the metrics of each."""
    model = AutoModelForCausalLM.from_pretrained(report.model_dir, dtype=torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    peft_config = options.pop("peft_config", None)
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=8,
            num_generations=4,
            learning_rate=1e-4,
            max_completion_length=8,
            seed=1,
            **options,
        )
        prompts = [{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]
        trainer = ExactGRPOTrainer(
            model=model,
            args=config,
            reward_funcs=arbitrary,
            train_dataset=Dataset.from_list(prompts),
            server_url=report.url,
            peft_config=peft_config,
        )
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if DIFFERENCE in entry]
    report.check(f"{name}: every step has the metric", len(steps) == STEPS)
    for entry in steps:
        report.check(f"{name}: step {entry['step']}: {entry[DIFFERENCE]}", entry[DIFFERENCE] == 0.0)
        report.check(f"{name}: ratios", all(entry[ratio] == 1.0 for ratio in RATIOS))
        report.check(f"{name}: entropy", entry["entropy"] > 0.0)
    after = trainer.model.state_dict()
    report.check(
        f"{name}: weights moved",
        any(not torch.equal(value, before.get(key, torch.zeros(1))) for key, value in after.items()),
    )


def completions(report: Report, **options: Any) -> list[str]:
    """The completions of a step with four calls for rollouts of one prompt."""
    seen: list[str] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        seen.extend(texts)
        return [len(text) % 7 / 7 for text in texts]

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            **{
                "output_dir": directory,
                "use_cpu": True,
                "bf16": False,
                "max_steps": 1,
                "save_strategy": "no",
                "report_to": [],
                "disable_tqdm": True,
                "per_device_train_batch_size": 8,
                "num_generations": 8,
                "seed": 1,
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 1,
                "max_completion_length": 24,
                "temperature": 2.0,
                **options,
            }
        )
        prompts = [{"prompt": [{"role": "user", "content": QUESTIONS[0]}]}] * 32
        trainer = ExactGRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(report.model_dir, dtype=torch.float32),
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(prompts),
            server_url=report.url,
        )
        trainer.train()
    return seen


def settings(report: Report) -> None:
    """Seeds of the calls within a step, and the settings of generation."""
    first = completions(report, generation_kwargs={"min_tokens": 24})
    report.check(f"{len({*first})} of {len(first)} rollouts of a step are unique", len({*first}) == len(first) == 32)
    report.check("the next run is the same", completions(report, generation_kwargs={"min_tokens": 24}) == first)
    texts = completions(report, vllm_structured_outputs_regex="[a-z]{4}")
    report.check(f"a regular expression: {texts[:2]}", all(re.fullmatch("[a-z]{4}", text) for text in texts))
    try:
        completions(report, cache_implementation="static")
    except ValueError as error:
        report.check(f"refused by name: {error}", "cache_implementation" in str(error))
    else:
        report.check("a setting without effect is refused", False)


def main() -> None:
    report = Report()
    settings(report)
    trained(report, "all weights", temperature=1.5)
    trained(report, "with top-k, a reference and an entropy bonus", top_k=20, beta=0.02, entropy_coef=0.01)
    trained(
        report,
        "gradient accumulation and checkpointing",
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        temperature=1.5,
    )
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trained(report, "an adapter", peft_config=lora, temperature=1.5)
    report.done("trl", "transformers", "torch", "peft")


if __name__ == "__main__":
    main()
