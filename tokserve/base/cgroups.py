"""Limits of the control groups around this process, of both versions: of a container, a pod or a systemd unit.

A group's files are where the host mounts them; inside a container its own group is the root.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # version 1 writes about 2^63 for no limit


class MemoryLimit(NamedTuple):
    """Bytes that a group's processes may take, and those that they can still take."""

    limit: int
    free: int


def memory_limits() -> list[MemoryLimit]:
    """The limits of each group that has one."""
    limits = []
    for version, group in _groups("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        maximum, use = (_read(group / name) for name in names)
        if maximum.isdecimal() and int(maximum) < NO_LIMIT and use.isdecimal():
            free = int(maximum) - int(use) + _reclaimable(group / "memory.stat")
            limits.append(MemoryLimit(int(maximum), free))
    return limits


def cpu_quota() -> float | None:
    """Processors' time per time that the tightest group allows, such as 2.5; None: no group has a quota."""
    quotas = []
    for version, group in _groups("cpu"):
        if version == 1:
            words = [_read(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        else:
            words = _read(group / "cpu.max").split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def usable_cpus() -> int:
    """How many threads can run at once: the CPUs that this process may use, or fewer by a quota, whose rest would leave
    all threads waiting for one that is throttled."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))


def out_of_memory_kills() -> int | None:
    """Processes of this process's groups that were killed for lack of memory; None: no group says."""
    counts = []
    for version, group in _groups("memory"):
        events = _pairs(group / ("memory.oom_control" if version == 1 else "memory.events"))
        if events.get("oom_kill", "").isdecimal():
            counts.append(int(events["oom_kill"]))
    return max(counts, default=None)


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """The version and folder of each group around this process with this controller, the innermost first."""
    for line in _read(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, root = 2, ROOT
        elif controller in controllers.split(","):
            version, root = 1, ROOT / controller
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(root):
                yield version, directory


def _read(file: Path) -> str:
    """A file's text; empty if it is not there, or not for this process."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _pairs(file: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in _read(file).splitlines() if " " in line)


def _reclaimable(statistics: Path) -> int:
    """Bytes of file cache that count as used but are given up on demand."""
    pairs = _pairs(statistics)
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", "0")))
