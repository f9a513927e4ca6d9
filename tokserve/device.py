"""The device under the ops: its name, its threads, its free memory.  The CPU is the only one so far.

Nothing else may ask the machine what it is.  This file must not know what runs on the device.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
CPUS = Path("/proc/cpuinfo")
NO_LIMIT = 1 << 60  # what version 1 writes for "none" is about 2^63


def name() -> str:
    """What the maker calls the processor."""
    lines = CPUS.read_text(encoding="utf-8").splitlines() if CPUS.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def set_threads(count: int | None) -> int:
    """Let torch compute with `count` threads, by default one per core this process may use; returns the number."""
    threads = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def give_back_memory() -> None:
    """Hand what the C allocator holds but nobody uses back to the system, where the allocator can (glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def free_memory() -> int:
    """Bytes this process can still take: what the machine has available, within the container's limit."""
    return max(0, min([psutil.virtual_memory().available, *_room_in_cgroups()]))


def _room_in_cgroups() -> list[int]:
    """Limit minus use, in bytes, of each control group around this process that has a limit."""
    if not OWN_CGROUP.is_file():
        return []
    rooms = []
    for line in OWN_CGROUP.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, use = CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, use = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(root):
                rooms += _room(directory, limit, use)
    return rooms


def _room(directory: Path, limit: str, use: str) -> list[int]:
    if not ((directory / limit).is_file() and (directory / use).is_file()):
        return []
    most = (directory / limit).read_text(encoding="utf-8").strip()
    if most == "max" or int(most) >= NO_LIMIT:
        return []
    return [int(most) - int((directory / use).read_text(encoding="utf-8")) + _reclaimable(directory / "memory.stat")]


def _reclaimable(statistics: Path) -> int:
    """Bytes of file cache that count as used but are given up on demand."""
    if not statistics.is_file():
        return 0
    pairs = dict(line.split(" ", 1) for line in statistics.read_text(encoding="utf-8").splitlines() if " " in line)
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", "0")))
