"""Ranks on the nodes of a Ray cluster: Ray finds a place for each, and an actor there starts the rank's process, as an
engine starts one on its own machine, and watches it.

What engine and ranks say to each other does not pass through Ray but through tunnels (`tunnel`), whose keys Ray takes
to the nodes.  The engine is a driver of the cluster: when it goes, however it goes, Ray ends the actors, and the kernel
ends the ranks with them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tokserve.base.curve import make_keys
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.config.engine_config import rank_config, reserved_for_rank
from tokserve.features.ranks.listeners import Invitation, Listener, StreamListener
from tokserve.features.ranks.spawn import PATIENCE, LocalProcess, RankProcess
from tokserve.features.ranks.tunnel import Tunnel
from tokserve.features.ranks.worker import RankOpening
from tokserve.ray.cluster import connect, first_line

logger = logging.getLogger(__name__)

REMIND = 10.0  # seconds without a place before the log says what is waited for
SHARE = 0.6  # of `start_timeout`, for a place; the rest is for the load, and for an error to be told
ALIVE = 60.0  # seconds for an actor to begin


class RankActor:
    """The process of a rank on a node, and its end."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    async def start(self, packed: bytes) -> tuple[str, str | None]:
        """Start what an encoded `RankOpening` says; the address of this node, and an error in words."""
        node = ray.util.get_node_ip_address()
        try:
            opening = msgspec.json.decode(packed, type=RankOpening)
            self._process = LocalProcess(msgspec.structs.replace(opening, parent=os.getpid()))
        except msgspec.ValidationError:
            return node, "its version of tokserve is another one"
        except OSError as error:
            return node, f"its process could not be started: {error.strerror or error}"
        return node, None

    async def ended(self) -> str:
        """How it has ended, in words, when it has."""
        assert self._process is not None
        while self._process.poll() is None:
            await asyncio.sleep(0.05)
        return self._process.describe_end(0.0)


class RayRank:
    """RankProcess protocol: a rank that an actor has started on the node with this address."""

    def __init__(self, actor: Any, address: str) -> None:
        self.address = address
        self._actor = actor
        self._how = ""
        self._has_ended = threading.Event()
        self._watchers: list[Callable[[], object]] = []
        threading.Thread(target=self._wait, name="ray", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._how = f"{ray.get(self._actor.ended.remote())} on node {self.address}"
        except RayError as error:
            logger.info("Ray says of the actor on node %s: %s", self.address, first_line(error))
            self._how = f"is gone with its Ray actor on node {self.address}"
        self._has_ended.set()
        for ended in self._watchers:
            ended()

    def describe_end(self, patience: float) -> str:
        return self._how if self._has_ended.wait(patience) else "has closed its connection"

    def watch(self, ended: Callable[[], object]) -> None:
        self._watchers.append(ended)
        if self._has_ended.is_set():
            ended()

    def end(self) -> None:
        self._has_ended.wait(PATIENCE)
        with suppress(RayError):
            ray.kill(self._actor)


class TunnelListener(StreamListener):
    """Listener protocol: a tunnel for each rank, with keys of its own, at an address of this machine."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host

    def invite(self, rank: int) -> Invitation:
        engine_keys, client_keys = make_keys()
        try:
            tunnel = Tunnel(self._host, engine_keys)
        except OSError as error:
            raise StartError(f"the engine cannot listen for rank {rank}: {error.strerror}") from None
        self.expect(rank, tunnel.stream)
        return Invitation(tunnel.address, keys=client_keys)


class RaySpawn:
    """Spawn protocol: an actor for each rank, in a placement group over the nodes of the cluster."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def listen(self) -> Listener:
        """Spawn protocol; joins the cluster."""
        before = signal.getsignal(signal.SIGTERM)
        connect(show_logs=self._config.logs.log_format == "text")
        signal.signal(signal.SIGTERM, before)  # Ray has one of its own
        return TunnelListener(ray.util.get_node_ip_address())

    def start(self, openings: Sequence[RankOpening]) -> list[RankProcess]:
        """Spawn protocol.  Ranks with neighbouring numbers are on the same node where there is room."""
        resources = reserved_for_rank(self._config)
        try:
            group = placement_group([resources for _ in openings], strategy="PACK")
            self._wait_for_place(group, resources)
            node_of = placement_group_table(group)["bundles_to_node_id"]
            bundles = sorted(node_of, key=lambda index: (node_of[index], index))
            actors = [self._actor(group, index, resources) for index in bundles]
            answers = ray.get(
                [
                    actor.start.remote(msgspec.json.encode(self._remote_opening(opening)))
                    for actor, opening in zip(actors, openings, strict=True)
                ],
                timeout=ALIVE,
            )
        except RayError as error:
            raise StartError(f"ranks cannot run in the Ray cluster: {first_line(error)}") from None
        for opening, (node, problem) in zip(openings, answers, strict=True):
            if problem is not None:
                raise StartError(f"rank {opening.rank} failed to start on node {node}: {problem}")
            logger.info("rank %d runs on node %s", opening.rank, node)
        return [RayRank(actor, node) for actor, (node, _) in zip(actors, answers, strict=True)]

    def _wait_for_place(self, group: Any, resources: Mapping[str, float]) -> None:
        """Wait for most of `start_timeout`, as a cluster may grow.  Raises StartError."""
        count, end = self._config.parallel.num_ranks, time.monotonic() + SHARE * self._config.runtime.start_timeout
        while not group.wait(max(0.1, min(REMIND, end - time.monotonic()))):
            if time.monotonic() > end:
                raise StartError(f"the Ray cluster has had no place for {count} ranks with {dict(resources)} each")
            logger.warning("waiting for nodes of the Ray cluster: %d ranks with %s each", count, dict(resources))

    def _actor(self, group: Any, bundle: int, resources: Mapping[str, float]) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
        return ray.remote(RankActor).options(scheduling_strategy=place, max_restarts=0, **options).remote()

    def _remote_opening(self, opening: RankOpening) -> RankOpening:
        """The opening for another machine, where the checkpoint is at the same path."""
        runtime, model = rank_config(self._config, opening.rank).runtime, self._config.model
        return msgspec.structs.replace(
            opening, model=model.model, tokenizer=model.tokenizer, cpu_threads=runtime.cpu_threads, cpu_bind="none"
        )
