"""Options of several engines, and of the ranks of one."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tokserve.config.common import about


def sampling_rank(tensor: int, stages: int) -> int:
    """The rank that samples, the first of the last stage, where each of `stages` has `tensor` ranks."""
    return (stages - 1) * tensor


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many engines serve the model, and on what (docs/scale.md)."""

    data_parallel_size: Annotated[
        int,
        about(
            "Engines that each hold the whole model, behind one address: a request is served by the engine that has "
            "its prefix cached or has the least to do. No result depends on which.",
            ge=1,
            le=64,
        ),
    ] = 1
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        about(
            "Where engines run: mp, as processes on this machine; ray, on nodes of a Ray cluster, whose address is "
            "in RAY_ADDRESS or which has a node here. Needs tokserve[ray], and on CPUs --cpu-threads, which Ray "
            "reserves for each engine."
        ),
    ] = "mp"
    tensor_parallel_size: Annotated[
        int,
        about(
            "Number of processes (ranks) among which each layer of the model is divided. Another number gives other "
            "bits; for one number they are always the same.",
            ge=1,
            le=64,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        about(
            "Stages that divide the layers of the model among them, with tensor_parallel_size ranks each.", ge=1, le=64
        ),
    ] = 1
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"] | None,
        about(
            "What starts the processes of an engine's ranks. mp: the engine itself, and on other nodes the command "
            "with --headless. ray: actors on the nodes of a Ray cluster, as for data_parallel_backend. Default: mp."
        ),
    ] = None
    nnodes: Annotated[int, about("Machines that an engine's ranks are on, with equally many each.", ge=1, le=64)] = 1
    node_rank: Annotated[
        int, about("The number of this machine; 0 serves, the others only compute (headless).", ge=0, le=63)
    ] = 0
    master_addr: Annotated[str, about("Address of the machine with node_rank 0, under which the others reach it.")] = (
        "127.0.0.1"
    )
    master_port: Annotated[
        int, about("Port there at which the engine awaits the ranks of other machines.", ge=1, le=65535)
    ] = 29501
    master_key_file: Annotated[
        str | None,
        about(
            "A file with a secret that is the same on all machines: ranks of other machines prove that they know it. "
            "Needed unless master_addr is a loopback address."
        ),
    ] = None
    headless: Annotated[bool, about("Serve no HTTP: hold ranks of the engine of node_rank 0.")] = False

    @property
    def on_ray(self) -> str | None:
        """The option that places engines or ranks on a Ray cluster; None: they run here."""
        backends = {
            "data_parallel_backend": self.data_parallel_backend,
            "distributed_executor_backend": self.distributed_executor_backend,
        }
        return next((option for option, backend in backends.items() if backend == "ray"), None)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_here(self) -> int:
        """The number of ranks of one engine that run on this machine."""
        return self.num_ranks // self.nnodes
