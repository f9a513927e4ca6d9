"""Random weights for a real or tiny config, so that a server can be run and tested with no download.

A tensor's values follow from its name and the seed alone.  They are scaled so that the model behaves like
a trained one: logits with a spread of about 2, attention with peaks, output that varies with the context.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tokserve.layers.parameter import Parameter

NORMS = (
    "layernorm.weight",
    "operator_norm.weight",
    "ffn_norm.weight",
    "linear_attn.norm.weight",
    "mamba.norm.weight",
    "norm1.weight",
    "norm2.weight",
    "ln_q.weight",
    "merger.norm.weight",
    "mm_soft_emb_norm.weight",
    "ln_1.weight",
    "ln_2.weight",
    "layer_norm.weight",
)
GAINS = {
    "lm_head": 2.0,
    "q_proj": 1.5,
    "k_proj": 1.5,
    "qkv_proj": 1.3,
    "query_key_value": 1.3,
    "c_attn": 1.3,
    "o_proj": 0.6,
    "dense": 0.6,
    "out_proj": 0.3,
    "down_proj": 1.6,
    "output_linear": 1.6,
    "c_proj": 1.6,
    "dense_4h_to_h": 1.6,
    "fc2": 1.6,
}


def tensors(parameters: Mapping[str, Parameter], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 values) for each parameter of a model."""
    tied = "lm_head.weight" not in parameters
    for name, parameter in parameters.items():
        shape = parameter.shape[::-1] if parameter.transposed else parameter.shape
        tensor = values(name, shape, seed, tied=tied)
        tensor = tensor.t().contiguous() if parameter.transposed else tensor
        tensor = tensor if parameter.random_gain == 1.0 else tensor * parameter.random_gain
        yield name, tensor - parameter.offset if parameter.offset else tensor


def values(name: str, shape: tuple[int, ...], seed: int, *, tied: bool) -> Tensor:
    """Normal values whose scale depends on what the tensor is for, in float32.

    A tied embedding is small and the final norm makes up for it: else a token's own embedding in the residual
    stream would make every model repeat its input.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    convolves = len(shape) > 3  # a patch is its input
    mean, deviation = _scale(name, math.prod(shape[1:]) if convolves else shape[-1], tied)
    return torch.empty(shape).normal_(mean, deviation, generator=generator)


def _scale(name: str, width: int, tied: bool) -> tuple[float, float]:
    """Mean and deviation.  A projection's deviation is a gain over the root of its input width; attention puts less
    into the residual stream than the feed-forward, else all positions of a deep model end up alike.
    """
    small = 0.02
    if name.endswith((".bias", "_bias")):
        return 0.0, 0.1
    if name in ("model.norm.weight", "model.embedding_norm.weight", "model.final_layernorm.weight"):
        middle = 2.0 / (small * width**0.5) if tied else 1.0
        return middle, 0.1 * middle
    if name.endswith(("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")):
        return 1.5, 0.1
    if name.endswith(
        (
            *NORMS,
            "layer_scalar",
            "router.scale",
            "per_expert_scale",
            "per_layer_projection_norm.weight",
            "per_layer_input_norm.weight",
            "layernorm_1.weight",
            "layernorm_2.weight",
        )
    ):
        return 1.0, 0.1
    if name.endswith(("pos_embed.weight", "position_embedding.weight")):
        return 0.0, 0.5
    if name == "model.embed_tokens.weight":
        return 0.0, small if tied else 0.15
    if name == "model.embed_positions.weight":
        return 0.0, (small if tied else 0.15) / 2
    if name.endswith("A_log"):  # as trained models are: e^A_log from 0.5 to 8
        return 0.7, 0.7
    if name.endswith(".D"):
        return 1.0, 0.3
    if name.endswith("dt_bias"):
        return -2.0, 1.0
    if name.endswith(".sinks"):
        return 0.5, 1.0
    part = name.removesuffix(".weight").rpartition(".")[2]
    part = "o_proj" if name.endswith(".attn.c_proj.weight") else part
    return 0.0, GAINS.get(part, 1.0) / width**0.5
