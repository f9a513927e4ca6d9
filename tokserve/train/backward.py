"""Gradients of the ops, as plain functions of tensors.

All sums are float32.  Products of matrices are the ops' own `linear`, whose sums have one order whatever the number of
rows and threads: a row's gradient does not depend on the rows beside it.  (`products` replaces those of weights by
torch's where these are faster.)  Elementwise parts go over PIECE rows at a time, which stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tokserve import ops

PIECE = 128  # rows of an elementwise part
QUERIES = 256  # positions whose attention weights are in memory at a time


def pieces(count: int, size: int = PIECE) -> Iterator[slice]:
    """Slices of `size` rows that cover `count`."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def times(x: Tensor, matrix: Tensor) -> Tensor:  # [M, K], [N, K] -> [M, N] float32
    """x matrix^T, one chain over K for each element."""
    return ops.linear(x, ops.pack_linear(matrix.contiguous()), None, torch.float32)


def linear_input(grad: Tensor, weights: Sequence[Tensor]) -> Tensor:  # [T, N], each [n, K] -> [T, K] of grad's dtype
    """The gradient of x in x W^T, where `weights` are W's rows in order; they are rounded to grad's dtype."""
    transposed = torch.cat([weight.to(grad.dtype).t() for weight in weights], 1)  # [K, N]
    return ops.linear(grad, ops.pack_linear(transposed.contiguous()), None)


def linear_weight(grad: Tensor, x: Tensor) -> Tensor:  # [T, N], [T, K] -> [N, K] float32
    """The gradient of W in x W^T: a sum over tokens in ascending order."""
    return times(grad.t().contiguous(), x.t())


def rms_norm(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, H] and of the weight [H], both float32, from that of the norm [T, H]."""
    grad_x = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    scale = weight.float()
    for rows in pieces(len(x)):
        values, upstream = x[rows].float(), grad[rows].float()
        inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)  # [t, 1]
        normed = values * inverse
        grad_weight += (upstream * normed).sum(0)
        upstream = upstream * scale
        along = (upstream * normed).mean(-1, keepdim=True)
        torch.mul(upstream.sub_(normed.mul_(along)), inverse, out=grad_x[rows])
    return grad_x, grad_weight


def rope(
    grad: Tensor, table: Tensor, positions: Tensor, *, interleaved: bool = False
) -> Tensor:  # [T, heads, D] -> same
    """The gradient of what `ops.rope` turned: turned back."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)  # [T, 1, rot / 2] each
    half = cos.shape[-1]
    if interleaved:
        first, second = grad[..., 0 : 2 * half : 2], grad[..., 1 : 2 * half : 2]
        pairs = torch.stack((first * cos + second * sin, second * cos - first * sin), -1).flatten(-2)
        return torch.cat([pairs, grad[..., 2 * half :]], -1)
    first, second = grad[..., :half], grad[..., half : 2 * half]
    parts = [first * cos + second * sin, second * cos - first * sin, grad[..., 2 * half :]]
    return torch.cat(parts, -1)


def silu_mul(grad: Tensor, both: Tensor) -> Tensor:  # [T, I], [T, 2 I] -> [T, 2 I] of both's dtype
    """The gradient of the gate and of what it gates."""
    inner = grad.shape[1]
    out = torch.empty_like(both)
    for rows in pieces(len(grad)):
        upstream, gate = grad[rows].float(), both[rows, :inner].float()
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        out[rows, inner:] = upstream * silu
        slope = sigmoid.addcmul_(silu, 1.0 - sigmoid)  # of silu at the gate
        out[rows, :inner] = slope.mul_(upstream).mul_(both[rows, inner:])
    return out


def gelu_mul(grad: Tensor, both: Tensor) -> Tensor:  # [T, I], [T, 2 I] -> [T, 2 I] of both's dtype
    """Likewise for GELU in its tanh approximation."""
    inner = grad.shape[1]
    out = torch.empty_like(both)
    for rows in pieces(len(grad)):
        upstream, gate = grad[rows].float(), both[rows, :inner].float()
        out[rows, inner:] = upstream * torch.nn.functional.gelu(gate, approximate="tanh")
        out[rows, :inner] = torch.ops.aten.gelu_backward(upstream * both[rows, inner:], gate, approximate="tanh")
    return out


def attention(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int, *, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients float32 of q, k and v in causal attention of one sequence, from that of its result [n, Hq, D].

    q [n, Hq, D] are the queries of positions start .. start + n - 1, k and v [m, Hk, D] the keys and values of
    positions 0 .. m - 1 with m = start + n.  `window` > 0: a query sees that many keys at most, itself included.
    `softcap` > 0: scores s are softcap * tanh(s / softcap).
    """
    count, heads, dim = q.shape
    kv_heads = k.shape[1]
    grads = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    grad_q, grad_k, grad_v = grads
    for rows in pieces(count, QUERIES):
        first = max(0, start + rows.start - window + 1) if window else 0
        keys = slice(first, start + rows.stop)
        bias = _bias(start + rows.start, start + rows.stop, first, window, q.device)
        for head in range(kv_heads):
            group = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            parts = _head(
                grad[rows, group].reshape(-1, dim), q[rows, group].reshape(-1, dim), k[keys, head].contiguous(),
                v[keys, head].contiguous(), bias, scale, softcap,
            )  # fmt: skip
            grad_q[rows, group] = parts[0].view(rows.stop - rows.start, -1, dim)
            grad_k[keys, head] += parts[1]
            grad_v[keys, head] += parts[2]
    return grad_q, grad_k, grad_v


def _bias(begin: int, end: int, first: int, window: int, device: torch.device) -> Tensor:  # [keys, queries] float32
    """-inf where the query of position begin .. end - 1 does not see the key of position first .. end - 1, else 0."""
    query = torch.arange(begin, end, device=device)[None]
    key = torch.arange(first, end, device=device)[:, None]
    hidden = (key > query) | (key <= query - window) if window else key > query
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _head(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [n G, D], k and v [m, D] of one KV head; `bias` [m, n].  Weights lie as [m, n G]."""
    m, n = bias.shape
    scores, steepness = times(k, q).view(m, n, -1), None
    if softcap:
        bent = torch.tanh(scores * (scale / softcap))
        scores, steepness = bias[:, :, None] + bent * softcap, (1.0 - bent * bent).view(m, -1)
    else:
        scores = torch.add(bias[:, :, None], scores, alpha=scale)
    weights = torch.softmax(scores.view(m, -1), 0)
    slopes = times(v, grad)  # of the weights
    slopes.sub_((weights * slopes).sum(0)).mul_(weights)  # now of the scores
    if steepness is not None:
        slopes.mul_(steepness)
    rounded = slopes.to(q.dtype)
    grad_q, grad_k = times(rounded.t().contiguous(), k.t()), times(rounded, q.t())
    return grad_q.mul_(scale), grad_k.mul_(scale), times(weights.to(q.dtype), grad.t())
