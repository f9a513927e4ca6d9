"""State-space layers (Mamba-2) as differentiable functions of torch, for gradients; see `families/recurrent/replay`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tokserve.families.recurrent.replay import CHUNK, convolved, decays, in_chunks, rounded


def scan_states(
    x: Tensor,
    earlier: int,
    memory: Tensor | None,
    vectors: Mapping[str, Tensor],
    *,
    groups: int,
    size: int,
    norm_size: int,
    eps: float,
    limits: tuple[float, float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # [n, N], [H, size, P] -> [n - earlier, H P], [H, size, P]
    """The layer's recurrence, as `Recurrent.replay` has it.  `dtype`: that outputs are rounded to."""
    weight = vectors["conv1d.weight"]
    heads, channels = len(vectors["A_log"]), len(weight)
    inner = channels - 2 * groups * size
    gates, entries, steps = torch.split(x, [inner, channels, heads], 1)
    mixed = functional.silu(convolved(entries, earlier, weight, vectors.get("conv1d.bias")))
    u = mixed[:, :inner].view(len(mixed), heads, -1).transpose(0, 1)  # [H, t, P]
    b, c = (
        part.view(len(mixed), groups, size).repeat_interleave(heads // groups, 1).transpose(0, 1)  # [H, t, size]
        for part in mixed[:, inner:].chunk(2, 1)
    )
    step = functional.softplus(steps[earlier:] + vectors["dt_bias"]).clamp(*limits).t()  # [H, t]
    rates = -torch.exp(vectors["A_log"])[:, None] * step
    if memory is None:
        memory = u.new_zeros(heads, size, u.shape[2])
    query, key, value, rate = (in_chunks(part, CHUNK) for part in (c, b, u * step[:, :, None], rates))
    decay, since = decays(rate)
    memories = []
    written = ((key * decay[:, :, -1, :, None]).mT @ value).unbind(1)  # by the tokens of a chunk, [H, size, P]
    for rest, added in zip(since[:, :, -1:].unbind(1), written, strict=True):
        memories.append(memory)
        memory = memory * rest + added
    read = (query * since) @ torch.stack(memories, 1) + (query @ key.mT * decay) @ value  # [H, C, t, P]
    out = read.flatten(1, 2)[:, : u.shape[1]] + vectors["D"][:, None, None] * u
    out = rounded(out.transpose(0, 1).flatten(1), dtype) * functional.silu(gates[earlier:])
    if "norm.weight" in vectors:
        normed = out.view(len(out), -1, norm_size)
        scale = torch.rsqrt(normed.square().mean(2, keepdim=True) + eps)
        out = (normed * scale).view_as(out) * vectors["norm.weight"]
    return out, memory
