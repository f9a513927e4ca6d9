"""References of what gradients need: products, sums by row, softmax; those of attention over sequences that share
prefixes, of activations, of norms, of experts and their router.

The server never calls them.  Products and long sums run on one thread: a library may divide them among threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tokserve.ops import dense, elementwise
from tokserve.ops.elementwise import widened
from tokserve.ops.mixture import MIN_SUM, scores_of
from tokserve.ops.registry import op
from tokserve.ops.serial import one_thread

QUERIES = 256  # of a node whose weights are in memory at a time
NORMED_ROWS = 128  # of a layer norm at a time, which stay in the cache
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (3e-2, 2e-2), torch.float16: (1e-5, 1e-5)}
ROW_TOLERANCE = {torch.float32: (5e-5, 1e-5), torch.bfloat16: (5e-5, 1e-2), torch.float16: (5e-5, 2e-3)}


@op(tolerance={dtype: (5e-5, max(5e-5, relative)) for dtype, (_, relative) in dense.TOLERANCE.items()})
def matrix_product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """a [M,K] times b [K,N]: [M,N], summed in float32 in one order for each element, whatever M, and rounded once.

    Rows or columns of each lie together, so that either may be the transpose of a tensor.  `out_dtype` float32 returns
    the sums as they are; None rounds to a's dtype.
    """
    return dense.linear.reference(a, dense.pack_linear.reference(b.t()), None, out_dtype)


@op(tolerance={torch.float32: (1e-5, 1e-5)})
def sum_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Rows [T,H] float32 added up by place [T] int64, in their order: [count,H]."""
    return torch.ops.aten.embedding_dense_backward(rows, places, count, -1, False)


@op(tolerance={torch.float32: (1e-6, 1e-5)})
def softmax(x: Tensor) -> Tensor:
    """exp(x - max(x)) / sum(exp(x - max(x))) of each row of x [T,V] float32, which is overwritten and returned."""
    return torch.softmax(x, -1, out=x)


PRODUCT_TOLERANCE = matrix_product.tolerance


@op(tolerance=PRODUCT_TOLERANCE)
def expert_products(
    x: Tensor, weights: Sequence[Tensor], starts: Tensor, transposed: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The `matrix_product` of rows x [R,N] with the weights [N,K] of their experts, or `transposed` [K,N]: [R,K].

    Rows are sorted by expert: those of expert e are starts[e] .. starts[e+1] - 1, [E+1] int32.
    """
    out = x.new_empty((len(x), weights[0].shape[0 if transposed else 1]), dtype=out_dtype or x.dtype)
    for weight, (first, end) in zip(weights, pairwise(starts.tolist()), strict=True):
        out[first:end] = matrix_product.reference(x[first:end], weight.t() if transposed else weight, out_dtype)
    return out


@op(tolerance=PRODUCT_TOLERANCE)
def expert_weight_gradients(grad: Tensor, x: Tensor, starts: Tensor) -> Tensor:
    """The gradients of the weights of experts [E,N,K] float32 in x W^T, from that of the products [R,N] and x [R,K].

    A sum over the expert's rows in their order, zero if it has none.  `starts` as for `expert_products`.
    """
    out = x.new_zeros((len(starts) - 1, grad.shape[1], x.shape[1]), dtype=torch.float32)
    for number, (first, end) in enumerate(pairwise(starts.tolist())):
        if end > first:
            out[number] = matrix_product.reference(grad[first:end].t(), x[first:end], torch.float32)
    return out


@op(tolerance={dtype: (1e-4, 1e-5) for dtype in ROW_TOLERANCE})
def row_products(a: Tensor, b: Tensor) -> Tensor:
    """The sum of the products of each row of a with that of b, both [T,H]: [T] float32."""
    with one_thread():
        return (widened(a) * widened(b)).sum(-1)


@op(tolerance={torch.float32: (1e-6, 1e-5)})
def route_gradients(
    grad: Tensor, logits: Tensor, ids: Tensor, sigmoid: bool, normalize: bool, added: float, scale: float
) -> Tensor:
    """The gradient of logits [T,E] in `route`, from that of the weights [T,k], all float32, where it chose ids [T,k].

    The choice itself, and a bias that counts for it alone, have none.  With scores s, their sum S over the chosen and
    g = scale grad: of a chosen score (g - sum(g s) / S) / S if they are normalized, else g; then that of the softmax or
    the sigmoid.
    """
    scores = scores_of(logits, sigmoid)
    upstream, chosen = grad * scale, scores.gather(1, ids.long())
    with one_thread():
        if normalize:
            total = chosen.sum(-1, keepdim=True) + added
            along = (upstream * chosen).sum(-1, keepdim=True) / total
            upstream = torch.where(total > MIN_SUM, upstream - along, upstream) / total.clamp(min=MIN_SUM)
        of_scores = torch.zeros_like(scores).scatter_(1, ids.long(), upstream)
        if sigmoid:
            return of_scores * scores * (1.0 - scores)
        return scores * (of_scores - (of_scores * scores).sum(-1, keepdim=True))


@op(tolerance=ROW_TOLERANCE)
def activation_gradients(grad: Tensor, x: Tensor, activation: str, gated: bool = False) -> Tensor:
    """The gradient of x in `activate(x, activation, gated)`, like x, from that of its result [T,I].

    x is [T,I], or [T,2I] if it is `gated`: the first half is activated, and multiplies the second.
    """
    upstream = widened(grad)
    if not gated:
        return (upstream * _slope(widened(x), activation)).to(x.dtype)
    gate, up = widened(x).chunk(2, -1)
    value = elementwise.activate.reference(gate, activation)
    return torch.cat([upstream * _slope(gate, activation) * up, upstream * value], -1).to(x.dtype)


def _slope(x: Tensor, activation: str) -> Tensor:
    """The derivative of an activation."""
    if activation == "silu":
        sigmoid = 1.0 / (1.0 + torch.exp(-x))
        return sigmoid + x * sigmoid * (1.0 - sigmoid)
    if activation == "gelu_tanh":
        inner = (x + x * x * x * elementwise.GELU_CUBIC) * elementwise.GELU_SCALE
        share = 1.0 / (1.0 + torch.exp(-2.0 * inner))  # (1 + tanh(inner)) / 2
        return share + x * 2.0 * share * (1.0 - share) * elementwise.GELU_SCALE * (
            1.0 + 3.0 * elementwise.GELU_CUBIC * x * x
        )
    if activation == "gelu":
        return 0.5 * torch.erfc(x * -math.sqrt(0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return 2.0 * x.clamp(min=0.0) if activation == "relu2" else (x > 0.0).float()


@op(tolerance=ROW_TOLERANCE)
def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carried: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T,H], in its dtype, and of weight [H] float32 in `rms_norm(x, weight, eps)`.

    `grad` [T,H] is that of the result, in x's dtype or float32.  `carried` [T,H] is added to the gradient of x before
    it is rounded.  With n = x / rms, n' = weight grad: (n' - n mean(n' n)) / rms, and the sum over rows of grad n.
    """
    values, upstream = widened(x), widened(grad)
    with one_thread():
        inverse = torch.rsqrt(values.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
        normed = values * inverse
        grad_weight = (upstream * normed).sum(0)
        upstream = upstream * widened(weight)
        along = (upstream * normed).sum(-1, keepdim=True) / x.shape[-1]
    grad_x = (upstream - normed * along) * inverse
    return (grad_x if carried is None else grad_x + widened(carried)).to(x.dtype), grad_weight


@op(tolerance=ROW_TOLERANCE)
def layer_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carried: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [T,H], in its dtype, of weight and of bias [H] float32 in `layer_norm(x, weight, bias, eps)`.

    `grad` [T,H] is that of the result, in x's dtype or float32.  `carried` [T,H] is added to the gradient of x before
    it is rounded.  With n = (x - mean) / deviation, n' = weight grad: (n' - mean(n') - n mean(n' n)) / deviation, and
    the sums over rows of grad n, and of grad.
    """
    out = torch.empty_like(x)
    grad_weight, grad_bias = (widened(x).new_zeros(weight.shape) for _ in range(2))
    for start in range(0, len(x), NORMED_ROWS):
        rows = slice(start, start + NORMED_ROWS)
        values, upstream = widened(x[rows]), widened(grad[rows])
        values = values - values.mean(-1, keepdim=True)
        inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)  # [t,1]
        normed = values.mul_(inverse)
        grad_weight += (upstream * normed).sum(0)
        grad_bias += upstream.sum(0)
        upstream = upstream * widened(weight)
        along = (upstream * normed).mean(-1, keepdim=True)
        upstream = upstream - upstream.mean(-1, keepdim=True)
        grad_x = upstream.sub_(normed.mul_(along)).mul_(inverse)
        out[rows] = grad_x if carried is None else grad_x.add_(carried[rows])
    return out, grad_weight, grad_bias


@op(tolerance=TOLERANCE)
def attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    paths: Tensor,
    path_start: Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients float32 of q [T,Hq,D], k and v [T,Hk,D] in causal attention, from that of its result [T,Hq,D].

    The T tokens are runs of sequences ("nodes"): node r owns tokens query_start[r] .. query_start[r+1] - 1, the last of
    the positions whose tokens are paths[path_start[r]:path_start[r+1]], ascending ([R+1], [P], [R+1] int64).  Where
    several nodes have the same keys, their gradients are added in the order of the nodes.  `window` and `softcap` as in
    `paged_attention`.  The weights are computed again: for weights P and G the gradient of the result,
    dS = P (G V^T - rowsum(P G V^T)), dV = P^T G, dK = scale dS^T Q, dQ = scale dS K.
    """
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    grads = tuple(torch.zeros(x.shape, dtype=exact, device=x.device) for x in (q, k, v))
    with one_thread():
        for (first, end), (begin, stop) in zip(
            pairwise(query_start.tolist()), pairwise(path_start.tolist()), strict=True
        ):
            path = paths[begin:stop]
            keys, values = (x.index_select(0, path).to(exact) for x in (k, v))
            for start in range(first, end, QUERIES):
                rows = slice(start, min(start + QUERIES, end))
                position = stop - begin - (end - start)
                visible = slice(max(0, position - window + 1) if window else 0, position + rows.stop - rows.start)
                parts = _node(
                    grad[rows].to(exact), q[rows].to(exact), keys[visible], values[visible], scale, window, softcap
                )
                grads[0][rows] = parts[0]
                grads[1].index_add_(0, path[visible], parts[1])
                grads[2].index_add_(0, path[visible], parts[2])
    return grads[0], grads[1], grads[2]


def _node(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [n,Hq,D], k and v [m,Hk,D], where the queries are at the last n of m positions."""
    count, heads, dim = q.shape
    m, kv_heads = k.shape[:2]
    group = heads // kv_heads
    query, key = torch.arange(m - count, m, device=q.device)[:, None], torch.arange(m, device=q.device)
    hidden = (key > query) | (key <= query - window) if window else key > query  # [n,m]
    hidden = hidden[:, None].expand(count, group, m).reshape(count * group, m)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    for head in range(kv_heads):
        members = slice(head * group, (head + 1) * group)
        queries, upstream = (x[:, members].reshape(-1, dim) for x in (q, grad))  # [n G,D]
        scores = queries @ k[:, head].t() * scale
        capped = torch.tanh(scores / softcap) if softcap else None
        weights = (scores if capped is None else capped * softcap).masked_fill(hidden, float("-inf")).softmax(-1)
        slopes = upstream @ v[:, head].t()
        slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True))
        if capped is not None:
            slopes = slopes * (1.0 - capped * capped)
        grad_q[:, members] = (slopes @ k[:, head] * scale).view(count, group, dim)
        grad_k[:, head] = slopes.t() @ queries * scale
        grad_v[:, head] = weights.t() @ upstream
    return grad_q, grad_k, grad_v
