"""CPU numbers in the format that Linux uses for lists of them, and the memory nodes that CPUs belong to."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tokserve.base.errors import StartError

NODES = Path("/sys/devices/system/node")


def cpu_list(text: str) -> list[int]:
    """CPU numbers in Linux's list format, as `0-3,8`, in their order.  Raises StartError naming cpu_bind."""
    cpus: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise StartError(f"option cpu_bind: expected auto, none or CPUs such as 0-15,32-47, got {text!r}")
        cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    return cpus


def cpus_by_node() -> list[list[int]]:
    """The CPUs that this process may use, by memory node; nodes that have none are left out."""
    allowed = os.sched_getaffinity(0)
    lists = [path.read_text(encoding="utf-8").strip() for path in sorted(NODES.glob("node[0-9]*/cpulist"), key=_number)]
    nodes = [[cpu for cpu in cpu_list(text) if cpu in allowed] for text in lists if text]
    return [node for node in nodes if node]


def _number(path: Path) -> int:
    return int(path.parent.name.removeprefix("node"))
