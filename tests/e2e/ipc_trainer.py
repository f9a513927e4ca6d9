"""A trainer of test_cuda_ipc.py, in processes of its own: pushes scaled weights of the demo model by CUDA IPC.

Arguments: the server's URL, what to do, and of several ranks this one's number, their count and a port.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, distributed

from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import Client, CudaIpc, TransferError
from tokserve.rl.cuda_driver import load_driver
from tokserve.rl.cuda_ipc import SharedBuffer


def scaled(factor: float) -> dict[str, Tensor]:
    """The demo model's weights, each a little other than it was."""
    weights = load_file(DEMO_DIR / "model.safetensors")
    return {name: tensor * factor for name, tensor in weights.items()}


def fails_halfway(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from list(weights.items())[:3]
    raise KeyError("no more weights")


def share(url: str) -> None:
    """Export tensors, say where they are, and keep them until a line comes; then free them, and wait once more."""
    tensors = scaled(1.5)
    buffer = SharedBuffer(max(load_driver().devices.values()))
    offsets = buffer.fill(list(tensors.values()))
    owner, handle, size, pid = buffer.row
    shown = {"handle": handle.hex(), "size": size, "pid": pid, "offsets": offsets, "uuid": str(uuid.UUID(bytes=owner))}
    print(json.dumps(shown), flush=True)
    sys.stdin.readline()
    buffer.close()
    print("freed", flush=True)
    sys.stdin.readline()


def push(url: str, factor: float, transport: Any = "cuda_ipc") -> dict[str, Any]:
    with Client(url) as client:
        result = client.push(scaled(factor), version=str(factor), transport=transport)
    segments = [name for name in os.listdir("/dev/shm") if name.startswith(f"fake-cuda-{os.getpid()}-")]
    return {"version": result.weight_version, "mode": result.mode, "bytes": result.num_bytes, "segments": segments}


def push_by_ranks(url: str, what: str, rank: int, count: int, port: int) -> dict[str, Any]:
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    transport = CudaIpc(device=rank, group=distributed.group.WORLD)
    try:
        if what == "ranks":
            return push(url, 1.25, transport)
        weights: Any = fails_halfway(scaled(3.0)) if rank == 1 else scaled(3.0)
        with Client(url) as client:
            client.push(weights, version="3", transport=transport)
    except (TransferError, KeyError) as error:
        return {"failed": type(error).__name__, "message": str(error)}
    finally:
        distributed.destroy_process_group()
    return {"failed": None}


def main() -> None:
    torch.set_num_threads(1)
    url, what, *ranks = sys.argv[1:]
    if what == "share":
        return share(url)
    result = push_by_ranks(url, what, *map(int, ranks)) if ranks else push(url, float(what))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
