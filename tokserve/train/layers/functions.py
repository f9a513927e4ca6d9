"""The server's ops with a gradient: each computes what the layer computes, with the layer's packed weights.

Every function takes the master parameters (float32, as the checkpoint has them) beside the layer that holds them
rounded and packed: the layer makes the result, the masters receive the gradient.  Rounding a master counts as the
identity.  Masters are saved as torch saves tensors, so that changing one between forward and backward raises
torch's error.  Each is differentiable once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.layers.attention import Attention
from tokserve.layers.embedding import Embedding, Positions
from tokserve.layers.linear import GatedLinear, Linear
from tokserve.train.batch import PackedBatch
from tokserve.train.layers import backward
from tokserve.train.layers.products import Products


def applied(function: Any, *args: Any) -> Any:
    """`function.apply`, which has no types."""
    return function.apply(*args)


@dataclass(frozen=True, slots=True)
class Factors:
    """An adapter's masters for one shard of a layer: it adds scale * up down."""

    shard: str
    down: Tensor  # [r, inputs]
    up: Tensor  # [outputs, r]
    scale: float


def embedding(ids: Tensor, layer: Embedding, weight: Tensor) -> Tensor:  # [T] int64 -> [T, H]
    """Rows of the embedding, times its multiplier."""
    return applied(_Embedding, ids, layer, weight)


def positions(numbers: Tensor, layer: Positions, weight: Tensor) -> Tensor:  # [T] int64 -> [T, H]
    """Rows of the table of learned positions."""
    return applied(_Positions, numbers, layer, weight)


def linear(x: Tensor, layer: Linear, weights: Sequence[Tensor], biases: Sequence[Tensor], products: Products) -> Tensor:
    """x [T, K] W^T + b, [T, N]; of a gated layer the product before its activation.  `weights` and `biases` are the
    masters by shard, in the order of the output."""
    return applied(_Linear, x, layer, products, len(weights), *weights, *biases)


def low_rank(out: Tensor, x: Tensor, layer: Linear, factors: Sequence[Factors]) -> Tensor:
    """out, made from x by the layer, plus what the adapter in its slot 0 adds to some of its shards; changes out."""
    masters = [master for factor in factors for master in (factor.down, factor.up)]
    return applied(_LowRank, out, x, layer, [(f.shard, f.scale) for f in factors], *masters)


def with_values(projected: Tensor, layer: Attention) -> Tensor:  # [T, N] -> [T, (Hq + 2 Hk) D]
    """What attention takes, with the norms of its values."""
    return applied(_ValueNorm, projected, layer) if layer.value_eps else projected


def attention(qkv: Tensor, layer: Attention, batch: PackedBatch, table: Tensor, norms: Sequence[Tensor] = ()) -> Tensor:
    """Attention of the batch's tokens from their projections qkv [T, (Hq + 2 Hk) D]: [T, Hq D].  `norms`: the masters
    of the query and key norms, where the layer has them.  Of a gated layer, qkv is [T, (2 Hq + 2 Hk) D]."""
    mixed = applied(_Attention, qkv, layer, batch, table, *norms)
    return applied(_Gate, mixed, qkv, layer) if layer.gated else mixed


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, layer: Embedding, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.multiplier = layer.multiplier
        return layer(ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ids, weight = ctx.saved_tensors
        grad = grad.float() if ctx.multiplier == 1.0 else grad.float() * ctx.multiplier
        return None, None, ops.sum_rows(grad, ids, len(weight))


class _Positions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, layer: Positions, weight: Tensor) -> Tensor:
        ctx.save_for_backward(numbers, weight)
        ctx.first = layer.first
        return layer(numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        numbers, weight = ctx.saved_tensors
        return None, None, ops.sum_rows(grad.float(), numbers + ctx.first, len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear, products: Products, shards: int, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *masters)
        ctx.shards, ctx.products = shards, products
        return _product(layer, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *masters = ctx.saved_tensors
        weights, biases = masters[: ctx.shards], masters[ctx.shards :]
        needs_x, _, _, _, *needs = ctx.needs_input_grad
        grad_x = ctx.products.linear_input(grad, weights) if needs_x else None
        grads: list[Tensor | None] = [None] * len(masters)
        sizes = [len(weight) for weight in weights]
        if any(needs[: ctx.shards]):
            grads[: ctx.shards] = torch.split(ctx.products.linear_weight(grad, x), sizes)
        if any(needs[ctx.shards :]):
            grads[ctx.shards :] = torch.split(grad.float().sum(0), [len(bias) for bias in biases])
        return grad_x, None, None, None, *(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def _product(layer: Linear, x: Tensor) -> Tensor:
    if isinstance(layer, GatedLinear):
        return layer.quant.gated_linear(x, layer.packed, layer.bias, None)
    return layer(x)


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, x: Tensor, layer: Linear, shards: list[tuple[str, float]], *masters: Tensor
    ) -> Tensor:
        assert layer.lora is not None
        layer.lora.add(out, x, torch.zeros(len(x), dtype=torch.int32, device=x.device))
        ctx.mark_dirty(out)
        ctx.save_for_backward(x, *masters)
        ctx.sizes, ctx.shards = layer.shards, shards
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *masters = ctx.saved_tensors
        parts = dict(zip(ctx.sizes, torch.split(grad, list(ctx.sizes.values()), 1), strict=True))
        grad_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        grads: list[Tensor] = []
        for (shard, scale), down, up in zip(ctx.shards, masters[::2], masters[1::2], strict=True):
            down, up, part = down.to(x.dtype), up.to(x.dtype), parts[shard].contiguous()
            inner = ops.matrix_product(x, down.t(), torch.float32).mul_(scale).to(x.dtype)  # [T, r]
            grad_inner = ops.matrix_product(part, up, torch.float32).mul_(scale).to(x.dtype)
            grads += [backward.linear_weight(grad_inner, x), backward.linear_weight(part, inner)]
            grad_x += ops.matrix_product(grad_inner, down, torch.float32)
        return grad, grad_x.to(x.dtype), None, None, *grads


class _ValueNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, layer: Attention) -> Tensor:
        ctx.save_for_backward(projected)
        ctx.layer = layer
        return layer.with_values(projected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (projected,) = ctx.saved_tensors
        layer, size = ctx.layer, ctx.layer.kv_heads * ctx.layer.dim
        heads, of_heads = (x[:, -size:].contiguous().view(-1, layer.dim) for x in (projected, grad))
        ones = torch.ones(layer.dim, dtype=projected.dtype, device=grad.device)
        turned = ops.norm_gradients(of_heads, heads, ones, layer.value_eps)[0].view(-1, size)
        if not layer.keys_are_values:
            return torch.cat((grad[:, :-size], turned), 1), None
        kept = grad[:, :-size].clone()
        kept[:, -size:] += turned
        return kept, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layer: Attention, batch: PackedBatch, table: Tensor, *norms: Tensor) -> Tensor:
        ctx.save_for_backward(qkv, *norms)
        ctx.layer, ctx.batch, ctx.table = layer, batch, table
        return batch.attend(qkv, layer, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        qkv, *norms = ctx.saved_tensors
        layer, batch, table = ctx.layer, ctx.batch, ctx.table
        *before, v = _heads(qkv, layer)
        layers = [] if layer.q_norm is None or layer.k_norm is None else [layer.q_norm, layer.k_norm]
        projected = [part.contiguous() for part in before] if layers else before  # q and k before norms and rotation

        def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            if not layers:
                return q, k
            both = zip(layers, (q, k), strict=True)
            return tuple(norm(x.view(-1, norm.size)).view(x.shape) for norm, x in both)

        def norm_gradients(grads: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
            """Replaces the gradients of what the norms give by those of their inputs; returns those of the weights."""
            of_weights = []
            for number, norm in enumerate(layers):
                flat = (grads[number].view(-1, norm.size), inputs[number].view(-1, norm.size))
                turned, of_weight = ops.norm_gradients(*flat, norm.weight, norm.eps)
                grads[number] = turned.view(grads[number].shape)
                of_weights.append(of_weight)
            return of_weights

        q, k = projected if layer.norm_last else normed(*projected)
        q, k = turned = ops.rope(q, k, table, batch.positions, layer.interleaved)
        if layer.norm_last:
            q, k = normed(q, k)
        q = layer.grown(q, batch.positions)
        grads = list(batch.attention_gradients(grad.view(q.shape), (q, k, v), layer))
        grads[0] = layer.grown(grads[0], batch.positions)
        of_weights = norm_gradients(grads, turned) if layer.norm_last else []
        grads[:2] = backward.rope(grads[0], grads[1], table, batch.positions, interleaved=layer.interleaved)
        of_weights = of_weights if layer.norm_last else norm_gradients(grads, projected)
        if layer.gated:
            grads[0] = torch.stack([grads[0], torch.zeros_like(grads[0])], 2).flatten(1, 2)
        of_weights = of_weights if norms else []  # norms may have no weights
        return torch.cat([x.to(qkv.dtype) for x in grads], 1).flatten(1), None, None, None, *of_weights


def _heads(qkv: Tensor, layer: Attention) -> tuple[Tensor, Tensor, Tensor]:  # [T, N] -> [T, Hq, D], [T, Hk, D] twice
    """Queries, keys and values as they are projected."""
    width = layer.heads * (2 if layer.gated else 1)
    parts = qkv.view(len(qkv), -1, layer.dim)
    q, k, v = torch.split(parts, [width, layer.kv_heads, layer.kv_heads], 1)
    return q[:, ::2] if layer.gated else q, k, v


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, qkv: Tensor, layer: Attention) -> Tensor:
        ctx.save_for_backward(mixed, qkv)
        ctx.shape = len(qkv), layer.heads, layer.dim
        return ops.gate_heads(mixed.view(ctx.shape), qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        mixed, qkv = ctx.saved_tensors
        # the op's own sigmoid, because a row's bits of torch's may depend on where in the tensor the row is
        gate = ops.gate_heads(torch.ones(ctx.shape, device=grad.device), qkv.float())  # [T, Hq D]
        through = grad.float() * gate
        tokens, heads, dim = ctx.shape
        grad_qkv = torch.zeros_like(qkv)
        of_gates = grad_qkv[:, : 2 * heads * dim].view(tokens, heads, 2, dim)[:, :, 1]
        of_gates.copy_((through * mixed.float() * (1 - gate)).view(ctx.shape))
        return through.to(mixed.dtype), grad_qkv, None
