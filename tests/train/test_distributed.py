"""Two processes that train with DDP or FSDP2 over gloo: the forward's bits are one process's, gradients are means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_models import tiny_config, write_checkpoint
from tests.train.test_policy import half, rollouts
from tokserve.train import PolicyModel

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_ranks_have_the_gradients_of_one(wrapper: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config("qwen3"))
    outs = [tmp_path / f"{rank}.pt" for rank in (0, 1)]
    command = [sys.executable, "-m", "tests.train.two_ranks", str(directory), str(tmp_path / "store"), wrapper]
    processes = [
        subprocess.Popen([*command, str(rank), str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank, out in enumerate(outs)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    ranks = [torch.load(out) for out in outs]
    policy = PolicyModel.from_pretrained(directory, dtype="bfloat16", cpu_arithmetic="fma")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for step in (0, 1):
        shares = []
        for rank in (0, 1):
            rows = rollouts()[rank::2]
            policy.zero_grad()
            scored = policy.logprobs(rows, half(rows), temperature=0.8, logprobs_mode="temperature")
            assert all(torch.equal(one, other) for one, other in zip(scored, ranks[rank][step][0], strict=True))
            torch.stack([row.sum() for row in scored]).sum().backward()
            shares.append({name: master.grad.clone() for name, master in policy.named_parameters()})
        for name, master in policy.named_parameters():
            mean = (shares[0][name] + shares[1][name]) / 2
            for rank in (0, 1):
                assert torch.equal(ranks[rank][step][1][name], mean), (name, step, rank)
            master.grad = mean
        optimizer.step()
