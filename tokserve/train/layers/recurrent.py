"""Layers with recurrent states with a gradient.

The forward pass is the server's op, which takes the nodes of a tree level by level: a node goes on from a
copy of its parent's state.  The backward pass replays node after node with torch's differentiable functions, the last
one first, and hands the gradient of a node's first state on to its parent.  One node is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve.families.recurrent.layers import Recurrent
from tokserve.layers.batch import StateRows
from tokserve.ops.serial import one_thread
from tokserve.train.batch import PackedBatch
from tokserve.train.layers.functions import applied
from tokserve.train.tree import Node


def recurrence(
    projected: Sequence[Tensor], layer: Recurrent, batch: PackedBatch, vectors: Mapping[str, Tensor]
) -> Tensor:  # [T, ...] -> [T, W]
    """The inputs of the layer's output projection from the outputs of its others.  `vectors`: the masters of its other
    parameters by name."""
    return applied(_Recurrence, layer, batch, len(projected), tuple(vectors), *projected, *vectors.values())


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Recurrent, batch: PackedBatch, count: int, names: tuple[str, ...], *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.layer, ctx.batch, ctx.count, ctx.names = layer, batch, count, names
        return _mixed(layer, batch, tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        projected, masters = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        needs = ctx.needs_input_grad[4 + ctx.count :]
        vectors = {
            name: master.detach().float().requires_grad_(needed)
            for name, master, needed in zip(ctx.names, masters, needs, strict=True)
        }
        # on one thread, so that the bits of a sequence's gradients do not depend on the number of threads
        with one_thread(), _in_float32(grad.device):
            replay = _Replay(ctx.layer, ctx.batch.nodes, projected, vectors)
            replay.run(grad)
        return None, None, None, None, *replay.of_projected(), *(replay.of_vectors.get(name) for name in ctx.names)


@contextmanager
def _in_float32(device: torch.device) -> Iterator[None]:
    """Torch's products of float32 are computed as such, whatever the process allows them (TF32, bfloat16), and
    whether the backward pass runs in autocast."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _mixed(layer: Recurrent, batch: PackedBatch, projected: Sequence[Tensor]) -> Tensor:
    device = projected[0].device
    shapes = layer.kv_spec().state_shapes(0)
    kept = [
        torch.zeros(len(batch.nodes), *shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in shapes
    ]
    saves = torch.zeros(0, 3, dtype=torch.int32, device=device)
    out = projected[0].new_empty(len(projected[0]), layer.out.inputs)
    for rows in batch.levels:
        if rows.parents is not None:
            for tensor in kept:
                tensor.index_copy_(0, rows.nodes, tensor.index_select(0, rows.parents))
        parts = [part.index_select(0, rows.tokens) for part in projected]
        states = StateRows(rows.nodes, rows.start, rows.seq_lens, saves)
        out.index_copy_(0, rows.tokens, layer.mix(parts, kept, rows.query_start, rows.seq_lens, states))
    return out


class _Replay:
    """The backward pass of a batch.  `vectors`: leaves, those that need a gradient as such."""

    def __init__(
        self, layer: Recurrent, nodes: Sequence[Node], projected: Sequence[Tensor], vectors: Mapping[str, Tensor]
    ) -> None:
        self.layer, self.nodes, self.projected, self.vectors = layer, nodes, projected, vectors
        # gradients of the vectors, float32: a sum over nodes, the last one first
        self.of_vectors = {name: torch.zeros_like(leaf) for name, leaf in vectors.items() if leaf.requires_grad}
        self._sums = [torch.zeros(part.shape, device=part.device) for part in projected]  # of gradients, float32
        self._memories: dict[int, Tensor] = {}  # after the nodes that others go on from
        self._of_memories: dict[int, Tensor] = {}  # gradients of these

    def of_projected(self) -> list[Tensor]:
        """The gradients of what is projected, in its dtype."""
        return [total.to(part.dtype) for total, part in zip(self._sums, self.projected, strict=True)]

    def run(self, grad: Tensor) -> None:  # [T, W]
        """Replay all nodes."""
        if self.layer.kv_spec().memory:
            for number in sorted({node.parent for node in self.nodes if node.parent >= 0}):
                self._advance(number)
        for number in reversed(range(len(self.nodes))):
            node = self.nodes[number]
            self._node(number, node, grad[node.token : node.token + node.end - node.start].float())

    def _advance(self, number: int) -> None:
        node = self.nodes[number]
        index, earlier = self._window(node)
        inputs = [part.index_select(0, index).float() for part in self.projected]
        with torch.no_grad():
            _, memory = self.layer.replay(inputs, earlier, self._memories.get(node.parent), self.vectors)
        assert memory is not None
        self._memories[number] = memory

    def _node(self, number: int, node: Node, grad: Tensor) -> None:
        index, earlier = self._window(node)
        inputs = [part.index_select(0, index).float().requires_grad_() for part in self.projected]
        memory = self._memories.get(node.parent)
        memory = None if memory is None else memory.requires_grad_()
        with torch.enable_grad():
            out, after = self.layer.replay(inputs, earlier, memory, self.vectors)
        outputs, upstream = [out], [grad]
        if after is not None and number in self._of_memories:
            outputs.append(after)
            upstream.append(self._of_memories.pop(number))
        leaves = [*inputs, *(self.vectors[name] for name in self.of_vectors)]
        leaves += [] if memory is None else [memory]
        grads = torch.autograd.grad(outputs, leaves, upstream)
        for total, part in zip(self._sums, grads, strict=False):
            total.index_add_(0, index, part)
        for total, part in zip(self.of_vectors.values(), grads[len(inputs) :], strict=False):
            total += part
        if memory is not None:
            before = self._of_memories.get(node.parent)
            self._of_memories[node.parent] = grads[-1] if before is None else before + grads[-1]

    def _window(self, node: Node) -> tuple[Tensor, int]:
        """Where the node's tokens are in the batch after those that their convolution reads, and how many these are."""
        earlier = min(node.start, self.layer.kv_spec().taps - 1)
        path = torch.from_numpy(node.path[node.start - earlier : node.end])
        return path.to(self.projected[0].device), earlier
