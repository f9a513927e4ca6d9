"""An executor whose runners live in processes of their own, one for each rank of the model (docs/scale.md).

Every rank is sent every plan and every call, in the same order; the first rank of the last stage answers for all.  What
starts the processes is `spawn`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from tokserve import __version__
from tokserve.base.errors import StartError
from tokserve.base.processes import see_log
from tokserve.base.rooms import part
from tokserve.config import Config
from tokserve.config.engine_config import rank_config
from tokserve.config.parallel import sampling_rank
from tokserve.features.ranks import merge
from tokserve.features.ranks.channel import Begin, Channel, End, Forward, Interrupt, Loaded, SampleStep
from tokserve.features.ranks.hub import Hub
from tokserve.features.ranks.listeners import Listener
from tokserve.features.ranks.spawn import LocalSpawn, RankProcess, Spawn
from tokserve.features.ranks.worker import RankOpening
from tokserve.protocol.plan import DeviceFacts, GrammarBitmask, Int32, StepPlan, StepResult

logger = logging.getLogger(__name__)

EQUAL = ("ops", "arithmetic")  # facts that ranks must have in common: kernels of one arithmetic compute the same bits
CONNECT = 120.0  # seconds within which a rank of this machine connects
TURN = 1.0  # seconds between two looks at processes that have not connected


class WorkersExecutor:
    """Executor protocol, see `base`.  An exception of a rank's runner ends the engine, as one of its own would."""

    def __init__(self, config: Config, spawn: Spawn) -> None:
        self._config = config
        self._spawn = spawn
        self._processes: dict[int, RankProcess] = {}
        self._hub: Hub | None = None
        self._ended = False
        self._drafts: Int32 = np.zeros(0, np.int32)
        self._block_bytes: list[int] = []  # of each rank's part of a KV block, with a KV store
        self._wake: Callable[[], object] = lambda: None

    # --- start ---

    def start(self) -> DeviceFacts:
        """Start the ranks, but those of other machines that are started there; wait for all, and let them load the
        model."""
        parallel = self._config.parallel
        listener = self._spawn.listen()
        try:
            ranks = range(parallel.ranks_here)
            self._processes = dict(zip(ranks, self._started(listener, ranks), strict=True))
            channels = self._joined(listener)
        except StartError:
            self.close()
            raise
        finally:
            listener.close()
        self._hub = Hub(channels, self._describe_end)
        self._hub.watch(self._wake)
        for rank, process in self._processes.items():
            process.watch(channels[rank].close)
        for rank, channel in channels.items():
            begin = Begin(
                rank_config(self._config, rank),
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                self._address_of(rank, channel),
            )
            self._hub.send(begin, [rank])
        try:
            loaded = [self._hub.loaded[rank].result() for rank in sorted(channels)]
            return self._facts(loaded)
        except (StartError, RuntimeError):
            self.close()
            raise

    def _address_of(self, rank: int, channel: Channel) -> str:
        process = self._processes.get(rank)
        if process is not None and process.address is not None:
            return process.address
        return channel.remote_address if self._config.parallel.nnodes > 1 else "127.0.0.1"

    def _started(self, listener: Listener, ranks: Sequence[int]) -> list[RankProcess]:
        logs, openings = self._config.logs, list[RankOpening]()
        for rank in ranks:
            address, key, keys = listener.invite(rank)
            openings.append(
                RankOpening(rank, address, os.getpid(), "engine", logs.log_level, logs.log_format, key, keys=keys)
            )
        try:
            return self._spawn.start(openings)
        except OSError as error:
            raise StartError(f"the processes of ranks could not be started: {error.strerror or error}") from error

    def _joined(self, listener: Listener) -> dict[int, Channel]:
        """The connections of all ranks.  Raises StartError."""
        parallel, channels = self._config.parallel, dict[int, Channel]()
        patience = CONNECT if parallel.nnodes == 1 else self._config.runtime.start_timeout
        end = time.monotonic() + patience
        while len(channels) < parallel.num_ranks:
            if (came := listener.accept(TURN)) is not None:
                channel, joined = came
                if joined.version != __version__:
                    raise StartError(f"rank {joined.rank} runs tokserve {joined.version}, and the engine {__version__}")
                if joined.rank in channels or not 0 <= joined.rank < parallel.num_ranks:
                    logger.warning("a rank %d was turned away: there is no room for it", joined.rank)
                    channel.close()
                    continue
                channels[joined.rank] = channel
                continue
            for rank, process in self._processes.items():
                if rank not in channels and not (how := process.describe_end(0.0)).startswith("has"):
                    raise StartError(see_log(f"rank {rank} {how} before it joined"))
            if time.monotonic() > end:
                missing = ", ".join(str(rank) for rank in range(parallel.num_ranks) if rank not in channels)
                raise StartError(f"ranks {missing} did not join within {patience:g} s")
        return channels

    def _facts(self, loaded: Sequence[Loaded]) -> DeviceFacts:
        """What the sampling rank says, with the memory of all."""
        parallel = self._config.parallel
        samples = sampling_rank(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        first = loaded[samples]
        for rank, other in enumerate(loaded):
            for name in EQUAL:
                if other.facts.get(name) != first.facts.get(name):
                    other_value, first_value = other.facts.get(name), first.facts.get(name)
                    raise StartError(f"rank {rank} has {name} {other_value}, and rank {samples} {first_value}")
        facts = dict(first.facts)
        for name in {name for one in loaded for name in one.facts if name.endswith("_bytes")} - {"routed_bytes"}:
            facts[name] = sum(one.facts.get(name, 0) for one in loaded)
        self._block_bytes = [one.facts.get("kv_block_bytes", 0) for one in loaded]
        if "kv_store_slots" in facts:
            facts["kv_store_slots"] = min(one.facts["kv_store_slots"] for one in loaded)
        facts["threads"] = sum(one.facts["threads"] for one in loaded)
        facts["tensor_parallel_size"] = parallel.tensor_parallel_size
        facts["pipeline_parallel_size"] = parallel.pipeline_parallel_size
        return msgspec.structs.replace(first.device_facts(), facts=facts)

    def _describe_end(self, rank: int) -> str:
        process = self._processes.get(rank)
        return "has closed its connection" if process is None else process.describe_end(TURN)

    # --- steps ---

    def forward(self, plan: StepPlan) -> None:
        self._drafts = plan.draft_token_ids
        self._connected().send(Forward(plan))

    def sample(self, bitmask: GrammarBitmask | None) -> Future[StepResult]:
        """Let the sampling rank sample; the others need to know only which rows are withheld."""
        hub = self._connected()
        future = hub.result()
        hub.send(SampleStep(bitmask))
        return future

    def drafts(self) -> Int32:
        """The drafts of the plan: ranks draw none."""
        return self._drafts

    # --- calls ---

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """Call on all ranks, after the steps begun so far, and wait."""
        return self._connected().invoke(method, [args] * self._config.parallel.num_ranks).result()

    def background(self, method: str, args: dict[str, Any]) -> Future[Any]:
        """Call on all ranks beside the steps."""
        args_by_rank = merge.args_of(method, args, self._config.parallel.num_ranks)
        return self._connected().invoke(method, args_by_rank, background=True)

    def copy(self, lane: str, method: str, args: dict[str, Any]) -> Future[Any]:
        """Call on all ranks: each copies its part of the blocks."""
        return self._connected().invoke(method, merge.copy_args(method, args, self._block_bytes), lane=lane)

    def interrupt(self) -> None:
        """Make what the ranks wait for fail."""
        self._connected().send(Interrupt())

    def watch(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        if self._hub is not None:
            self._hub.watch(wake)

    def check(self) -> None:
        """Raise DeviceLost when a rank is lost."""
        if self._hub is not None:
            self._hub.check()

    def close(self) -> None:
        """Let all ranks leave, and end those that do not."""
        if self._hub is not None:
            self._hub.closing = True
            self._hub.send(End())
        for process in self._processes.values():
            process.end()
        if self._hub is not None:
            self._hub.close()
        self._processes = {}
        self._hub = None

    def _connected(self) -> Hub:
        if self._hub is None:
            raise RuntimeError("the executor was not started, or is closed")
        self._hub.check()
        return self._hub


def make_executor(config: Config) -> WorkersExecutor:
    """The executor of several ranks: processes of this machine, and of others that have joined, or actors of Ray."""
    spawn = part("ray", "spawn") if config.parallel.distributed_executor_backend == "ray" else LocalSpawn
    return WorkersExecutor(config, spawn(config))
