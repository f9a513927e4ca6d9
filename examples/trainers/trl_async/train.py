"""Asynchronous GRPO with TRL: rollouts go on while the trainer trains, and while new weights come.

    tokserve serve demo --rl --dtype float32 &
    python train.py --log trl_async.jsonl && python ../plot.py trl_async.jsonl trl_async.png

TRL's rollout worker, a process of its own, talks to the server as it would to vLLM's; weights go over HTTP as one
update a step, without a pause.
"""

import argparse
import json
import random
import string
from pathlib import Path
from typing import Any

import torch
from cpu import use_cpu
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from tokserve.rl.trl import HTTPWeightTransfer, use_tokserve

DEMO = Path(__file__).parents[3] / "tokserve" / "demo_model"  # what `tokserve serve demo` serves
LETTERS = 8
RESPONSE = {  # how a reply is read, for a chat template that TRL does not know
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}


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
    """A line of JSON per step, for plot.py.  `ratio`: mean of the policy's probability to that when it was drawn."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write what TRL measured of a step."""
        if "reward" in logs:
            entry = {"step": state.global_step, "reward": logs["reward"], "mismatch": None, "ratio": logs["ratio"]}
            print(json.dumps(entry | {"seconds": logs.get("perf/step_s", 0.0)}), file=self._file, flush=True)


def main(options: argparse.Namespace) -> None:
    """Train."""
    directory = str(options.model)
    config = AsyncGRPOConfig(
        output_dir="out",
        max_steps=options.steps,
        learning_rate=6e-4,
        per_device_train_batch_size=64,
        token_budget=0,
        num_generations=8,
        max_completion_length=LETTERS + 4,
        temperature=1.0,
        max_inflight_tasks=64,
        max_staleness=1,
        dtype="float32",
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
        vllm_server_base_url=options.url,
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.response_template = RESPONSE
    use_tokserve()
    if not torch.cuda.is_available():
        use_cpu()
    trainer = AsyncGRPOTrainer(
        model=directory,
        args=config,
        reward_funcs=share_in_place,
        train_dataset=questions(4000, seed=1),
        processing_class=tokenizer,
        weight_transfer=HTTPWeightTransfer(options.url),
        callbacks=[StepLog(options.log)],
    )
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", type=Path, default=DEMO, help="directory of the model that is served")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--log", type=Path, default=Path("trl_async.jsonl"))
    main(parser.parse_args())
