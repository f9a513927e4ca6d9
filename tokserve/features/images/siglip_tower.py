"""SigLIP's vision tower with Gemma 3's projector: the patches of one image to embeddings that stand in a prompt.

Images are computed one at a time, so that an image's bits do not depend on others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.features.images.siglip import BLOCK_NAMES, Projector, SiglipSpec
from tokserve.features.images.tower import squares
from tokserve.features.images.tower_layers import (
    PatchEmbedding,
    PositionTable,
    RunAttention,
    Runs,
    VisionBlock,
)
from tokserve.layers.norm import make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, under


class SiglipTower:
    """Weights come in through `parameters`; they are not quantized."""

    def __init__(self, spec: SiglipSpec, options: LayerOptions) -> None:
        self.spec = spec
        options = LayerOptions(options.dtype)
        self.patch = PatchEmbedding(spec.hidden, spec.patch, options, bias=True, name="patch_embedding")
        self.positions = PositionTable(spec.side, spec.hidden, options.dtype)
        self.blocks = [VisionBlock(spec.hidden, spec.norm, spec.mlp, options, BLOCK_NAMES) for _ in range(spec.layers)]
        self.norm = make_norm(spec.hidden, spec.norm, options.dtype)
        self.projector = Projector(spec, options)

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor of the tower and the projector under its name in a checkpoint."""
        positions = under("position_embedding", self.positions.parameters())
        parameters = under("embeddings", self.patch.parameters() | positions)
        for number, block in enumerate(self.blocks):
            parameters |= under(f"encoder.layers.{number}", block.parameters())
        parameters |= under("post_layernorm", self.norm.parameters())
        return under(self.spec.name, parameters) | under(self.spec.projector_name, self.projector.parameters())

    def __call__(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Embeddings [1, tokens, outputs] of the image whose normalized patches [n, pixels] are float32, in squares of
        `merge` by `merge`; `grid`: (1, side, side)."""
        _, height, width = grid
        order = squares(height, width, self.spec.merge)
        residual = self.patch(patches) + self.positions.resampled(order // width, order % width, height, width)
        x, runs = self.blocks[0].norm1(residual), Runs([len(order)])
        not_turned = torch.zeros(len(order), 0)
        attention = RunAttention(self.spec.heads, self.spec.hidden // self.spec.heads, x.dtype, not_turned, runs)
        following = [*(block.norm1 for block in self.blocks[1:]), self.norm]
        for block, norm in zip(self.blocks, following, strict=True):
            added, residual = block(x, residual, attention, runs)
            x, residual = norm.add(added, residual)
        return self.projector(x)[None]
