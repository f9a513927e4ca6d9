"""The parts of a vision tower: patches to rows, attention without a mask, and squares of rows to embeddings.

All of them take the rows of one image; attention sees segments of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokserve import ops
from tokserve.layers.linear import Linear
from tokserve.layers.mlp import MLPSpec, make_mlp
from tokserve.layers.norm import NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, owned_copy, under
from tokserve.layers.places import VectorPlace


@dataclass(frozen=True, slots=True)
class MergerSpec:
    """From squares of `merge` by `merge` rows of `hidden` to one row of `outputs`: a norm and two projections.

    `norm_joined`: the norm is of the joined rows, not of each.  The names are of the modules in a checkpoint.
    """

    hidden: int
    merge: int
    outputs: int
    norm: NormSpec
    norm_name: str = "norm"
    up_name: str = "linear_fc1"
    down_name: str = "linear_fc2"
    norm_joined: bool = False


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A tower.  `patch`: shape of a patch's pixels (channels, time, height, width).

    `window`: side in squares of the windows that attention sees, except in the layers `whole`; 0: it sees the image.
    `side`: of the square table of learned positions, resampled to the image's grid; 0: there is none.
    `taps`: layers after which a merger of its own makes embeddings for the first layers of the text model, one each.
    `name`: of the tower in a checkpoint.
    """

    patch: tuple[int, int, int, int]
    hidden: int
    layers: int
    heads: int
    mlp: MLPSpec
    norm: NormSpec
    merger: MergerSpec
    patch_bias: bool = False
    window: int = 0
    whole: tuple[int, ...] = ()
    side: int = 0
    taps: tuple[int, ...] = ()
    theta: float = 10000.0
    name: str = "model.visual"


class PatchEmbedding:
    """A patch's pixels to a row of `hidden`; a checkpoint stores the weight as that of a convolution.

    `patch`: shape of a patch's pixels; `name`: of the module in a checkpoint.
    """

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
            self.shape, lambda weight: self.linear.load(self.name, weight.flatten(1)), flat.dtype,
            rounded=flat.rounded, places=flat.places,
        )  # fmt: skip
        return parameters

    def __call__(self, patches: Tensor) -> Tensor:  # [n, pixels] float32 -> [n, hidden]
        return self.linear(patches.to(self.linear.dtype))


class PositionTable:
    """Learned positions on a square grid of `side`, resampled bilinearly to an image's grid, corners on corners."""

    def __init__(self, side: int, hidden: int, dtype: torch.dtype) -> None:
        self.side, self.shape, self.dtype = side, (side * side, hidden), dtype
        self.weight = torch.zeros(self.shape, dtype=dtype, device=ops.torch_device)

    def parameters(self) -> dict[str, Parameter]:
        """`weight` [side * side, hidden]."""
        return {"weight": Parameter(self.shape, self.load, self.dtype, places=self.places)}

    def places(self) -> list[VectorPlace]:
        """The weight."""
        return [VectorPlace(self.weight.view(-1))]

    def load(self, tensor: Tensor) -> None:
        """Take the weight."""
        self.weight = owned_copy(tensor, self.shape, self.dtype)

    def __call__(self, rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:  # [n] each -> [n, hidden]
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


def angles(theta: float, dim: int, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n, dim] float32 of heads of `dim` for patches at (rows, columns) [n]: the first half of each
    half of a head turns with the row, the second with the column."""
    steps = 1.0 / theta ** (torch.arange(0, dim // 2, 2, dtype=torch.float32) / (dim // 2))  # [dim / 4]
    turned = torch.cat([index.float()[:, None] * steps for index in (rows, columns)] * 2, dim=1)
    return turned.cos(), turned.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [n, heads, dim] -> same
    """Each head, of which element i and i + dim / 2 are a pair, turned in float32."""
    exact = x.float()
    low, high = exact.chunk(2, dim=-1)
    turned = exact * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    return turned.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of rows that attend to each other, `count` of `length` rows each; `rows` None: all rows, in order."""

    count: int
    length: int
    rows: Tensor | None = None  # [count * length] int64


def segments(lengths: Sequence[int]) -> list[Segments]:
    """For runs of these lengths, one after the other: those of equal length are computed at once."""
    if len(set(lengths)) == 1:
        return [Segments(len(lengths), lengths[0])]
    sizes = torch.tensor(lengths)
    owner = torch.repeat_interleave(sizes, sizes)  # [n] the length of each row's run
    return [Segments(lengths.count(size), size, (owner == size).nonzero()[:, 0]) for size in sorted(set(lengths))]


def attend(q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Segments]) -> Tensor:  # [n, heads, dim] each -> same
    """Attention of each row to all rows of its run."""
    mixed = torch.empty_like(q)
    for run in runs:
        parts = (q, k, v) if run.rows is None else (x.index_select(0, run.rows) for x in (q, k, v))
        queries, keys, values = (x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2) for x in parts)
        out = scaled_dot_product_attention(queries, keys, values).transpose(1, 2).reshape(-1, *q.shape[1:])
        if run.rows is None:
            return out
        mixed.index_copy_(0, run.rows, out)
    return mixed


class VisionBlock:
    """A layer of the tower: attention, then feed-forward, each after a norm."""

    def __init__(self, spec: VisionSpec, options: LayerOptions) -> None:
        self.heads, self.dim = spec.heads, spec.hidden // spec.heads
        self.norm1, self.norm2 = (make_norm(spec.hidden, spec.norm, options.dtype) for _ in range(2))
        self.qkv = Linear(spec.hidden, {"qkv": 3 * spec.hidden}, options, bias=True)
        self.out = Linear(spec.hidden, {"proj": spec.hidden}, options, bias=True)
        self.mlp = make_mlp(spec.hidden, spec.mlp, options)

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of checkpoints."""
        parameters = under("norm1", self.norm1.parameters()) | under("norm2", self.norm2.parameters())
        parameters |= under("attn", self.qkv.parameters() | self.out.parameters())
        return parameters | under("mlp", self.mlp.parameters())

    def __call__(
        self, x: Tensor, residual: Tensor, turned: tuple[Tensor, Tensor], runs: Sequence[Segments]
    ) -> tuple[Tensor, Tensor]:  # [n, hidden] each
        """`x`: what this layer's first norm made of `residual`.  Returns what is to be added, and what to."""
        q, k, v = self.qkv(x).view(-1, 3, self.heads, self.dim).unbind(1)
        mixed = attend(rotate(q, *turned), rotate(k, *turned), v, runs)
        x, residual = self.norm2.add(self.out(mixed.view(residual.shape)), residual)
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
        """Under the names of checkpoints."""
        return under(self.spec.norm_name, self.norm.parameters()) | self.up.parameters() | self.down.parameters()

    def __call__(self, rows: Tensor) -> Tensor:  # [n, hidden] -> [n / merge / merge, outputs]
        joined = self.norm(rows.view(-1, self.width) if self.spec.norm_joined else rows).view(-1, self.width)
        return self.down(ops.activate(self.up(joined), "gelu"))
