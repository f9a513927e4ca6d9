"""Rows of several tensors beside each other, made of ops alone, so that a captured step can make them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokserve import ops
from tokserve.runner.cpu_graphs import MAX_TOKENS


class JoinedRows:
    """`parts`: how many tensors are joined."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        places = torch.arange(MAX_TOKENS * parts, device=ops.torch_device).view(MAX_TOKENS, parts).t().contiguous()
        self._places = [[row[:count] for row in places] for count in range(MAX_TOKENS + 1)]

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:  # [T, H] each -> [T, parts * H]
        joined = self.empty(tensors[0])
        for part, tensor in enumerate(tensors):
            self.put(joined, part, tensor)
        return joined

    def empty(self, tensor: Tensor) -> Tensor:
        """[T, parts * H] for tensors like this one, for `put`."""
        return tensor.new_empty(tensor.shape[0], self._parts * tensor.shape[1])

    def put(self, joined: Tensor, part: int, tensor: Tensor) -> None:
        """Write one of the parts."""
        tokens, width = tensor.shape
        if tokens > MAX_TOKENS:
            joined[:, part * width : (part + 1) * width] = tensor
        else:
            ops.store_rows(tensor, joined.view(1, tokens * self._parts, width), self._places[tokens][part])
