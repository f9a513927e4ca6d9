"""The start of a server on a GPU that is not there: all its kernels are compiled, and none runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from tokserve.base import cgroups
from tokserve.base.errors import StartError
from tokserve.base.rooms import part
from tokserve.config import Config
from tokserve.gpu.compile import targets
from tokserve.gpu.compile.meta_device import META, MetaDevice, ReadsZeros
from tokserve.gpu.kernels.launch import Gpu
from tokserve.gpu.kernels.ranks.exchange import Inboxes
from tokserve.gpu.peers import CAPACITY, PROGRAMS, PeerGroup
from tokserve.runner.ranks import ONE, Ranks
from tokserve.runner.startup import load_runner

Compiling = dict[Future[Any], str]  # what compiles a variant, and the name of its kernel


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a start needs.  `variants`: of kernels, the number; `fresh`: those that the cache did not hold before.
    `failures`: a sentence for each variant that cannot be compiled or does not fit."""

    variants: int
    fresh: int
    failures: list[str]
    directory: Path  # the cache
    seconds: float


def compile_start(config: Config, architecture: str) -> Compiled:
    """Compile what a server with this resolved configuration launches on a GPU of an architecture of `TARGETS`, into
    Triton's cache on disk.

    Takes the whole process: it compiles for this GPU and runs no kernel from here on.  Weights need not be there.
    Raises StartError as the start would.
    """
    began = time.perf_counter()
    if triton.knobs.runtime.interpret:
        raise StartError("TRITON_INTERPRET is set, with which Triton compiles nothing")
    gpu = targets.TARGETS[architecture]
    targets.use(gpu)
    directory = Path(triton.knobs.cache.dir)
    before = _binaries(directory)
    device = MetaDevice(gpu)
    with _compiling(cgroups.usable_cpus()) as compiling, ReadsZeros():
        for ranks in _ranks(config, device):
            runner, _ = load_runner(config, ranks, device)
            while runner.call("capture_next", {}):
                pass
    failures = [text for future, name in compiling.items() if (text := _failure(name, future, gpu))]
    fresh = len(_binaries(directory) - before)
    return Compiled(len(compiling), fresh, failures, directory, time.perf_counter() - began)


def _ranks(config: Config, device: MetaDevice) -> Iterator[Ranks]:
    """Each rank of an engine; none of them meets another."""
    tensor, stages = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    if tensor * stages == 1:
        yield ONE
        return
    for rank in range(tensor * stages):
        yield part("ranks", "lone")(rank, tensor, stages, device, partial(_group, rank))


def _group(rank: int, name: str, ranks: Sequence[int]) -> PeerGroup:
    """A group of this rank whose memory is nowhere."""
    addresses = torch.empty(len(ranks), dtype=torch.int64, device=META)
    return PeerGroup(Inboxes(ranks.index(rank), len(ranks), addresses, PROGRAMS, CAPACITY))


def _binaries(directory: Path) -> set[Path]:
    """The compiled kernels in Triton's cache."""
    return set(directory.glob("*/*.cubin"))


@contextmanager
def _compiling(jobs: int) -> Iterator[Compiling]:
    """Launches inside compile, with `jobs` threads, which have ended when the context does."""
    compiling: Compiling = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        handle = run(kernel, *arguments, grid=grid, warmup=True, **options)
        if (future := vars(handle).get("future")) is not None:
            compiling[future] = kernel.__name__

    with ThreadPoolExecutor(jobs) as pool:
        JITFunction.run = compile_only
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                yield compiling
        finally:
            JITFunction.run = run


def _failure(name: str, future: Future[Any], gpu: Gpu) -> str:
    """Why the variant that this future has compiled cannot run; "" if it can."""
    if (error := future.exception()) is not None:
        return f"{name}: {type(error).__name__}: {error}"
    shared = future.result().metadata.shared
    if shared > gpu.shared_memory:
        return f"{name}: needs {shared} bytes of shared memory; a program may take {gpu.shared_memory}"
    return ""
