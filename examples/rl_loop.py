"""Policy gradient on the demo model: rollouts from a server, training here, weights pushed back after every step.

The task: reverse words of eight letters (the model was trained on at most seven, and drops some).  The reward is the
share of the answer's letters that are in their place.  0.875 is the ceiling, seven of eight: the model never learned to
write eight letters, and gets no further in the steps of this loop.

    tokserve serve demo --dtype float32 &
    python examples/rl_loop.py [BASE_URL] | tee log && python examples/rl_plot.py log rl_loop.png

With --epoch N the words of N steps come again and again.  The server drafts their rollouts from the last epoch's, which
changes no token (docs/speculation.md); with --sticky-seeds almost all of these drafts are right.  --speculate trains
twice, without drafts and with them, compares rewards and losses (`==`), and counts the engine's steps.
"""

import argparse
import asyncio
import random
import re
import string
import time

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import Rollout, TokserveClient, sticky_seeds

LETTERS, PROMPTS, SAMPLES, TEMPERATURE, STEPS, GOAL = 8, 8, 16, 2.0, 60, 0.85  # the goal: of three steps' mean reward


def reward(answer: str, expected: str) -> float:
    return sum(a == b for a, b in zip(answer, expected, strict=False)) / max(len(answer), len(expected))


def logprobs(model: torch.nn.Module, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The trainer's logprobs of the rollouts' tokens, the server's, and which entries are tokens: each [rows, T]."""
    rows = [torch.tensor(np.concatenate([r.prompt_ids, r.token_ids]), dtype=torch.long) for r in rollouts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    all_logprobs = torch.log_softmax(model(ids).logits[:, :-1] / TEMPERATURE, -1)
    trainer = all_logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    server, mask = torch.zeros_like(trainer), torch.zeros_like(trainer)
    for i, r in enumerate(rollouts):
        span = slice(len(r.prompt_ids) - 1, len(r.prompt_ids) - 1 + len(r.token_ids))
        server[i, span], mask[i, span] = torch.tensor(r.logprobs), 1.0
    return trainer, server, mask


async def engine_steps(url: str) -> int:
    await asyncio.sleep(0.1)  # the engine sends its last counters when it is idle
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics")).text
    return int(float(re.findall(r"^tokserve:engine_steps_total\S* (\S+)$", text, re.M)[0]))


async def train(client: TokserveClient, args: argparse.Namespace, *, speculate: bool) -> list[tuple[float, float, int]]:
    """Reward, loss and steps of the engine, of each step."""
    rng, noise = random.Random(0), random.Random(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIR)
    model = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows, mismatches, began, name = [], [], time.monotonic(), f"{time.time():.0f}"
    await client.update_weights(model.named_parameters(), version=f"{name}-0")  # a run before this one left others,
    httpx.post(f"{args.url}/reset_prefix_cache", json={"reset_external": True}).raise_for_status()  # and its outputs
    for step in range(args.steps):
        chance = random.Random(step % args.epoch) if args.epoch else rng
        words = ["".join(chance.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(PROMPTS)]
        chats = [[{"role": "user", "content": f"Reverse the word {word}."}] for word in words]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
        sampling = {"max_tokens": LETTERS + 4, "temperature": TEMPERATURE, "logprobs_mode": "temperature"}
        seeds = sticky_seeds(prompts) if args.sticky_seeds else [noise.randrange(1 << 62) for _ in prompts]
        before = await engine_steps(args.url)
        rollouts = await client.generate(prompts, n=SAMPLES, seeds=seeds, speculate=speculate, **sampling)
        steps = await engine_steps(args.url) - before
        answers = [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in rollouts]
        rewards = [reward(a, words[r.prompt_index][::-1]) for a, r in zip(answers, rollouts, strict=True)]
        scores = torch.tensor(rewards).view(PROMPTS, SAMPLES)
        advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 0.05)).view(-1, 1)
        trainer, server, mask = logprobs(model, rollouts)
        mismatches.append(float(((trainer.detach() - server).abs() * mask).sum() / mask.sum()))
        loss = -((trainer - server).exp() * advantages * mask).sum() / mask.sum()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        await client.update_weights(model.named_parameters(), version=f"{name}-{step + 1}")
        rows.append((float(scores.mean()), float(loss.detach()), steps))
        print(
            f"step {step:3}  reward {rows[-1][0]:.3f}  mean |logprob difference| {mismatches[-1]:.1e}  "
            f"loss {rows[-1][1]:.4f}  {steps} engine steps",
            flush=True,
        )
        recent = np.mean([row[0] for row in rows[-3:]])
        if recent > GOAL and not args.speculate:
            break
    print(
        f"reward {rows[0][0]:.3f} -> {recent:.3f} in {time.monotonic() - began:.0f} s; "
        f"mean |server logprob - trainer logprob| {np.mean(mismatches):.1e}"
    )
    return rows


async def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the model is small
    async with TokserveClient(args.url) as client:
        if not args.speculate:
            await train(client, args, speculate=True)
            return
        plain, drafting = [await train(client, args, speculate=on) for on in (False, True)]
        assert [row[:2] for row in plain] == [row[:2] for row in drafting], "rewards or losses differ"
        print("rewards and losses are equal, without drafts and with them")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
parser.add_argument("--steps", type=int, default=STEPS, help="at most")
parser.add_argument("--epoch", type=int, default=0, help="steps after which the words come again; 0: never")
parser.add_argument("--sticky-seeds", action="store_true", help="the same seeds for a word in every epoch")
parser.add_argument("--speculate", action="store_true", help="train without drafts, then with them, and compare")
asyncio.run(main(parser.parse_args()))
