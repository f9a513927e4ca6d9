"""GRPO over an agent that speaks text: the trainer reads its tokens from sessions, and the ratio is 1.0.

The agent uses the OpenAI SDK and knows nothing of training: it asks for a word in reverse, checks the answer with a
tool of its own, and asks once more if it is wrong.  The environment posts a reward to the session and closes it; the
trainer reads the tree of its turns, whose logprobs are those of its own policy, bit for bit.

    tokserve serve demo --sessions --logprobs-mode processed &
    python examples/agent_grpo.py --log agent.jsonl      # needs pip install openai
    python examples/grpo_plot.py agent.jsonl agent_grpo.png
"""

import argparse
import asyncio
import json
import random
import string
import time
from pathlib import Path
from typing import Any

LETTERS, TRIES, TEMPERATURE = 8, 2, 1.5


async def run_agent(sdk: Any, word: str) -> list[str]:
    """The agent: returns its answers, the last of which is its result."""
    messages: list[Any] = [{"role": "user", "content": f"Reverse the word {word}."}]
    answers: list[str] = []
    while len(answers) < TRIES:
        reply = await sdk.chat.completions.create(
            model="demo", messages=messages, temperature=TEMPERATURE, max_tokens=LETTERS + 4
        )
        answers.append(reply.choices[0].message.content or "")
        if is_reverse(answers[-1], word):
            break
        messages.append({"role": "assistant", "content": answers[-1]})
        messages.append({"role": "user", "content": f"Reverse the word {word}."})
    return answers


def is_reverse(answer: str, word: str) -> bool:
    """The agent's tool."""
    return answer == word[::-1]


def reward(answers: list[str], word: str) -> float:
    """Share of letters in their place, less a tenth for each try after the first."""
    answer, right = answers[-1], word[::-1]
    share = sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right))
    return share - 0.1 * (len(answers) - 1)


async def run_group(client: Any, agents: Any, options: argparse.Namespace, name: str, word: str) -> None:
    """Run the agent in so many sessions, and post the rewards."""

    async def run_one(session: str) -> None:
        answers = await run_agent(agents.copy(base_url=f"{options.url}/sessions/{session}/v1"), word)
        await client.add_session_metadata(session, {"group": name, "reward": reward(answers, word)})
        await client.close_session(session)

    await asyncio.gather(*(run_one(f"{name}-{number}") for number in range(options.samples)))


def train(policy: Any, optimizer: Any, trees: list[Any]) -> dict[str, Any]:
    """One step on the trees of all groups; returns its figures."""
    groups: dict[str, list[float]] = {}
    for tree in trees:
        groups.setdefault(tree.metadata["group"], []).append(tree.metadata["reward"])
    turns, weights = [], []
    for tree in trees:
        rewards = torch.tensor(groups[tree.metadata["group"]])
        advantage = (tree.metadata["reward"] - rewards.mean()) / (rewards.std() + 0.05)
        turns += tree.turns
        weights += [advantage.expand(len(turn.tokens.token_ids)) for turn in tree.turns]
    behaviour = torch.cat([torch.from_numpy(turn.tokens.logprobs.copy()) for turn in turns])
    rows = torch.cat(policy.tree_logprobs(turns, TEMPERATURE, turns[0].logprobs_mode))
    ratio = (rows - behaviour).exp()
    spread = [float(end) for end in ratio.detach().aminmax()]
    loss = -(ratio * torch.cat(weights)).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return {
        "reward": sum(tree.metadata["reward"] for tree in trees) / len(trees),
        "ratio": spread,
        "mismatch": max(abs(end - 1) for end in spread),
        "tokens": len(ratio),
        "turns": len(turns),
    }


async def main(options: argparse.Namespace) -> None:
    rng, run = random.Random(options.seed), f"{int(time.time())}"
    with options.log.open("w") as log:
        agents = AsyncOpenAI(api_key="none")
        async with TokserveClient(options.url) as client, agents:
            policy = PolicyModel.from_pretrained("demo", cpu_arithmetic=(await client.state())["arithmetic"])
            optimizer = torch.optim.Adam(policy.parameters(), lr=options.learning_rate)
            await client.push(policy, version=f"{run}-0", delta=True)  # the server may have another run's
            sessions = client.sessions()
            for step in range(1, options.steps + 1):
                began = time.monotonic()
                words = ["".join(rng.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(options.groups)]
                runs = (run_group(client, agents, options, f"{run}-{step}-{word}", word) for word in words)
                await asyncio.gather(*runs)
                trees: list[Any] = []
                while len(trees) < options.groups * options.samples:
                    tree = await anext(sessions)
                    if tree.session_id.startswith(run):  # others are of a trainer before
                        trees.append(tree)
                figures = await asyncio.to_thread(train, policy, optimizer, trees)
                pushed = await client.push(policy, version=f"{run}-{step}", delta=True)
                figures |= {"step": step, "seconds": time.monotonic() - began, "bytes": pushed.num_bytes}
                print(
                    f"step {step:3}  reward {figures['reward']:.3f}  turns {figures['turns']}  "
                    f"ratio {figures['ratio'][0]} to {figures['ratio'][1]}",
                    flush=True,
                )
                log.write(json.dumps(figures) + "\n")
            await sessions.aclose()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=6, help="words of a step")
    parser.add_argument("--samples", type=int, default=12, help="sessions of a word")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("agent_grpo.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    parsed = arguments()
    import torch
    from openai import AsyncOpenAI

    from tokserve.rl import TokserveClient
    from tokserve.train import PolicyModel

    asyncio.run(main(parsed))
