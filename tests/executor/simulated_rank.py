"""A program, not a test: one rank whose GPU is simulated, and whose peers' memory is (tests/fake_libcuda.c).

Arguments are the port of a store, the rank, and a JSON object of what to do.  Prints a JSON object.  Kernels of
exchanges run in Triton's interpreter, the model's as on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from triton.runtime import interpreter

from tests.interpreted import mend_interpreter
from tests.runner.drive import Driver, Job
from tests.runner.fake_device import FakeDevice
from tests.runner.test_cuda import LateDriver
from tokserve.config import Config
from tokserve.features.ranks import ranks as ranks_module
from tokserve.gpu.cuda import CudaBackend
from tokserve.gpu.peers import PeerMemory
from tokserve.protocol.params import SamplingParams
from tokserve.runner import device
from tokserve.runner.startup import load_runner


def parts(seed: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank contributes: values of every size, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    return (torch.randn(*shape, generator=generator) * torch.logspace(-3, 3, shape[-1])).to(dtype)


def digest(*tensors: Tensor) -> str:
    """A name of the tensors' bits."""
    value = hashlib.sha256()
    for tensor in tensors:
        value.update(
            str(tuple(tensor.shape)).encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return value.hexdigest()


def exchanges(memory: PeerMemory, rank: int, size: int) -> dict[str, Any]:
    """Sums, tensors side by side and copies, of sizes below and above those of a launch, in a row."""
    group = memory.join("small", range(size), programs=3, capacity=1024)
    wrong = []
    for turn, rows in enumerate((1, 5, 3, 41, 2)):
        all_parts = [parts(turn, other, rows, 96) for other in range(size)]
        expected, *others = (part.clone() for part in all_parts)
        for other in others:
            expected.add_(other)
        if not torch.equal(group.add(all_parts[rank]), expected):
            wrong.append(f"sum of {rows}")
        beside = group.gather(all_parts[rank])
        if not torch.equal(beside, torch.cat(all_parts, 1) if rank == 0 else torch.empty(rows, 0)):
            wrong.append(f"{rows} side by side")
        root = turn % size
        sent = parts(turn, root, 2, rows, 96, dtype=torch.bfloat16)
        received = group.copy(sent.clone() if rank == root else torch.zeros_like(sent), root)
        if not torch.equal(received, sent):
            wrong.append(f"copy of {rows}")
    return {"wrong": wrong}


def jobs() -> list[Job]:
    """A few requests, greedy and drawn, of several lengths."""
    return [
        Job([*range(7 + i, 9 + i + 11 * i)], SamplingParams(max_tokens=4 + i, temperature=i), seed=i) for i in range(2)
    ]


def steps(rank: int, store: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Tokens of `jobs`, and what the simulated device has counted."""
    fake = FakeDevice()
    used: Any = fake if task["simulated"] else device.Host()
    device.use = ranks_module.use = lambda kind: used
    ranks = ranks_module.join_ranks(rank, task["tensor"], task["stages"], store.set, store.get, "cpu", "127.0.0.1")
    options = {
        "model": task["model"],
        "max_model_len": 128,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,  # few graphs
        "exact": False,  # the check at the start makes hundreds of exchanges
        "device": "cpu",
        "block_size": 16,
        "cpu_threads": 1,
        "dtype": "float32",
        "tensor_parallel_size": task["tensor"],
        "pipeline_parallel_size": task["stages"],
    }
    runner, facts = load_runner(Config.make(**(options | task["options"])), ranks)
    waits, ahead = fake.waits, task["options"].get("depth") == 2
    driver = (LateDriver if ahead else Driver)(runner, facts, max_num_seqs=2, seed=1)
    outputs = [job.output for job in driver.run(jobs(), chunk=16)]
    backend = runner.backend
    return {
        "outputs": outputs,
        "recorded": isinstance(backend, CudaBackend) and backend.decode_graphs is not None,
        "replayed": fake.replayed,
        "waits": fake.waits - waits,
        "steps": driver.steps,
    }


def yield_while_waiting() -> None:
    """Let a program of the interpreter that looks at flags give its core to the others."""
    builder: Any = interpreter.InterpreterBuilder
    look = builder.create_atomic_rmw

    def look_and_yield(*arguments: Any) -> Any:
        time.sleep(1e-4)
        return look(*arguments)

    builder.create_atomic_rmw = look_and_yield


def main() -> None:
    mend_interpreter(pytest.MonkeyPatch())
    yield_while_waiting()
    CudaBackend.warm_ups = CudaBackend.warm_ups[:1]  # the others only compile kernels
    port, rank, task = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    tcp: Any = distributed
    store = tcp.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=5))
    if task["what"] == "exchanges":
        memory = PeerMemory(torch.device("cpu"), rank, store.set, store.get)
        result = exchanges(memory, rank, task["size"])
        store.set(f"done/{rank}", "")
        for other in range(task["size"]):
            store.get(f"done/{other}")
        memory.close()
    else:
        result = steps(rank, store, task)
    print(json.dumps(result), flush=True)
    for path in Path("/dev/shm").glob(f"fake-cuda-{os.getpid()}-*"):
        path.unlink()
    os._exit(0)


if __name__ == "__main__":
    main()
