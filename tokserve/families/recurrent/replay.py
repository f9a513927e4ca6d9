"""The recurrences of `ops/recurrent` as differentiable functions of torch, for gradients: in float32, in chunks.

Within a chunk a state is never made: what a token reads of those before it is a product of matrices.  The bits
are therefore not those of the ops, which take token after token.  All are of one sequence's consecutive tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tokserve.ops.recurrent import NORM_EPS, Sizes

CHUNK = 64  # tokens


def gated_delta(
    sizes: Sizes,
    eps: float,
    grouped: bool,
    projected: Sequence[Tensor],
    earlier: int,
    memory: Tensor | None,
    vectors: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:  # [n, N] and [n, 2 Hv], [Hv, Dk, Dv] -> [n - earlier, Hv Dv], [Hv, Dk, Dv]
    """The gated delta rule, as `Recurrent.replay` has it."""
    x, rates = projected
    entries, gates = sizes.split(x, rates, grouped)
    mixed = functional.silu(convolved(entries[:, : sizes.channels], earlier, vectors["conv1d.weight"]))
    width = sizes.key_heads * sizes.key_dim
    query_heads, key_heads, value_heads = torch.split(mixed, [width, width, sizes.heads * sizes.value_dim], 1)

    def unit(heads: Tensor) -> Tensor:  # [t, Hk Dk] -> [Hv, t, Dk]
        heads = heads.view(len(heads), -1, sizes.key_dim)
        heads = heads * torch.rsqrt(heads.square().sum(2, keepdim=True) + NORM_EPS)
        return heads.repeat_interleave(sizes.heads // sizes.key_heads, 1).transpose(0, 1)

    b, a = entries[earlier:, sizes.channels :].t().chunk(2)  # [Hv, t]
    log_rates = -torch.exp(vectors["A_log"])[:, None] * functional.softplus(a + vectors["dt_bias"][:, None])
    queries, keys = unit(query_heads) * sizes.key_dim**-0.5, unit(key_heads)
    values = value_heads.view(len(value_heads), sizes.heads, -1).transpose(0, 1)  # [Hv, t, Dv]
    if memory is None:
        memory = values.new_zeros(sizes.heads, sizes.key_dim, sizes.value_dim)
    parts = []
    chunks = (torch.split(part, CHUNK, 1) for part in (queries, keys, values, log_rates, b.sigmoid()))
    for q, k, v, rate, step in zip(*chunks, strict=True):
        decay = decays(rate)
        corrected = _corrections(k, v, step, rate.cumsum(1).exp(), decay, memory)
        read, memory = read_and_update(q, k, corrected, rate, decay, memory)
        parts.append(read)
    out = torch.cat(parts, 1).transpose(0, 1)  # [t, Hv, Dv]
    scale = torch.rsqrt(out.square().mean(2, keepdim=True) + eps)
    return (out * scale * vectors["norm.weight"] * functional.silu(gates[earlier:])).flatten(1), memory


def _corrections(k: Tensor, v: Tensor, step: Tensor, since: Tensor, decay: Tensor, memory: Tensor) -> Tensor:
    """What the tokens of a chunk write at their keys [Hv, t, Dv]: u of u = step (v - k S), where S has what the tokens
    before wrote.  `since` [Hv, t]: what the memory before the chunk is multiplied by; `decay` [Hv, t, t]."""
    others = torch.tril(k @ k.transpose(1, 2) * decay, -1) * step[:, :, None]
    targets = (v - (k @ memory) * since[:, :, None]) * step[:, :, None]
    identity = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
    return torch.linalg.solve_triangular(others + identity, targets, upper=False, unitriangular=True)


def decays(rate: Tensor) -> Tensor:  # [H, t] -> [H, t, t]
    """What is left at token i of what token j <= i wrote, where each token multiplies by exp(rate); zero for j > i."""
    total = rate.cumsum(1)
    between = total[:, :, None] - total[:, None, :]
    later = torch.ones(between.shape[1:], dtype=torch.bool, device=rate.device).triu(1)
    return between.masked_fill(later, float("-inf")).exp()


def read_and_update(
    q: Tensor, k: Tensor, written: Tensor, rate: Tensor, decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """What the queries [H, t, D] of a chunk read [H, t, E], and the memory [H, D, E] after it, in which token i wrote
    `written` [H, t, E] at its key, [H, t, D].  `decay` is that of `rate` [H, t]."""
    read = (q @ memory) * rate.cumsum(1).exp()[:, :, None] + (q @ k.transpose(1, 2) * decay) @ written
    left = decay[:, -1, :, None]
    return read, memory * rate.sum(1).exp()[:, None, None] + k.transpose(1, 2) @ (written * left)


def short_conv(
    dtype: torch.dtype, x: Tensor, earlier: int, vectors: Mapping[str, Tensor]
) -> Tensor:  # [n, 3 C] -> [n - earlier, C]
    """The gated convolution; its inputs are rounded to `dtype`, as those that a state keeps."""
    before, after, inner = x.chunk(3, 1)
    mixed = convolved(rounded(before * inner, dtype), earlier, vectors["conv.weight"], vectors.get("conv.bias"))
    return after[earlier:] * mixed


def convolved(
    x: Tensor, earlier: int, weight: Tensor, bias: Tensor | None = None
) -> Tensor:  # [n, C], [C, 1, K] -> [n - earlier, C]
    """The causal convolution of each channel by itself.  Fewer than K - 1 `earlier` tokens are all that there are."""
    channels, _, taps = weight.shape
    x = torch.cat([x.new_zeros(taps - 1 - earlier, channels), x])
    count = len(x) - taps + 1
    total = sum(x[tap : tap + count] * weight[:, 0, tap] for tap in range(taps))
    assert isinstance(total, Tensor)
    return total if bias is None else total + bias


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values rounded to a dtype; rounding has the gradient of the identity."""
    return x + (x.detach().to(dtype).to(x.dtype) - x.detach())
