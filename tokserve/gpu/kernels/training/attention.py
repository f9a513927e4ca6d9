"""Gradients of attention over sequences that share prefixes, in two passes: those of queries, then of keys and values.

The first pass computes each row's maximum, one over its mass, and the sum of its weights times their gradients, in an
online softmax over the row's keys; a second walk over them adds up the gradient of the query.  The other kernel has
a tile of a node's keys and walks through the nodes that read them, in ascending order, in each through the query heads
of the group and the queries.  A program has its sums to itself, in registers, so they have one order.

Tiles begin at the first query, or key, of a node, and at absolute positions of keys: what a sequence without shared
prefixes gets does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels import launch
from tokserve.gpu.kernels.attention import LOG2_E, LOG2_E_IN_KERNELS
from tokserve.gpu.kernels.elementwise import tanh
from tokserve.gpu.kernels.launch import EXACT, cdiv, next_power_of_2
from tokserve.gpu.kernels.sums import NEG_INF, finite, strided_sums
from tokserve.ops import gradients

NODES = 256  # that are looked at together


@dataclass(frozen=True, slots=True)
class GradientTiles:
    """Queries and keys of a tile, and warps, of the kernel of queries and of that of keys."""

    query_tile: tuple[int, int]
    query_warps: int
    key_tile: tuple[int, int]
    key_warps: int


NARROW = GradientTiles((64, 64), 4, (32, 128), 8)  # heads of up to 128 elements
WIDE = GradientTiles((64, 32), 8, (16, 64), 8)
CAPPED = GradientTiles((64, 32), 4, (16, 128), 8)  # such heads, with a cap of scores
FLOAT32 = GradientTiles((16, 32), 8, (16, 16), 4)
TWO_STAGES = 140 << 10  # bytes of shared memory that they take with wide heads


@triton.jit
def node_of(tiles_ptr, nodes, tile, NODES: tl.constexpr):
    """The node that has a tile; tiles_ptr [nodes + 1]: tiles before each."""
    index = tl.arange(0, NODES)
    before = tl.zeros([NODES], tl.int32)
    for start in range(0, nodes, NODES):
        inside = start + index < nodes
        ends = tl.load(tiles_ptr + 1 + start + index, mask=inside, other=0)
        before += (inside & (ends <= tile)).to(tl.int32)
    return tl.sum(before, 0)


@triton.jit(do_not_specialize=["nodes"])
def node_readers_kernel(start_ptr, path_ptr, path_start_ptr, reader_ptr, nodes, NODES: tl.constexpr):
    """One more than the last node whose path holds the first token of this one."""
    node = tl.program_id(0)
    begin = tl.load(start_ptr + node)
    length = tl.load(path_start_ptr + node + 1) - tl.load(path_start_ptr + node)
    position = length - (tl.load(start_ptr + node + 1) - begin)
    last = node + 1
    for start in range(0, nodes, NODES):
        other = start + tl.arange(0, NODES)
        inside = other < nodes
        path = tl.load(path_start_ptr + other, mask=inside, other=0) + position
        inside = inside & (path < tl.load(path_start_ptr + other + 1, mask=inside, other=0))
        token = tl.load(path_ptr + path, mask=inside, other=-1)
        last = tl.maximum(last, tl.max(tl.where(inside & (token == begin), other + 1, 0), 0))
    tl.store(reader_ptr + node, last)


@triton.jit
def scores_of(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores in units of powers of two; `scale` is for these, unless scores are CAPPED."""
    if CAPPED:
        return tanh(tl.div_rn(products * scale, softcap)) * softcap * LOG2_E_IN_KERNELS
    else:
        return products * scale


@triton.jit
def slopes_of(weights, values, delta, scores, softcap, CAPPED: tl.constexpr):
    """Gradients of scores, in units of 1: weights (values - delta), times the derivative of the cap."""
    slopes = weights * (values - delta)
    if CAPPED:
        bent = tl.div_rn(scores, softcap * LOG2_E_IN_KERNELS)
        slopes = slopes * (1.0 - bent * bent)
    return slopes


@triton.jit(do_not_specialize=["nodes", "tokens"])
def query_gradients_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    start_ptr,
    path_ptr,
    path_start_ptr,
    tiles_ptr,
    max_ptr,
    inverse_ptr,
    delta_ptr,
    out_ptr,
    nodes,
    tokens,
    scale,
    score_scale,
    softcap,
    grad_stride,
    q_stride,
    k_stride,
    v_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    """A tile of a node's queries of one head; max_ptr, inverse_ptr and delta_ptr [HEADS,tokens] get what rows have."""
    tile = tl.program_id(0)
    if tile >= tl.load(tiles_ptr + nodes):
        return
    node, head = node_of(tiles_ptr, nodes, tile, NODES), tl.program_id(1)
    begin = tl.load(start_ptr + node).to(tl.int32)
    count = tl.load(start_ptr + node + 1).to(tl.int32) - begin
    path = tl.load(path_start_ptr + node)
    before = (tl.load(path_start_ptr + node + 1) - path).to(tl.int32) - count  # positions before the node's
    first = (tile - tl.load(tiles_ptr + node)) * QUERIES
    query, column = first + tl.arange(0, QUERIES), tl.arange(0, DIM_BLOCK)[None, :]
    valid, token, position = query < count, begin + query, before + query
    inside = valid[:, None] & (column < DIM)
    q = tl.load(q_ptr + token.to(tl.int64)[:, None] * q_stride + head * DIM + column, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + token.to(tl.int64)[:, None] * grad_stride + head * DIM + column, mask=inside, other=0.0)
    end = before + tl.minimum(first + QUERIES, count)
    low = tl.maximum(before + first - WINDOW + 1, 0) // KEYS * KEYS if WINDOW > 0 else tl.zeros_like(end)
    k_ptr += head // GROUP * DIM
    v_ptr += head // GROUP * DIM
    row_max = tl.full([QUERIES], NEG_INF, tl.float32)
    row_sum, delta = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES], tl.float32)
    for start in range(low, end, KEYS):
        key = start + tl.arange(0, KEYS)
        source = tl.load(path_ptr + path + key, mask=key < end, other=0)
        present = (key < end)[:, None] & (column < DIM)
        k = tl.load(k_ptr + source[:, None] * k_stride + column, mask=present, other=0.0)
        v = tl.load(v_ptr + source[:, None] * v_stride + column, mask=present, other=0.0)
        scores = scores_of(tl.dot(q, tl.trans(k), input_precision="ieee"), score_scale, softcap, CAPPED)
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, NEG_INF)
        values = tl.dot(grad, tl.trans(v), input_precision="ieee")
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - finite(new_max)[:, None])
        rescale = tl.exp2(row_max - finite(new_max))
        row_sum = row_sum * rescale + strided_sums(weights)
        delta = delta * rescale + strided_sums(weights * values)
        row_max = new_max
    row_max = finite(row_max)
    inverse = 1.0 / tl.where(valid, row_sum, 1.0)
    delta = delta * inverse
    at = head.to(tl.int64) * tokens + token
    tl.store(max_ptr + at, row_max, mask=valid)
    tl.store(inverse_ptr + at, inverse, mask=valid)
    tl.store(delta_ptr + at, delta, mask=valid)
    acc = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
    for start in range(low, end, KEYS):
        key = start + tl.arange(0, KEYS)
        source = tl.load(path_ptr + path + key, mask=key < end, other=0)
        present = (key < end)[:, None] & (column < DIM)
        k = tl.load(k_ptr + source[:, None] * k_stride + column, mask=present, other=0.0)
        v = tl.load(v_ptr + source[:, None] * v_stride + column, mask=present, other=0.0)
        scores = scores_of(tl.dot(q, tl.trans(k), input_precision="ieee"), score_scale, softcap, CAPPED)
        visible = valid[:, None] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        weights = tl.where(visible, tl.exp2(scores - row_max[:, None]) * inverse[:, None], 0.0)
        values = tl.dot(grad, tl.trans(v), input_precision="ieee")
        slopes = slopes_of(weights, values, delta[:, None], scores, softcap, CAPPED)
        acc = tl.dot(slopes.to(k.dtype), k, acc, input_precision="ieee")
    tl.store(out_ptr + (token.to(tl.int64) * HEADS + head)[:, None] * DIM + column, acc * scale, mask=inside)


@triton.jit(do_not_specialize=["nodes", "tokens"])
def key_gradients_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    start_ptr,
    path_ptr,
    path_start_ptr,
    tiles_ptr,
    reader_ptr,
    max_ptr,
    inverse_ptr,
    delta_ptr,
    k_out_ptr,
    v_out_ptr,
    nodes,
    tokens,
    scale,
    score_scale,
    softcap,
    grad_stride,
    q_stride,
    k_stride,
    v_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    """A tile of a node's keys and values of one KV head, over the queries of the nodes that read them."""
    tile = tl.program_id(0)
    if tile >= tl.load(tiles_ptr + nodes):
        return
    node, kv_head = node_of(tiles_ptr, nodes, tile, NODES), tl.program_id(1)
    begin = tl.load(start_ptr + node).to(tl.int32)
    count = tl.load(start_ptr + node + 1).to(tl.int32) - begin
    before = (tl.load(path_start_ptr + node + 1) - tl.load(path_start_ptr + node)).to(tl.int32) - count
    first = (tile - tl.load(tiles_ptr + node)) * KEYS
    index, column = first + tl.arange(0, KEYS), tl.arange(0, DIM_BLOCK)[None, :]
    token, key = begin + index, before + index
    inside = (index < count)[:, None] & (column < DIM)
    k = tl.load(k_ptr + token.to(tl.int64)[:, None] * k_stride + kv_head * DIM + column, mask=inside, other=0.0)
    v = tl.load(v_ptr + token.to(tl.int64)[:, None] * v_stride + kv_head * DIM + column, mask=inside, other=0.0)
    of_k, of_v = tl.zeros([KEYS, DIM_BLOCK], tl.float32), tl.zeros([KEYS, DIM_BLOCK], tl.float32)
    for reader in range(node, tl.load(reader_ptr + node)):
        path = tl.load(path_start_ptr + reader)
        length = (tl.load(path_start_ptr + reader + 1) - path).to(tl.int32)
        of_reader = tl.load(start_ptr + reader).to(tl.int32)
        queries = tl.load(start_ptr + reader + 1).to(tl.int32) - of_reader
        earlier = length - queries  # positions before the reader's
        read = (index < count) & (key < length)
        read = read & (tl.load(path_ptr + path + key, mask=read, other=-1) == token)
        if tl.max(read.to(tl.int32), 0) > 0:
            low = tl.maximum(before + first - earlier, 0) // QUERIES * QUERIES
            high = queries
            if WINDOW > 0:
                high = tl.minimum(queries, before + first + KEYS - 1 + WINDOW - earlier)
            for member in range(GROUP):
                head = kv_head * GROUP + member
                for start in range(low, high, QUERIES):
                    query = start + tl.arange(0, QUERIES)
                    valid, place, position = query < queries, of_reader + query, earlier + query
                    present = valid[:, None] & (column < DIM)
                    q = tl.load(
                        q_ptr + place.to(tl.int64)[:, None] * q_stride + head * DIM + column, mask=present, other=0.0
                    )
                    grad = tl.load(
                        grad_ptr + place.to(tl.int64)[:, None] * grad_stride + head * DIM + column,
                        mask=present,
                        other=0.0,
                    )
                    at = tl.cast(head, tl.int64) * tokens + place
                    row_max = tl.load(max_ptr + at, mask=valid, other=0.0)
                    inverse = tl.load(inverse_ptr + at, mask=valid, other=0.0)
                    delta = tl.load(delta_ptr + at, mask=valid, other=0.0)
                    products = tl.dot(k, tl.trans(q), input_precision="ieee")  # [KEYS,QUERIES]
                    scores = scores_of(products, score_scale, softcap, CAPPED)
                    visible = read[:, None] & valid[None, :] & (key[:, None] <= position[None, :])
                    if WINDOW > 0:
                        visible = visible & (key[:, None] > position[None, :] - WINDOW)
                    weights = tl.where(visible, tl.exp2(scores - row_max[None, :]) * inverse[None, :], 0.0)
                    of_v = tl.dot(weights.to(grad.dtype), grad, of_v, input_precision="ieee")
                    values = tl.dot(v, tl.trans(grad), input_precision="ieee")
                    slopes = slopes_of(weights, values, delta[None, :], scores, softcap, CAPPED)
                    of_k = tl.dot(slopes.to(q.dtype), q, of_k, input_precision="ieee")
    offset = (token.to(tl.int64) * KV_HEADS + kv_head)[:, None] * DIM + column
    tl.store(k_out_ptr + offset, of_k * scale, mask=inside)
    tl.store(v_out_ptr + offset, of_v, mask=inside)


@gradients.attention_gradients.implement("triton", device="cuda")
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
    """The tensors may be slices of one tensor [T, ...]."""
    (tokens, heads, dim), kv_heads, nodes = q.shape, k.shape[1], len(query_start) - 1
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    if not tokens:
        return grad_q, grad_k, grad_v
    inputs = [x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (grad, q, k, v)]
    tree = (query_start, paths, path_start)
    rows = torch.empty(3, heads, tokens, dtype=torch.float32, device=q.device).unbind()
    readers = torch.empty(nodes, dtype=torch.int32, device=q.device)
    node_readers_kernel[(nodes,)](*tree, readers, nodes, NODES, num_warps=1, **EXACT)
    dim_block = max(16, int(next_power_of_2(dim)))
    narrow = CAPPED if softcap > 0.0 else NARROW
    shapes = FLOAT32 if q.dtype == torch.float32 else narrow if dim_block <= 128 else WIDE
    stages = 1 if shapes is WIDE and launch.shared_memory(q.device.index) < TWO_STAGES else 2
    numbers = (
        nodes,
        tokens,
        scale,
        scale * (1.0 if softcap > 0.0 else LOG2_E),
        softcap,
        *(x.stride(0) for x in inputs),
    )
    constants = (dim, window, softcap > 0.0)
    options = EXACT | {"num_stages": stages}
    of_queries, of_keys = shapes.query_tile, shapes.key_tile
    tiles, count = _tiles(query_start, tokens, of_queries[0])
    query_gradients_kernel[(count, heads)](
        *inputs, *tree, tiles, *rows, grad_q, *numbers, heads // kv_heads, heads, *constants, *of_queries,
        dim_block, NODES, num_warps=shapes.query_warps, **options,
    )  # fmt: skip
    tiles, count = _tiles(query_start, tokens, of_keys[1])
    key_gradients_kernel[(count, kv_heads)](
        *inputs, *tree, tiles, readers, *rows, grad_k, grad_v, *numbers, heads // kv_heads, kv_heads, *constants,
        *of_keys, dim_block, NODES, num_warps=shapes.key_warps, **options,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _tiles(query_start: Tensor, tokens: int, size: int) -> tuple[Tensor, int]:
    """How many tiles of `size` tokens come before each node, and in all, [R + 1] int32; and at most how many those are,
    which is known without waiting for the device."""
    of_nodes = (query_start.diff() + (size - 1)) // size
    return torch.nn.functional.pad(of_nodes.cumsum(0, dtype=torch.int32), (1, 0)), cdiv(tokens, size) + len(of_nodes)
