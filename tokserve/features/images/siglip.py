"""The parts of SigLIP's vision tower and of the projector behind it, as Gemma 3 has them.

All of them take the rows of one image, whose size is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokserve.features.images.tower_layers import BlockNames
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
            (self.hidden, self.outputs), lambda tensor: self.linear.load("projection", tensor.t().contiguous()),
            kept.dtype, rounded=kept.rounded,
        )  # fmt: skip
        return {"mm_input_projection_weight": weight} | under("mm_soft_emb_norm", self.norm.parameters())

    def __call__(self, rows: Tensor) -> Tensor:  # [n, hidden] -> [n / merge / merge, outputs]
        mean = rows.float().view(-1, self.square, self.hidden).mean(1).to(rows.dtype)
        return self.linear(self.norm(mean))
