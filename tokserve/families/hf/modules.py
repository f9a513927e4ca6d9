"""Replacements for modules of a transformers model: projections, norms and activations that call our ops.

They read the batch that is being computed from a `Context`, since the modules between them do not pass it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import activations

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.linear import Linear
from tokserve.layers.norm import LayerNorm

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
    activations.GELUTanh: "gelu_tanh",
    activations.GELUActivation: "gelu",
    nn.ReLU: "relu",
    activations.ReLUSquaredActivation: "relu2",
}


SINKS = "s_aux"
KNOWN = {"position_ids", "cache_position", SINKS}  # tensors that attention may be given beside q, k and v


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked of attention: KV heads, size of a head, and its window (0: none)."""

    kv_heads: int
    dim: int
    window: int


@dataclass(slots=True)
class Context:
    """The batch in progress; without one, attention answers zeros and notes in `calls` what it was asked, by layer."""

    batch: ForwardBatch | None
    calls: dict[int, AttentionCall]


class Projection(nn.Module):
    """Takes the place of an `nn.Linear`; `out_dtype`: as `Linear` takes it."""

    def __init__(self, linear: Linear, context: Context, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.linear, self.context, self.out_dtype = linear, context, out_dtype
        self.in_features, self.out_features = linear.inputs, linear.outputs

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        batch = self.context.batch
        rows = x.reshape(-1, x.shape[-1]).to(self.linear.dtype)
        out = self.linear(rows, self.out_dtype, adapters=None if batch is None else batch.adapters)
        return out.view(*x.shape[:-1], self.out_features)


class Normalization(nn.Module):
    """Takes the place of an `nn.LayerNorm` with a weight."""

    def __init__(self, norm: LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> same."""
        return self.norm(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


class ElementwiseActivation(nn.Module):
    """Takes the place of an activation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> same."""
        return ops.activate(x.reshape(-1, x.shape[-1]).contiguous(), self.name).view(x.shape)


def attend(
    context: Context,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:  # [1, Hq, T, D], [1, Hk, T, D] twice -> [1, T, Hq, D]
    """Attention of a layer's queries over its pages, after its keys and values are stored.  Raises StartError.  Values
    of another size than keys have, as in latent attention: zeros make them equal."""
    if context.batch is None:
        for name, option in options.items():
            if isinstance(option, Tensor) and name not in KNOWN:
                raise StartError(f"attention with {name} is not supported by --model-impl transformers")
        if isinstance(mask, Tensor) and not _is_causal(mask):
            raise StartError("attention with a mask of its own is not supported by --model-impl transformers")
    if vars(module).get("is_causal", True) is False or options.get("is_causal") is False:
        raise StartError("attention that is not causal is not supported by --model-impl transformers")
    size = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    widest = max(query.shape[-1], size)
    query, key, value = (functional.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    layer = int(vars(module)["layer_idx"])
    window, batch = int(options.get("sliding_window") or 0), context.batch
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, heads, D] each
    if batch is None:
        if layer in context.calls:
            raise StartError("a layer that attends twice is not supported by --model-impl transformers")
        context.calls[layer] = AttentionCall(k.shape[1], k.shape[2], window)
        return torch.zeros_like(q)[None, ..., :size]
    keys, values = batch.kv[layer]
    ops.store_kv(k, v, keys, values, batch.slot_mapping)
    sinks = options.get(SINKS)
    mixed = ops.paged_attention(
        q,
        keys,
        values,
        batch.block_tables,
        batch.query_start,
        batch.seq_lens,
        scale,
        window,
        1.0,
        float(options.get("softcap") or 0.0),
        None if sinks is None else sinks.float().contiguous(),
    )
    return mixed[None, ..., :size]


def _is_causal(mask: Tensor) -> bool:
    """Whether a mask [1, heads, T, T], True or 0 where a query may look, does no more than hide later tokens."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    lower = torch.ones(seen.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return bool((seen == lower).all())
