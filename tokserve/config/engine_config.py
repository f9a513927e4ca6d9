"""What each engine of several, and each rank of an engine, gets of a resolved configuration: CPUs, memory and GPUs."""

from __future__ import annotations

import os

import msgspec

from tokserve.base import gpus
from tokserve.base.cpu_list import cpu_list, cpus_by_node
from tokserve.base.errors import StartError
from tokserve.config import Config, RuntimeConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


def replica_config(config: Config, rank: int) -> Config:
    """The resolved configuration of one of several engines: its CPUs, and its share of the host's free memory."""
    size, runtime, cache = config.parallel.data_parallel_size, config.runtime, config.cache
    replace = msgspec.structs.replace
    if runtime.device == "cpu" and cache.kv_cache_memory_bytes is None:  # all of them look at the same memory
        cache = replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization / size)
    cpus = [] if config.parallel.on_ray else _replica_cpus(runtime, size)
    if cpus:
        count = len(cpus) // size
        rank_cpus = ",".join(map(str, cpus[rank * count : (rank + 1) * count]))
        runtime = replace(runtime, cpu_bind=rank_cpus)
    kv = config.kv
    if kv.events() is not None:
        kv = replace(kv, kv_events_config=(kv.kv_events_config or {}) | {"data_parallel_rank": rank})
    if kv.kv_transfer_config is not None:
        kv = replace(kv, kv_transfer_config=kv.kv_transfer_config | {"data_parallel_rank": rank})
    return replace(config, cache=cache, runtime=runtime, kv=kv)


def rank_config(config: Config, rank: int) -> Config:
    """The engine's resolved configuration for one rank, whose machine it shares with `ranks_here` - 1 others.  Options
    that only the server needs, its keys above all, are left out."""
    replace, parallel, runtime, cache = msgspec.structs.replace, config.parallel, config.runtime, config.cache
    num_ranks = parallel.ranks_here
    if runtime.device == "cpu":
        if cache.kv_cache_memory_bytes is None:  # all ranks look at the same memory
            cache = replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization / num_ranks)
        runtime = replace(runtime, cpu_threads=max(1, (runtime.cpu_threads or num_ranks) // num_ranks))
        if runtime.cpu_bind not in ("auto", "none"):
            cpus, count = cpu_list(runtime.cpu_bind), runtime.cpu_threads or 1
            first = rank % num_ranks * count
            runtime = replace(runtime, cpu_bind=",".join(map(str, cpus[first : first + count])))
        else:
            runtime = replace(runtime, cpu_bind="none")
    server = replace(config.server, api_key=None, admin_api_key=None)
    return replace(config, runtime=runtime, cache=cache, server=server)


def _replica_cpus(runtime: RuntimeConfig, size: int) -> list[int]:
    """The CPUs to bind the threads of all engines to, one after the other; empty: they are not bound.  Without a list
    they are bound where one engine's would be: several memory nodes, and a thread for each CPU."""
    if runtime.cpu_bind not in ("auto", "none"):
        return cpu_list(runtime.cpu_bind)
    nodes = cpus_by_node()
    if runtime.cpu_bind == "none" or len(nodes) < 2:
        return []
    cpus = [cpu for node in nodes for cpu in node]
    return cpus if (runtime.cpu_threads or 0) * size == len(cpus) else []


def are_gpus_visible() -> bool:
    """Whether the environment lets this process use a GPU of the machine."""
    return os.environ.get(VISIBLE, "0").strip() not in ("", "-1")


def replica_environment(config: Config, rank: int) -> dict[str, str] | None:
    """The environment of one of several engines, in which it sees GPUs that no other has; None: that of this process.
    Raises StartError if there are fewer GPUs than engines."""
    if config.runtime.device != "cuda" or config.parallel.on_ray:
        return None
    size, devices = config.parallel.data_parallel_size, os.environ.get(VISIBLE)
    num_ranks = config.parallel.ranks_here
    if devices is None:
        visible = [str(index) for index in range(gpus.count_nvidia_gpus())]
    else:
        visible = [name for name in devices.split(",") if name]
    if len(visible) < size * num_ranks:
        number = "a GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
        raise StartError(f"option data_parallel_size: {size} engines need {number} each, and there are {len(visible)}")
    return dict(os.environ) | {VISIBLE: ",".join(visible[rank * num_ranks : (rank + 1) * num_ranks])}


def reserved_devices(runtime: RuntimeConfig) -> dict[str, int]:
    """What an engine with these options reserves on a node of a Ray cluster, by Ray's names.  Raises
    StartError."""
    if runtime.device == "cuda":
        return {"num_cpus": 1, "num_gpus": 1}
    if runtime.cpu_threads is None:
        raise StartError("option cpu_threads: Ray needs the number of CPUs of each engine (or device cuda)")
    return {"num_cpus": runtime.cpu_threads}


def reserved_for_rank(config: Config) -> dict[str, float]:
    """What a rank of an engine with this resolved configuration reserves on a node of a Ray cluster, by Ray's names."""
    if config.runtime.device == "cuda":
        return {"CPU": 1, "GPU": 1}
    return {"CPU": rank_config(config, 0).runtime.cpu_threads or 1}


def ray_address() -> str:
    """Where the Ray cluster is; auto: this machine has a node of it."""
    return os.environ.get("RAY_ADDRESS") or "auto"
