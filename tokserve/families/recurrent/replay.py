"""The recurrences of `ops/recurrent` as differentiable functions of torch, for gradients: in float32, in chunks.

Within a chunk a state is never made: what a token reads of those before it is a product of matrices, of all chunks at
once.  Only the memory between chunks is computed one after the other.  The bits are therefore not those of the ops,
which take token after token.  All are of one sequence's consecutive tokens, and of functions whose order of sums
follows from shapes on every device.
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
    q, k, v, rate, step = (in_chunks(part, CHUNK) for part in (queries, keys, values, log_rates, b.sigmoid()))
    decay, since = decays(rate)
    # what the tokens of a chunk write at their keys is u of u = step (v - k S), where S has what those before wrote:
    # the first part is from the values, the second times the memory before the chunk
    others = torch.tril(k @ k.mT * decay, -1) * step[..., None]
    targets = torch.cat([v, k * since], -1) * step[..., None]
    identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
    solved = torch.linalg.solve_triangular(others + identity, targets, upper=False, unitriangular=True)
    of_values, of_memory = (part.unbind(1) for part in torch.split(solved, [sizes.value_dim, sizes.key_dim], 3))
    memories, written = [], []
    places = (k * decay[:, :, -1, :, None]).mT.unbind(1)
    left = since[:, :, -1:].unbind(1)
    for from_values, from_memory, place, rest in zip(of_values, of_memory, places, left, strict=True):
        memories.append(memory)
        written.append(from_values - from_memory @ memory)
        memory = memory * rest + place @ written[-1]
    read = (q * since) @ torch.stack(memories, 1) + (q @ k.mT * decay) @ torch.stack(written, 1)  # [Hv, C, t, Dv]
    out = read.flatten(1, 2)[:, : values.shape[1]].transpose(0, 1)  # [t, Hv, Dv]
    scale = torch.rsqrt(out.square().mean(2, keepdim=True) + eps)
    return (out * scale * vectors["norm.weight"] * functional.silu(gates[earlier:])).flatten(1), memory


def in_chunks(x: Tensor, size: int) -> Tensor:  # [H, t, ...] -> [H, C, size, ...]
    """Chunks of so many tokens, or one of fewer; zeros follow the last token."""
    count = x.shape[1]
    size = min(size, count)
    if missing := -count % size:
        x = torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], 1)
    return x.contiguous().view(len(x), -1, size, *x.shape[2:])


def decays(rate: Tensor) -> tuple[Tensor, Tensor]:  # [H, C, t] -> [H, C, t, t], [H, C, t, 1]
    """What is left at token i of a chunk of what token j <= i wrote, zero for j > i, and of the memory before the
    chunk, where each token multiplies by exp(rate).  Sums of rates, and of their gradients, which nearly cancel, are
    float64."""
    later = torch.ones(rate.shape[2], rate.shape[2], dtype=torch.bool, device=rate.device).triu(1)
    total = rate.double() @ (~later.mT).double()  # a cumulative sum, which on some devices has no fixed order
    between = (total[..., :, None] - total[..., None, :]).to(rate.dtype)
    return between.masked_fill(later, float("-inf")).exp(), total.to(rate.dtype).exp()[..., None]


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
