"""A task of verifiers, rollouts by its train client, and a training loop of your own.

    tokserve serve demo --rl --dtype float32 &
    python train.py --log verifiers.jsonl && python ../plot.py verifiers.jsonl verifiers.png

The task and its reward are verifiers' classes; `TrainClient`, which prime-rl's orchestrator uses, renders the prompt to
token ids, calls /inference/v1/generate, and the trace keeps the ids and logprobs that the loop below trains on.
"""

import argparse
import asyncio
import json
import random
import string
import time
from pathlib import Path

import torch
import verifiers.v1 as vf
from transformers import AutoModelForCausalLM
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.types import SamplingConfig, UserMessage

from tokserve.rl import TokserveClient

DEMO = Path(__file__).parents[3] / "tokserve" / "demo_model"  # what `tokserve serve demo` serves
LETTERS, PROMPTS, SAMPLES, TEMPERATURE = 8, 8, 8, 1.0


class ReverseData(vf.TaskData):
    """A word to reverse."""

    word: str


class Reverse(vf.Task[ReverseData]):
    """The demo model was trained on words of up to seven letters; these have eight."""

    @vf.reward
    async def in_place(self, trace: vf.Trace) -> float:
        """The share of the answer's letters that are in their place."""
        answer, right = trace.last_reply, self.data.word[::-1]
        return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right))


def reverse_task(rng: random.Random) -> Reverse:
    """A task with a word of its own."""
    word = "".join(rng.choices(string.ascii_lowercase, k=LETTERS))
    return Reverse(ReverseData(word=word, prompt=f"Reverse the word {word}."))


async def rollout(client: TrainClient, model: str, task: Reverse, seed: int) -> vf.Trace:
    """One rollout of the task: its trace, scored."""
    config = vf.AgentConfig(model=model)
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=about, agent=vf.AgentInfo(config=config))
    turn = prepare_turn(trace, [UserMessage(content=task.data.prompt)])
    sampling = SamplingConfig(temperature=TEMPERATURE, max_tokens=LETTERS + 4, seed=seed)
    turn.commit(await client.get_response(ChatDialect(), {"model": model}, sampling, turn=turn))
    await task.score(trace)
    return trace


def logprobs(model: torch.nn.Module, branches: list[vf.Branch]) -> list[torch.Tensor]:
    """The trainer's logprobs of each branch's sampled tokens, with gradients."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(b.token_ids) for b in branches], batch_first=True)
    scored = torch.log_softmax(model(ids).logits[:, :-1] / TEMPERATURE, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return [
        row[: len(b.token_ids) - 1][torch.tensor(b.sampled_mask[1:])] for row, b in zip(scored, branches, strict=True)
    ]


async def train(options: argparse.Namespace) -> None:
    """Train; a line of the log per step."""
    rng = random.Random(options.seed)
    async with TokserveClient(options.url) as server:
        await server.wait_ready()
        name = (await server.models())[0]
        directory = str(options.model)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        config = vf.TrainClientConfig(base_url=f"{options.url}/v1", api_key_var="NONE", renderer_model_name=directory)
        client = TrainClient(config)
        await server.push(model)  # the server may have another run's weights
        with options.log.open("w", encoding="utf-8") as log:
            for step in range(1, options.steps + 1):
                began = time.monotonic()
                tasks = [reverse_task(rng) for _ in range(PROMPTS)]
                calls = [rollout(client, name, task, rng.getrandbits(60)) for task in tasks for _ in range(SAMPLES)]
                traces = await asyncio.gather(*calls)
                rewards = torch.tensor([trace.reward for trace in traces]).view(PROMPTS, SAMPLES)
                advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.05)
                branches = [trace.branches[-1] for trace in traces]
                behaviour = [torch.tensor(b.logprobs)[torch.tensor(b.sampled_mask)] for b in branches]
                scored = logprobs(model, branches)
                ratios = [(trained - served).exp() for trained, served in zip(scored, behaviour, strict=True)]
                parts = [ratio * a for ratio, a in zip(ratios, advantages.view(-1), strict=True)]
                loss = -torch.cat(parts).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                await server.push(model)
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
    parser.add_argument("--log", type=Path, default=Path("verifiers.jsonl"))
    asyncio.run(train(parser.parse_args()))
