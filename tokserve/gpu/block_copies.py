"""KV blocks of a device's memory, to the host's and back: gathered on the device, then copied beside the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.protocol.kv_spec import KVSpec
from tokserve.runner.backend import Backend
from tokserve.runner.device import Accelerator

STAGED_BYTES = 64 << 20  # of blocks that are gathered at once
Bytes = NDArray[np.uint8]


class DeviceBlocks:
    """Blocks by number, each the bytes of its pages, one tensor of the KV cache after the other; `memory`: where most
    copies on the host lie, which is made fast to copy to.  One thread at a time calls.

    Copies follow the steps begun so far, and are done when the call returns; steps do not wait for them.
    """

    def __init__(self, backend: Backend, device: Accelerator, memory: Bytes) -> None:
        layout = backend.layout
        sizes = [spec.block_bytes(layout.block_size) for spec in layout.specs if isinstance(spec, KVSpec)]
        self._backend, self._device = backend, device
        self._at_once = max(1, STAGED_BYTES // sum(sizes))
        self._staged = torch.empty(self._at_once, sum(sizes), dtype=torch.uint8, device=device.torch_device)
        device.pin(memory)

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        """Copy each block into its array."""
        with self._device.beside():
            for index, staged, hosts in self._parts(blocks, contents):
                for pages, place in self._tensors():
                    staged[:, place] = pages.index_select(0, index)
                for row, host in zip(staged, hosts, strict=True):
                    host.copy_(row)

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        """Copy each array into its block."""
        with self._device.beside():
            for index, staged, hosts in self._parts(blocks, contents):
                for row, host in zip(staged, hosts, strict=True):
                    row.copy_(host)
                for pages, place in self._tensors():
                    pages.index_copy_(0, index, staged[:, place])
        self._device.wait()

    def _parts(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Numbers of blocks on the device, room for as many there, and their arrays, a part after the other."""
        for first in range(0, len(blocks), self._at_once):
            part = slice(first, first + self._at_once)
            index = torch.tensor(blocks[part], dtype=torch.int64, device=self._device.torch_device)
            yield index, self._staged[: len(index)], [torch.from_numpy(content) for content in contents[part]]

    def _tensors(self) -> Iterator[tuple[Tensor, slice]]:
        """Every tensor of the KV cache as bytes [blocks, n], and where its blocks lie in a content."""
        start = 0
        for caches in self._backend.kv:
            for cache in caches:
                pages: Any = cache.view(cache.shape[0], -1).view(torch.uint8)
                end = start + pages.shape[1]
                yield pages, slice(start, end)
                start = end
