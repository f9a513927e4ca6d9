"""SigLIP's vision tower with Gemma 3's projector: the patches of one image to embeddings that stand in a prompt.

Images are computed one at a time, so that an image's bits do not depend on others; their size is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve.features.images.tower import squares
from tokserve.features.images.tower_layers import (
    BlockNames,
    PatchEmbedding,
    PositionTable,
    RunAttention,
    Runs,
    VisionBlock,
    activation_bytes,
)
from tokserve.layers.linear import Linear
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, under

BLOCK_NAMES = BlockNames(("layer_norm1", "layer_norm2"), "self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj")


@dataclass(frozen=True, slots=True)
class SiglipSpec:
    """A tower and its projector.  `patch`: shape of a patch's pixels (channels, height, width).

    `side`: patches of an image, down and across.  Squares of `merge` by `merge` rows are averaged and projected to
    embeddings of `outputs`.  `norm`: of the tower; the projector's norm has its epsilon.
    """

    patch: tuple[int, int, int]
    hidden: int
    layers: int
    heads: int
    mlp: MLPSpec
    norm: NormSpec
    side: int
    merge: int
    outputs: int
    name: str = "model.vision_tower"
    projector_name: str = "model.multi_modal_projector"

    def tower(self, options: LayerOptions) -> SiglipTower:
        """The tower and its projector, without weights."""
        return SiglipTower(self, options)


class Projector:
    """Squares of rows to embeddings of the text model: their mean, normed and projected."""

    def __init__(self, spec: SiglipSpec, options: LayerOptions) -> None:
        self.hidden, self.outputs, self.square = spec.hidden, spec.outputs, spec.merge**2
        self.norm = make_norm(spec.hidden, NormSpec(spec.norm.eps, offset=1.0), options.dtype)
        self.linear = Linear(spec.hidden, {"projection": spec.outputs}, options)

    def parameters(self) -> dict[str, Parameter]:
        """`mm_input_projection_weight` [hidden, outputs], the transpose of what a linear layer has, and the norm's."""
        kept = self.linear.parameters()["projection.weight"]
        weight = Parameter(
            (self.hidden, self.outputs),
            lambda tensor: self.linear.load("projection", tensor.t().contiguous()),
            kept.dtype,
            rounded=kept.rounded,
        )
        return {"mm_input_projection_weight": weight} | under("mm_soft_emb_norm", self.norm.parameters())

    def __call__(self, rows: Tensor) -> Tensor:  # [n, hidden] -> [n / merge / merge, outputs]
        mean = rows.float().view(-1, self.square, self.hidden).mean(1).to(rows.dtype)
        return self.linear(self.norm(mean))


class SiglipTower:
    """Weights come in through `parameters`; they are not quantized."""

    def __init__(self, spec: SiglipSpec, options: LayerOptions) -> None:
        self.spec, self.dtype = spec, options.dtype
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
        not_turned = torch.zeros(len(order), 0, device=order.device)
        attention = RunAttention(self.spec.heads, self.spec.hidden // self.spec.heads, x.dtype, not_turned, runs)
        following = [*(block.norm1 for block in self.blocks[1:]), self.norm]
        for block, norm in zip(self.blocks, following, strict=True):
            added, residual = block(x, residual, attention, runs)
            x, residual = norm.add(added, residual)
        return self.projector(x)[None]

    def activation_bytes(self, tokens: int) -> int:
        return activation_bytes(self.spec.side**2, self.spec.hidden, self.spec.mlp, self.dtype)
