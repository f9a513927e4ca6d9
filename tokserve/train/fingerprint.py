"""A number that changes when the values of a tensor do."""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.rl.sums import COLUMN_FACTORS, COLUMNS

FACTORS = torch.from_numpy(COLUMN_FACTORS.view("int64"))  # [COLUMNS], odd


def fingerprint(tensor: Tensor) -> int:
    """The wrapped sum of a tensor's memory in words, each times a factor of its column, and its dtype and size.

    One pass at the speed of memory.  Without factors, changes up and down cancel: an optimizer's first steps change all
    weights of a norm by the same amount.  torch's version counter misses what is written through `.data`, as weight
    averaging and merged adapters are.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    words = flat[:whole].view(torch.int64)
    rows = len(words) // COLUMNS * COLUMNS
    columns = words[:rows].view(-1, COLUMNS).sum(0)
    columns[: len(words) - rows] += words[rows:]
    total = int((columns * FACTORS.to(columns.device)).sum())
    return hash((tensor.dtype, len(flat), total, *flat[whole:].tolist()))
