"""A packing as tensors: what attention reads, the blocks it writes to, and its gradient over the tree's nodes.

Blocks hold the keys and values of one layer at a time, since all tokens of a batch go through a layer together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.attention import Attention
from tokserve.train.tree import Node, Packing


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """Nodes of a tree that are equally far from its roots, as rows of a batch of their own."""

    nodes: Tensor  # [r] int64
    parents: Tensor | None  # [r] int64; None: the nodes are roots
    tokens: Tensor  # [t] int64: where in the batch the rows' tokens are, row after row
    query_start: Tensor  # [r + 1] int32
    start: Tensor  # [r] int32: the position of each row's first token
    seq_lens: Tensor  # [r] int32

    @staticmethod
    def of(nodes: Sequence[Node], numbers: Sequence[int], like: Tensor) -> TreeLevel:
        """The level of the nodes with these numbers, on the device of `like`."""
        chosen = [nodes[number] for number in numbers]
        counts = [node.end - node.start for node in chosen]
        tokens = [np.arange(node.token, node.token + count) for node, count in zip(chosen, counts, strict=True)]
        parents = [node.parent for node in chosen]

        def tensor(values: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=like.device)

        return TreeLevel(
            tensor(numbers, torch.int64),
            None if parents[0] < 0 else tensor(parents, torch.int64),
            torch.from_numpy(np.concatenate(tokens)).to(like.device),
            tensor([0, *accumulate(counts)], torch.int32),
            tensor([node.start for node in chosen], torch.int32),
            tensor([node.end for node in chosen], torch.int32),
        )


class PackedBatch:
    """T tokens of R nodes of a tree."""

    def __init__(self, packing: Packing, device: torch.device) -> None:
        self.nodes = packing.nodes
        self.input_ids = torch.from_numpy(packing.input_ids).to(device)  # [T]
        self.positions = torch.from_numpy(packing.positions).to(device)  # [T]
        starts = [node.token for node in packing.nodes] + [len(packing.input_ids)]
        self._query_start = torch.tensor(starts, dtype=torch.int32, device=device)  # [R + 1]
        paths = [node.path for node in packing.nodes]
        self._paths = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *paths])).to(device)
        self._path_start = torch.tensor([0, *accumulate(map(len, paths))], dtype=torch.int64, device=device)  # [R + 1]
        self._seq_lens = torch.tensor([node.end for node in packing.nodes], dtype=torch.int32, device=device)  # [R]
        self._tables = torch.from_numpy(packing.block_tables).to(device)  # [R, max_blocks] int32
        self._slots = torch.from_numpy(packing.slots).to(device)  # [T]
        self._copied = torch.from_numpy(packing.copied).to(device)  # [C]
        self._copied_slots = torch.from_numpy(packing.copied_slots).to(device)  # [C]
        self._num_blocks, self._block = packing.num_blocks, packing.block
        self._pages: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def attend(self, qkv: Tensor, layer: Attention, table: Tensor) -> Tensor:  # [T, (Hq + 2 Hk) D] -> [T, Hq D]
        """Do what the layer does between its projections, but for gates: norm, rotate, store, attend."""
        keys, values = self._blocks(layer)
        q = layer.store(qkv, table, self.positions, keys, values, self._slots)
        if len(self._copied):
            again = qkv.index_select(0, self._copied)
            positions = self.positions.index_select(0, self._copied)
            layer.store(again, table, positions, keys, values, self._copied_slots)
        mixed = ops.paged_attention(
            q,
            keys,
            values,
            self._tables,
            self._query_start,
            self._seq_lens,
            layer.scale,
            layer.window,
            1.0,
            layer.softcap,
        )
        return mixed.view(len(qkv), -1)

    @cached_property
    def levels(self) -> list[TreeLevel]:
        """The nodes by the number of nodes before them on their paths."""
        depths: list[int] = []
        for node in self.nodes:
            depths.append(depths[node.parent] + 1 if node.parent >= 0 else 0)
        return [
            TreeLevel.of(self.nodes, [number for number, other in enumerate(depths) if other == depth], self.positions)
            for depth in range(max(depths, default=-1) + 1)
        ]

    def attention_gradients(
        self, grad: Tensor, qkv: tuple[Tensor, Tensor, Tensor], layer: Attention
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients float32 of q [T, Hq, D], k and v [T, Hk, D] as attention takes them; nodes add theirs in order."""
        return ops.attention_gradients(
            grad,
            *qkv,
            self._query_start.long(),
            self._paths,
            self._path_start,
            layer.scale,
            layer.window,
            layer.softcap,
        )

    def _blocks(self, layer: Attention) -> tuple[Tensor, Tensor]:  # each [B, Hk, block, D]
        key = (layer.kv_heads, layer.dim, layer.dtype)
        if key not in self._pages:
            shape = (2, self._num_blocks, layer.kv_heads, self._block, layer.dim)
            self._pages[key] = torch.empty(shape, dtype=layer.dtype, device=self.positions.device)
        keys, values = self._pages[key].unbind()
        return keys, values
