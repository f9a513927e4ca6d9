"""Asynchronous GRPO on the demo model, on-policy to the bit: rollouts from a server, training here, weights in flight.

The task: reverse words of eight letters (the model was trained on at most seven, and drops some).  The reward is the
share of the answer's letters that are in their place.  Rollouts of the next steps are generated while this one trains;
updates are pushed without a pause, and each token says which weights made it.

    tokserve serve demo &
    python examples/grpo.py --log exact.jsonl                                # the mismatch is 0.0
    python examples/grpo.py --log transformers.jsonl --trainer transformers   # the usual mismatch
    python examples/grpo_plot.py exact.jsonl transformers.jsonl grpo.png
"""

import argparse
import asyncio
import json
import random
import string
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import Rollout, TokserveClient
from tokserve.train import PolicyModel

LETTERS = 8
GOAL = 0.85  # mean reward of three steps
TEMPERATURE, TOP_P = 2.0, 0.98
CLIP = 0.2


@dataclass
class Group:
    """Rollouts of one prompt, and the reward of each."""

    rollouts: list[Rollout]
    rewards: torch.Tensor  # [n]

    @property
    def advantages(self) -> torch.Tensor:
        """Rewards relative to the group's, in its standard deviations [n]."""
        return (self.rewards - self.rewards.mean()) / (self.rewards.std() + 0.05)


class ExactTrainer:
    """The server's arithmetic: common prefixes are computed once, and every bit is the server's."""

    def __init__(self, arithmetic: str) -> None:
        self.module = PolicyModel.from_pretrained(DEMO_DIR, cpu_arithmetic=arithmetic)

    def logprobs(self, rollouts: list[Rollout]) -> list[torch.Tensor]:
        """Logprobs of each rollout's tokens, over the ids they were drawn from: float32 [tokens], with gradients."""
        rows = [[*r.prompt_ids.tolist(), *r.token_ids.tolist()] for r in rollouts]
        starts = [len(r.prompt_ids) for r in rollouts]
        masks = [r.sampling_mask for r in rollouts]
        return self.module.logprobs(
            rows, starts, temperature=TEMPERATURE, logprobs_mode="processed", sampling_masks=masks
        )


class TransformersTrainer:
    """The usual trainer: another implementation of the same model, in bfloat16, in padded batches."""

    def __init__(self) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)

    def logprobs(self, rollouts: list[Rollout]) -> list[torch.Tensor]:
        rows = [torch.tensor(np.concatenate([r.prompt_ids, r.token_ids]), dtype=torch.long) for r in rollouts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.module(ids).logits.float() / TEMPERATURE
        return [self._row(logits[i], r) for i, r in enumerate(rollouts)]

    def _row(self, logits: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        begin, count = len(rollout.prompt_ids) - 1, len(rollout.token_ids)
        banned = torch.ones(count, logits.shape[-1], dtype=torch.bool)
        for position, ids in enumerate(rollout.sampling_mask):
            banned[position, slice(None) if ids is None else torch.from_numpy(ids).long()] = False
        scored = torch.log_softmax(logits[begin : begin + count].masked_fill(banned, -torch.inf), -1)
        return scored.gather(-1, torch.tensor(rollout.token_ids, dtype=torch.long)[:, None])[:, 0]


Trainer = ExactTrainer | TransformersTrainer


class Rollouts:
    """Groups of rollouts, generated in the background: at most `limit` are in flight or wait to be trained on."""

    def __init__(self, client: TokserveClient, options: argparse.Namespace) -> None:
        self._client, self._samples, self._shots = client, options.samples, options.shots
        self._tokenizer = AutoTokenizer.from_pretrained(DEMO_DIR)
        self._rng = random.Random(options.seed)
        self._room = asyncio.Semaphore(options.prompts * (1 + options.lag))
        self._groups: asyncio.Queue[Group] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate_forever(self) -> None:
        """Start a group whenever there is room."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._room.acquire()
                tasks.create_task(self._generate(self._word()))

    async def take(self, count: int) -> list[Group]:
        """The next groups that are complete."""
        return [await self._groups.get() for _ in range(count)]

    def free(self, count: int) -> None:
        """Groups that were taken were trained on."""
        for _ in range(count):
            self._room.release()

    def _word(self) -> str:
        return "".join(self._rng.choices(string.ascii_lowercase, k=LETTERS))

    def _chat(self, word: str) -> list[dict[str, str]]:
        """The task, behind as many solved ones as were asked for."""
        chat = []
        for each in [*(self._word() for _ in range(self._shots)), word]:
            chat += [
                {"role": "user", "content": f"Reverse the word {each}."},
                {"role": "assistant", "content": each[::-1]},
            ]
        return chat[:-1]

    async def _generate(self, word: str) -> None:
        chat = self._chat(word)
        prompt = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        rollouts = await self._client.generate(
            [prompt],
            n=self._samples,
            seeds=[self._rng.getrandbits(32)],
            max_tokens=LETTERS + 4,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            logprobs_mode="processed",
            return_sampling_mask=True,
        )
        answers = (self._tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in rollouts)
        await self._groups.put(Group(rollouts, torch.tensor([reward(answer, word[::-1]) for answer in answers])))


def reward(answer: str, right: str) -> float:
    """Share of letters in their place."""
    return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right))


def made_by(rollout: Rollout, version: str) -> torch.Tensor:
    """Which tokens these weights made [tokens]."""
    tokens = torch.zeros(len(rollout.token_ids), dtype=torch.bool)
    for serving_version, start, end in rollout.weight_versions:
        tokens[start:end] = serving_version == version
    return tokens


class History:
    """The weights that rollouts on their way may have been made by."""

    def __init__(self, trainer: Trainer, length: int) -> None:
        self._trainer, self._length = trainer, length
        self._weights: dict[str, list[torch.Tensor]] = {}  # by version

    def add(self, version: str) -> None:
        """Keep what the trainer has now."""
        self._weights[version] = [parameter.detach().clone() for parameter in self._trainer.module.parameters()]
        while len(self._weights) > self._length:
            del self._weights[next(iter(self._weights))]

    @torch.no_grad()
    def logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        """The trainer's logprobs of all tokens, each with the weights that made it [tokens]."""
        current = list(self._weights.values())[-1]
        scored = torch.full([sum(len(r.token_ids) for r in rollouts)], torch.nan)
        for version in {version for r in rollouts for version, _, _ in r.weight_versions}:
            self._load(self._weights[version])
            mask = torch.cat([made_by(r, version) for r in rollouts])
            scored[mask] = torch.cat(self._trainer.logprobs(rollouts))[mask]
        self._load(current)
        return scored

    def _load(self, weights: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._trainer.module.parameters(), weights, strict=True):
            parameter.copy_(value)


def train(trainer: Trainer, optimizer: torch.optim.Optimizer, history: History, groups: list[Group]) -> dict[str, Any]:
    """One optimizer step; its figures."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    behaviour = torch.from_numpy(np.concatenate([r.logprobs for r in rollouts]))
    mismatch = float((history.logprobs(rollouts) - behaviour).abs().max())
    advantages = torch.cat([group.advantages for group in groups])
    rows = trainer.logprobs(rollouts)
    weights = torch.repeat_interleave(advantages, torch.tensor([len(row) for row in rows]))
    ratio = (torch.cat(rows) - behaviour).exp()
    loss = -torch.minimum(ratio * weights, ratio.clamp(1 - CLIP, 1 + CLIP) * weights).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainer.module.parameters(), 1.0)
    optimizer.step()
    rewards = torch.cat([group.rewards for group in groups])
    clipped = float((ratio - 1).abs().gt(CLIP).float().mean())
    return {"reward": float(rewards.mean()), "mismatch": mismatch, "clipped": clipped, "tokens": len(ratio)}


async def steps(client: TokserveClient, trainer: Trainer, options: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Train until the goal is reached; yields each step's figures."""
    optimizer = torch.optim.Adam(trainer.module.parameters(), lr=options.learning_rate)
    history, run = History(trainer, 2 + options.lag), f"{int(time.time())}"
    version = f"{run}-0"
    history.add(version)
    await client.push(trainer.module, version=version, delta=True)  # the server may hold another run's
    rollouts = Rollouts(client, options)
    generating = asyncio.create_task(rollouts.generate_forever())
    rewards: list[float] = []
    try:
        for step in range(1, options.steps + 1):
            began = time.monotonic()
            groups = await rollouts.take(options.prompts)
            figures = await asyncio.to_thread(train, trainer, optimizer, history, groups)
            version = f"{run}-{step}"
            history.add(version)
            pushed = await client.push(trainer.module, version=version, delta=True, recompute_kv=True)
            rollouts.free(options.prompts)
            seconds = time.monotonic() - began
            rewards.append(figures["reward"])
            yield {"step": step, **figures, "seconds": seconds, "bytes": pushed.num_bytes}
            if np.mean(rewards[-3:]) > GOAL:
                break
    finally:
        generating.cancel()


async def main(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    with options.log.open("w") as log:
        async with TokserveClient(options.url) as client:
            arithmetic = (await client.state())["arithmetic"]
            trainer = ExactTrainer(arithmetic) if options.trainer == "exact" else TransformersTrainer()
            async for step in steps(client, trainer, options):
                print(
                    f"step {step['step']:3}  reward {step['reward']:.3f}  max |logprob difference| "
                    f"{step['mismatch']:.1e}  clipped {step['clipped']:4.0%}  "
                    f"{step['tokens'] / step['seconds']:5.0f} tokens/s  {step['bytes'] / 1e6:.2f} MB",
                    flush=True,
                )
                log.write(json.dumps(step) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--trainer", choices=["exact", "transformers"], default="exact")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=8, help="groups of a step")
    parser.add_argument("--samples", type=int, default=16, help="rollouts of a group")
    parser.add_argument("--shots", type=int, default=0, help="solved examples in each prompt, about 50 tokens each")
    parser.add_argument("--lag", type=int, default=1, help="steps that rollouts may be behind; 0: generate, then train")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("grpo.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
