"""The sums of whole tensors, for checksums, from those of the parts that ranks have.

Every rank takes part even if it has failed, so that no other waits for it.  Where ranks have the same part, it counts
once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tokserve.base.errors import Conflict
from tokserve.features.weights.coordinates import Parts
from tokserve.rl.sums import Sums

SIGN = 1 << 63
FAILED, NOTHING, SUMS = range(3)  # what a rank has


class GatheringGroup(Protocol):
    """All ranks."""

    def all_gather(self, part: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks, by rank, of one shape."""


class RankSums:
    """`group`: of all ranks, which nothing else uses."""

    def __init__(self, group: GatheringGroup) -> None:
        self._group = group

    def total(self, sums: Callable[[], Sums], parts: Parts) -> Sums:
        """The sums of whole tensors, as `Coordinates` describes.  Raises what `sums` raises, and Conflict if the ranks'
        parts do not form tensors."""
        names = sorted(parts)
        row = torch.zeros(1 + 3 * len(names), dtype=torch.int64)
        try:
            row = _row(sums(), names, parts)
        finally:
            rows = self._group.all_gather(row)
        return merged(names, rows, {name: math.prod(shape) for name, (_, shape) in parts.items()})


def _row(sums: Sums, names: Sequence[str], parts: Parts) -> Tensor:
    """What a rank tells the others: what it has, and for each tensor the sum, the number of a part and its size."""
    columns = [SUMS if sums else NOTHING]
    for name in names:
        part, shape = parts[name]
        size, total = math.prod(shape), sums.get(name, 0)
        if part is not None:
            size = size // shape[part.dim] * sum(span.length for span in part.spans)
        columns += [total - 2 * SIGN if total >= SIGN else total, zlib.crc32(repr(part).encode()), size]
    return torch.tensor(columns, dtype=torch.int64)


def merged(names: Sequence[str], rows: Sequence[Tensor], sizes: dict[str, int]) -> Sums:
    """The sums of tensors of these sizes, from the rows of all ranks."""
    have = {int(row[0]) for row in rows}
    if FAILED in have:
        raise RuntimeError("another rank has failed")
    if len(have) > 1:
        raise Conflict("the ranks do not find the same files: try again when all of them can read them")
    if have == {NOTHING}:
        return {}
    totals = {}
    by_tensor = torch.stack([row[1:].view(-1, 3) for row in rows], 1).tolist()
    for name, ranks in zip(names, by_tensor, strict=True):
        by_part = {(part, size): total for total, part, size in ranks if size}
        if any(by_part[part, size] != total for total, part, size in ranks if size):
            raise Conflict(
                f"{name} differs between ranks with the same part of it: push full weights", code="checksum_mismatch"
            )
        if sum(size for _, size in by_part) != sizes[name]:
            raise Conflict(
                f"{name} is one tensor of parts that several ranks have: push full weights", code="delta_unsupported"
            )
        totals[name] = sum(by_part.values()) % (2 * SIGN)
    return totals
