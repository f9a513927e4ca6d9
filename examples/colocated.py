"""Server and trainer on one GPU, in turns: the server sleeps while the trainer computes, and gets the new weights
through the GPU's memory (CUDA IPC), with no copy on the host.

tokserve serve demo --device cuda --gpu-memory-utilization 0.4 &
python examples/colocated.py [BASE_URL] [TRANSPORT]

TRANSPORT: cuda_ipc (default where torch sees a GPU), or http.
"""

import sys

import torch
from safetensors.torch import load_file

from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import Client

PROMPT = [286, 84, 82, 68, 81, 198, 16, 10, 16, 287, 198, 286, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198]


def free_memory() -> str:
    """What the GPU has left, by its driver, for whichever process."""
    if not torch.cuda.is_available():
        return "no GPU"
    free, total = torch.cuda.mem_get_info()
    return f"{free >> 20} of {total >> 20} MiB free"


def train(weights: dict[str, torch.Tensor], step: int) -> None:
    """A trainer's step stands here: activations, gradients, the optimiser."""
    torch.manual_seed(step)
    for tensor in weights.values():
        tensor += 1e-3 * torch.randn_like(tensor) * tensor.abs().mean()


def main(url: str, transport: str | None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: tensor.to(device) for name, tensor in load_file(DEMO_DIR / "model.safetensors").items()}
    with Client(url) as client:
        for step in range(1, 4):
            rollouts = client.generate([PROMPT] * 4, n=2, max_tokens=32, temperature=1.0, logprobs_mode="processed")
            versions = {version for rollout in rollouts for version, _, _ in rollout.weight_versions}
            print(f"step {step}: {len(rollouts)} rollouts of version {', '.join(sorted(versions))}; {free_memory()}")
            client.sleep(2)  # weights and KV cache: nearly all of the server's memory
            print(f"  asleep: {free_memory()}")
            train(weights, step)
            torch.cuda.empty_cache()  # what torch keeps of it is room for the server's weights
            client.wake_up(["weights"])
            result = client.push(weights, version=f"step-{step}", transport=transport)
            client.wake_up(["kv_cache"])
            print(f"  pushed {result.num_bytes} bytes as version {result.weight_version}; {free_memory()}")


if "--help" in sys.argv:
    print(__doc__)
else:
    chosen = sys.argv[2] if len(sys.argv) > 2 else "cuda_ipc" if torch.cuda.is_available() else "http"
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000", None if chosen == "http" else chosen)
