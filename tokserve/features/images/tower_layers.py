"""The parts of a vision tower: patches to rows, attention without a mask, and squares of rows to embeddings.

All of them take the rows of one image; attention sees segments of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.embedding import Table
from tokserve.layers.linear import Linear
from tokserve.layers.mlp import MLPSpec, make_mlp
from tokserve.layers.norm import NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, under

PAGE = 64  # rows of a page of keys and values


@dataclass(frozen=True, slots=True)
class MergerSpec:
    """Joins squares of `merge` by `merge` rows of `hidden` into one row of `outputs`: a norm and two projections.
    `norm_joined`: the norm is of the joined rows, not of each.  The names are of the modules in a checkpoint."""

    hidden: int
    merge: int
    outputs: int
    norm: NormSpec
    norm_name: str = "norm"
    up_name: str = "linear_fc1"
    down_name: str = "linear_fc2"
    norm_joined: bool = False


class BlockNames(NamedTuple):
    """Names of a layer's modules in a checkpoint; `qkv`: one for all of queries, keys and values, or one for each."""

    norms: tuple[str, str]
    attention: str
    qkv: tuple[str, ...]
    out: str


BLOCK_NAMES = BlockNames(("norm1", "norm2"), "attn", ("qkv",), "proj")  # of Qwen's towers


class PatchEmbedding:
    """A patch's pixels to a row of `hidden`; a checkpoint stores the weight as that of a convolution.  `patch`: shape
    of a patch's pixels; `name`: of the module in a checkpoint."""

    def __init__(
        self, hidden: int, patch: tuple[int, ...], options: LayerOptions, *, bias: bool, name: str = "proj"
    ) -> None:
        self.shape, self.name = (hidden, *patch), name
        self.linear = Linear(prod(patch), {name: hidden}, options, bias=bias)

    def parameters(self) -> dict[str, Parameter]:
        """The weight [hidden, *patch] and, if there is one, the bias."""
        parameters, name = self.linear.parameters(), f"{self.name}.weight"
        flat = parameters[name]
        parameters[name] = Parameter(
            self.shape,
            lambda weight: self.linear.load(self.name, weight.flatten(1)),
            flat.dtype,
            rounded=flat.rounded,
            places=flat.places,
        )
        return parameters

    def __call__(self, patches: Tensor) -> Tensor:  # [n, pixels] float32 -> [n, hidden]
        return self.linear(patches.to(self.linear.dtype))


class PositionTable(Table):
    """Learned positions on a square grid of `side`, resampled bilinearly to an image's grid, corners on corners."""

    def __init__(self, side: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(side * side, hidden, dtype)
        self.side = side

    def resampled(self, rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:  # [n] each -> [n, hidden]
        """Positions of patches at (rows, columns) of a grid of height by width."""
        total: Tensor | None = None
        for row, row_weight in self._taps(rows, height):
            for column, column_weight in self._taps(columns, width):
                part = self.weight[row * self.side + column] * (row_weight * column_weight)[:, None]
                total = part if total is None else total + part
        assert total is not None
        return total.to(self.dtype)

    def _taps(self, index: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """The two entries of an axis that an index of `size` lies between, and their float32 weights."""
        exact = index.float() * (self.side - 1) / max(size - 1, 1)
        low = exact.floor()
        upper = (low + 1).clamp(max=self.side - 1)
        return [(low.long(), 1 - (exact - low)), (upper.long(), exact - low)]


def angles(theta: float, dim: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Cosines | sines [n, dim] float32, as `rope` takes them, of heads of `dim` for patches at (rows, columns) [n]: the
    first half of each half of a head turns with the row, the second with the column."""
    steps = 1.0 / theta ** (torch.arange(0, dim // 2, 2, dtype=torch.float32) / (dim // 2))  # [dim / 4], on the host
    steps = steps.to(rows.device)
    turned = torch.cat([index.float()[:, None] * steps for index in (rows, columns)], dim=1)
    return torch.cat((turned.cos(), turned.sin()), dim=1)


def activation_bytes(rows: int, hidden: int, mlp: MLPSpec, dtype: torch.dtype) -> int:
    """Bytes of a layer's rows, keys and values, and of positions in float32: more than are there at once."""
    return rows * ((12 * hidden + (2 + mlp.gated) * mlp.inner) * dtype.itemsize + 8 * hidden)


class Runs:
    """Runs of rows of these lengths, one after the other: the rows of a run attend to each other.  Each run has pages
    of its own, `pages` in all."""

    def __init__(self, lengths: Sequence[int]) -> None:
        sizes = torch.tensor(lengths)
        used = (sizes + PAGE - 1) // PAGE
        first = used.cumsum(0) - used  # the first page of each run
        ends, total = sizes.cumsum(0), sum(lengths)
        self.pages = int(used.sum())
        columns = torch.arange(int(used.max()))
        device = ops.torch_device
        self.block_tables = (first[:, None] + columns).clamp(max=self.pages - 1).int().to(device)  # [R, max pages]
        self.query_start = torch.cat((torch.zeros_like(ends[:1]), ends)).int().to(device)  # [R + 1]
        self.seq_lens = sizes.int().to(device)
        self.bidirectional = torch.ones(len(sizes), dtype=torch.bool, device=device)
        slots = torch.repeat_interleave(first * PAGE - (ends - sizes), sizes) + torch.arange(total)
        self.slots = slots.to(device)
        self.positions = torch.arange(total, device=device)


class RunAttention:
    """Attention of an image's rows, all of whose layers use the same pages.  `table` [n, rot]: the rows' angles;
    `kinds`: the runs that some layer has."""

    def __init__(self, heads: int, dim: int, dtype: torch.dtype, table: Tensor, *kinds: Runs) -> None:
        self.scale, self.table = dim**-0.5, table
        shape = (max(runs.pages for runs in kinds), heads, PAGE, dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=table.device) for _ in range(2))

    def __call__(self, qkv: Tensor, runs: Runs) -> Tensor:  # [n, 3 * hidden] -> [n, hidden]
        """Turn queries and keys by the rows' angles, and let each row see all rows of its run."""
        keys, values = self.keys, self.values
        q = ops.norm_rope_store(qkv, None, None, 0.0, self.table, runs.positions, keys, values, runs.slots)
        mixed = ops.paged_attention(
            q,
            keys,
            values,
            runs.block_tables,
            runs.query_start,
            runs.seq_lens,
            self.scale,
            0,
            1.0,
            0.0,
            None,
            runs.bidirectional,
        )
        return mixed.view(len(qkv), -1)


class VisionBlock:
    """A layer of the tower: attention, then feed-forward, each after a norm."""

    def __init__(
        self, hidden: int, norm: NormSpec, mlp: MLPSpec, options: LayerOptions, names: BlockNames = BLOCK_NAMES
    ) -> None:
        self.names = names
        self.norm1, self.norm2 = (make_norm(hidden, norm, options.dtype) for _ in range(2))
        self.qkv = Linear(hidden, dict.fromkeys(names.qkv, 3 * hidden // len(names.qkv)), options, bias=True)
        self.out = Linear(hidden, {names.out: hidden}, options, bias=True)
        self.mlp = make_mlp(hidden, mlp, options)

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of checkpoints."""
        first, second = self.names.norms
        parameters = under(first, self.norm1.parameters()) | under(second, self.norm2.parameters())
        parameters |= under(self.names.attention, self.qkv.parameters() | self.out.parameters())
        return parameters | under("mlp", self.mlp.parameters())

    def __call__(
        self, x: Tensor, residual: Tensor, attention: RunAttention, runs: Runs
    ) -> tuple[Tensor, Tensor]:  # [n, hidden] each
        """`x`: what this layer's first norm made of `residual`.  Returns what is to be added, and what to."""
        x, residual = self.norm2.add(self.out(attention(self.qkv(x), runs)), residual)
        return self.mlp(x), residual


class Merger:
    """Squares of rows to embeddings of the text model."""

    def __init__(self, spec: MergerSpec, options: LayerOptions) -> None:
        self.spec = spec
        self.width = spec.hidden * spec.merge**2
        self.norm = make_norm(self.width if spec.norm_joined else spec.hidden, spec.norm, options.dtype)
        self.up = Linear(self.width, {spec.up_name: self.width}, options, bias=True)
        self.down = Linear(self.width, {spec.down_name: spec.outputs}, options, bias=True)

    def parameters(self) -> dict[str, Parameter]:
        return under(self.spec.norm_name, self.norm.parameters()) | self.up.parameters() | self.down.parameters()

    def __call__(self, rows: Tensor) -> Tensor:  # [n, hidden] -> [n / merge / merge, outputs]
        joined = self.norm(rows.view(-1, self.width) if self.spec.norm_joined else rows).view(-1, self.width)
        return self.down(ops.activate(self.up(joined), "gelu"))
