"""Training steps against a real server: every step's rollouts, scored by the trainer, must have the server's bits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch

from tokserve.rl import TokserveClient

TEMPERATURE = 0.9
KINDS: dict[str, dict[str, Any]] = {  # top_k: masks of more than --max-sampling-mask tokens are left out
    "raw": {},
    "temperature": {},
    "processed": {"top_p": 0.9, "top_k": 1000, "return_sampling_mask": True},
}


async def scored(
    client: TokserveClient, model: Any, prompts: Sequence[list[int]], mode: str, served: str | None
) -> list[torch.Tensor]:
    """Rollouts' logprobs by the model, after `==` with the server's."""
    rollouts = await client.generate(
        prompts,
        n=2,
        seeds=[11 + number for number in range(len(prompts))],
        max_tokens=12,
        ignore_eos=True,
        temperature=TEMPERATURE,
        logprobs_mode=mode,
        model=served,
        **KINDS[mode],
    )
    rows = [np.concatenate([rollout.prompt_ids, rollout.token_ids]).tolist() for rollout in rollouts]
    masks = [rollout.sampling_mask for rollout in rollouts] if mode == "processed" else None
    actual: list[torch.Tensor] = model.logprobs(
        rows, [len(rollout.prompt_ids) for rollout in rollouts], TEMPERATURE, mode, masks
    )
    for rollout, row in zip(rollouts, actual, strict=True):
        expected = rollout.sampling_logprobs if mode == "processed" else rollout.logprobs
        assert row.tolist() == expected.tolist()
    return actual


async def train(
    client: TokserveClient,
    model: Any,
    prompts: Sequence[list[int]],
    steps: int,
    publish: Callable[[int], Awaitable[Any]],
    *,
    lr: float,
    served: str | None = None,
) -> None:
    """Policy-gradient steps with AdamW; after each, `publish(step)` gives the server the weights.

    Kinds of logprob take turns, and all come after the last step.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    before = [one.detach().clone() for one in trained]
    for step in range(steps):
        rows = await scored(client, model, prompts, list(KINDS)[step % 3], served)
        advantages = torch.linspace(-1.0, 1.0, len(rows))
        optimizer.zero_grad()
        torch.stack([row.sum() * a for row, a in zip(rows, advantages, strict=True)]).sum().backward()
        optimizer.step()
        await publish(step)
    for mode in KINDS:
        await scored(client, model, prompts, mode, served)
    assert any(not torch.equal(one, old) for one, old in zip(trained, before, strict=True))
