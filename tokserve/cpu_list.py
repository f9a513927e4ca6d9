"""CPU numbers in the format that Linux uses for lists of them."""

from __future__ import annotations

import re

from tokserve.errors import StartError


def cpu_list(text: str) -> list[int]:
    """CPU numbers in Linux's list format, as `0-3,8`, in their order.  Raises StartError naming cpu_bind."""
    cpus: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise StartError(f"option cpu_bind: expected auto, none or CPUs such as 0-15,32-47, got {text!r}")
        cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    return cpus
