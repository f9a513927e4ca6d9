"""A vision tower: the patches of one image to embeddings that stand in a prompt, and in the first layers' inputs.

Images are computed one at a time, so that an image's bits do not depend on others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve import ops
from tokserve.features.images.tower_layers import (
    Merger,
    MergerSpec,
    PatchEmbedding,
    PositionTable,
    RunAttention,
    Runs,
    VisionBlock,
    activation_bytes,
    angles,
)
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, under


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

    def tower(self, options: LayerOptions) -> Tower:
        """The tower without weights."""
        return Tower(self, options)


class Tower:
    """Weights come in through `parameters`; they are not quantized."""

    def __init__(self, spec: VisionSpec, options: LayerOptions) -> None:
        self.spec, self.dtype = spec, options.dtype
        options = LayerOptions(options.dtype)
        self.patch = PatchEmbedding(spec.hidden, spec.patch, options, bias=spec.patch_bias)
        self.positions = PositionTable(spec.side, spec.hidden, options.dtype) if spec.side else None
        self.blocks = [VisionBlock(spec.hidden, spec.norm, spec.mlp, options) for _ in range(spec.layers)]
        self.merger = Merger(spec.merger, options)
        self.taps = [Merger(_joined(spec.merger), options) for _ in spec.taps]

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor of the tower under its name in a checkpoint."""
        parameters = under("patch_embed", self.patch.parameters()) | under("merger", self.merger.parameters())
        if self.positions is not None:
            parameters |= under("pos_embed", self.positions.parameters())
        for number, block in enumerate(self.blocks):
            parameters |= under(f"blocks.{number}", block.parameters())
        for number, tap in enumerate(self.taps):
            parameters |= under(f"deepstack_merger_list.{number}", tap.parameters())
        return under(self.spec.name, parameters)

    def __call__(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Embeddings [1 + taps, tokens, outputs] of the image whose normalized patches [n, pixels] are float32, in
        squares of `merge` by `merge`; `grid`: (1, height, width) in patches.  The first are inputs of the text model,
        those that follow are added to the outputs of its first layers."""
        _, height, width = grid
        merge = self.spec.merger.merge
        order = squares(height, width, merge)
        x = self.patch(patches)
        if self.positions is not None:
            x = x + self.positions.resampled(order // width, order % width, height, width)
        everything = Runs([len(order)])
        windows, inverse = everything, None
        if self.spec.window:
            index, sizes = window_order(height // merge, width // merge, self.spec.window)
            windows = Runs([size * merge**2 for size in sizes])
            by_patch = (index[:, None] * merge**2 + torch.arange(merge**2)).view(-1).to(order.device)
            index = index.to(order.device)
            x, order, inverse = x.index_select(0, by_patch), order.index_select(0, by_patch), index.argsort()
        dim = self.spec.hidden // self.spec.heads
        turned = angles(self.spec.theta, dim, order // width, order % width)
        attention = RunAttention(self.spec.heads, dim, x.dtype, turned, everything, windows)
        merged = self._layers(x, attention, everything, windows)
        return torch.stack([one if inverse is None else one.index_select(0, inverse) for one in merged])

    def activation_bytes(self, tokens: int) -> int:
        rows = tokens * self.spec.merger.merge**2
        return activation_bytes(rows, self.spec.hidden, self.spec.mlp, self.dtype)

    def _layers(self, x: Tensor, attention: RunAttention, everything: Runs, windows: Runs) -> list[Tensor]:
        """The mergers' results for rows [n, hidden]: the last first, then the taps'."""
        taps = dict(zip(self.spec.taps, self.taps, strict=True))
        merged: dict[int, Tensor] = {}
        added, residual, normed = x, x, self.blocks[0].norm1(x)
        for layer, block in enumerate(self.blocks):
            if layer:
                normed, residual = block.norm1.add(added, residual)
            runs = everything if layer in self.spec.whole else windows
            added, residual = block(normed, residual, attention, runs)
            if layer in taps:
                merged[layer] = taps[layer](added + residual)
        return [self.merger(added + residual), *(merged[layer] for layer in self.spec.taps)]


def window_order(height: int, width: int, side: int) -> tuple[Tensor, list[int]]:
    """Squares of an image of height by width squares, window by window (those at the lower and right edge may be
    smaller), and the number of squares of each window."""
    number = torch.arange(height * width).view(height, width)
    bands = torch.split(number, side)
    windows = [part.reshape(-1) for band in bands for part in torch.split(band, side, dim=1)]
    return torch.cat(windows), [len(window) for window in windows]


def squares(height: int, width: int, merge: int) -> Tensor:  # [height * width] int64
    """Index in the image, row by row, of each patch in the order of squares of `merge` by `merge`."""
    index = torch.arange(height * width, device=ops.torch_device)
    return index.view(height // merge, merge, width // merge, merge).permute(0, 2, 1, 3).reshape(-1)


def _joined(spec: MergerSpec) -> MergerSpec:
    """The merger after a tap."""
    return MergerSpec(
        spec.hidden, spec.merge, spec.outputs, spec.norm, spec.norm_name, spec.up_name, spec.down_name, norm_joined=True
    )
