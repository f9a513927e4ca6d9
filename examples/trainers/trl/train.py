"""GRPO with TRL's own trainer, rollouts from a tokserve server: the demo model learns to reverse longer words.

    tokserve serve demo --dtype float32 &
    python train.py --log trl.jsonl && python ../plot.py trl.jsonl trl.png

`use_tokserve()` is all that differs from a script for vLLM's server.  With --rollout-function TRL's public hook is used
instead, which knows nothing of vLLM; TRL then measures no difference of logprobs.  With --exact the trainer computes
with the server's arithmetic, and the difference is 0.0.
"""

import argparse
import functools
import json
import random
import string
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tokserve.rl.trl import RolloutFunction, use_tokserve

DEMO = Path(__file__).parents[3] / "tokserve" / "demo_model"  # what `tokserve serve demo` serves
LETTERS = 8


def share_in_place(completions: list[Any], word: list[str], **_: Any) -> list[float]:
    """The reward: the share of the answer's letters that are in their place."""
    answers = [completion[0]["content"] for completion in completions]
    right = [item[::-1] for item in word]
    return [
        sum(a == b for a, b in zip(answer, goal, strict=False)) / max(len(answer), len(goal))
        for answer, goal in zip(answers, right, strict=True)
    ]


def questions(count: int, seed: int) -> Dataset:
    """Prompts, each with its word, which the reward function gets."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(count)]
    prompts = [[{"role": "user", "content": f"Reverse the word {word}."}] for word in words]
    return Dataset.from_list([{"prompt": p, "word": w} for p, w in zip(prompts, words, strict=True)])


class StepLog(TrainerCallback):
    """A line of JSON per step, for plot.py."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write what TRL measured of a step."""
        if "reward" in logs:
            mismatch = logs.get("sampling/sampling_logp_difference/max")
            entry = {"step": state.global_step, "reward": logs["reward"], "mismatch": mismatch}
            print(json.dumps(entry | {"seconds": logs["step_time"]}), file=self._file, flush=True)


def main(options: argparse.Namespace) -> None:
    """Train."""
    directory = str(options.model)
    config = GRPOConfig(
        output_dir="out",
        max_steps=options.steps,
        learning_rate=7e-4 if options.lora else 5e-4,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=LETTERS + 4,
        temperature=1.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
        use_vllm=not (options.rollout_function or options.exact),
        vllm_mode="server",
        vllm_server_base_url=options.url,
    )
    trainer_class: Any = GRPOTrainer
    if options.exact:
        from tokserve.train.trl import ExactGRPOTrainer

        trainer_class = functools.partial(ExactGRPOTrainer, server_url=options.url)
    use_tokserve()
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(directory),
        args=config,
        reward_funcs=share_in_place,
        train_dataset=questions(4000, seed=1),
        rollout_func=RolloutFunction(options.url) if options.rollout_function else None,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear") if options.lora else None,
        callbacks=[StepLog(options.log)],
    )
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", type=Path, default=DEMO, help="directory of the model that is served")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log", type=Path, default=Path("trl.jsonl"))
    parser.add_argument("--rollout-function", action="store_true", help="TRL's rollout_func, not its server mode")
    parser.add_argument("--lora", action="store_true", help="train an adapter, whose sum with the weights is pushed")
    parser.add_argument("--exact", action="store_true", help="ExactGRPOTrainer; needs tokserve itself")
    main(parser.parse_args())
