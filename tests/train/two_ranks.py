"""One rank of a run over gloo with DDP or FSDP2: trains two steps, and writes its logprobs and gradients to a file."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.train.test_policy import half, rollouts
from tokserve.train import PolicyModel


def main(checkpoint: str, store: str, wrapper: str, rank: int, out: str) -> None:
    torch.set_num_threads(1)  # as the test's own process: torch's SGD rounds by where a thread's part ends
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    policy = PolicyModel.from_pretrained(checkpoint, dtype="bfloat16", cpu_arithmetic="fma")
    wrapped: torch.nn.Module = policy
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(policy)
    else:
        fully_shard(policy, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    rows = rollouts()[rank::2]
    starts, steps = half(rows), []
    for activation_bytes in (0, 1 << 30):
        policy.activation_bytes = activation_bytes
        scored = wrapped(rows, starts, temperature=0.8, logprobs_mode="temperature")
        optimizer.zero_grad()
        torch.stack([row.sum() for row in scored]).sum().backward()
        grads = {name: master.grad for name, master in policy.named_parameters()}
        gradients = {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for name, grad in grads.items()
        }
        steps.append(([row.detach() for row in scored], gradients))
        optimizer.step()
    torch.save(steps, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
