"""A training loop of your own: the demo model learns to reverse longer words.

    tokserve serve demo &
    python train.py --log own_loop.jsonl && python ../plot.py own_loop.jsonl own_loop.png

All of the algorithm is below: groups of rollouts, rewards relative to the group's, one optimizer step on them, new
weights to the server.  The trainer's logprobs are the server's to the bit (`PolicyModel`); with --transformers they
come from transformers' module, which needs nothing of tokserve but its client.
"""

import argparse
import asyncio
import json
import random
import string
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokserve.rl import Rollout, TokserveClient

DEMO = Path(__file__).parents[3] / "tokserve" / "demo_model"  # what `tokserve serve demo` serves
LETTERS, PROMPTS, SAMPLES, TEMPERATURE = 8, 8, 8, 1.0


def reward(answer: str, right: str) -> float:
    """The share of the answer's letters that are in their place."""
    return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right))


def logprobs(model: torch.nn.Module, rollouts: list[Rollout]) -> list[torch.Tensor]:
    """The trainer's logprobs of each rollout's tokens, with gradients."""
    rows = [[*r.prompt_ids.tolist(), *r.token_ids.tolist()] for r in rollouts]
    starts = [len(r.prompt_ids) for r in rollouts]
    if hasattr(model, "logprobs"):
        return model.logprobs(rows, starts, temperature=TEMPERATURE, logprobs_mode="temperature")
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    scored = torch.log_softmax(model(ids).logits[:, :-1] / TEMPERATURE, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return [row[start - 1 : len(ids) - 1] for row, start, ids in zip(scored, starts, rows, strict=True)]


async def train(options: argparse.Namespace) -> None:
    """Train; a line of the log per step."""
    rng = random.Random(options.seed)
    async with TokserveClient(options.url) as client:
        await client.wait_ready()
        directory = str(options.model)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        if options.transformers:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        else:
            from tokserve.train import PolicyModel

            dtype = (await client.config())["model"]["dtype"]
            arithmetic = (await client.state())["arithmetic"]
            model = PolicyModel.from_pretrained(directory, dtype=dtype, cpu_arithmetic=arithmetic or "auto")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        await client.push(model)  # the server may have another run's weights
        with options.log.open("w", encoding="utf-8") as log:
            for step in range(1, options.steps + 1):
                began = time.monotonic()
                words = ["".join(rng.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(PROMPTS)]
                chats = [[{"role": "user", "content": f"Reverse the word {word}."}] for word in words]
                prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
                rollouts = await client.generate(
                    prompts,
                    n=SAMPLES,
                    max_tokens=LETTERS + 4,
                    temperature=TEMPERATURE,
                    logprobs_mode="temperature",
                    seeds=[rng.getrandbits(60) for _ in prompts],
                )
                answers = [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in rollouts]
                rewards = torch.tensor(
                    [reward(text, words[r.prompt_index][::-1]) for text, r in zip(answers, rollouts, strict=True)]
                ).view(PROMPTS, SAMPLES)
                advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.05)
                scored = logprobs(model, rollouts)
                behaviour = [torch.from_numpy(r.logprobs.copy()) for r in rollouts]
                ratios = [(trained - served).exp() for trained, served in zip(scored, behaviour, strict=True)]
                parts = [ratio * a for ratio, a in zip(ratios, advantages.view(-1), strict=True)]
                loss = -torch.cat(parts).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                await client.push(model)
                mismatch = float((torch.cat(scored).detach() - torch.cat(behaviour)).abs().max())
                entry = {"step": step, "reward": float(rewards.mean()), "mismatch": mismatch}
                entry["seconds"] = time.monotonic() - began
                print(json.dumps(entry), file=log, flush=True)
                print(f"step {step:3}  reward {entry['reward']:.3f}  |logprob difference| {mismatch:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", type=Path, default=DEMO, help="directory of the model that is served")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("own_loop.jsonl"))
    parser.add_argument("--transformers", action="store_true", help="score with transformers' module")
    asyncio.run(train(parser.parse_args()))
