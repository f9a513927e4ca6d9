"""A mixture of experts with gradients: the router's choice and the experts' outputs are the server's.

Which experts a token has is not differentiable; gradients reach the router through the weights of those it chose.  The
bias that some routers add for the choice alone gets none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.families.mixtures.experts import Experts, Mixture, MixtureSpec, Router
from tokserve.layers.linear import Linear
from tokserve.layers.quant import gated
from tokserve.ops.mixture import MIN_SUM
from tokserve.train.layers import backward
from tokserve.train.layers.products import Products

Masters = Mapping[str, Tensor]


def router_logits(x: Tensor, layer: Linear, masters: Masters) -> Tensor:  # [T, H] -> [T, N] float32
    """Float32 products of a router, or of a shared block's gate.  `masters`: the layer's, by their names in it."""
    (name,) = layer.shards
    return _FloatLinear.apply(x, layer, masters[f"{name}.weight"], masters.get(f"{name}.bias"))  # type: ignore[no-untyped-call]


def choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Ids int32 and weights float32 [T, k] of each token's experts, from its logits [T, E]."""
    return _Choose.apply(logits, router)  # type: ignore[no-untyped-call]


def combine(
    x: Tensor,
    choice: tuple[Tensor, Tensor],
    layer: Experts,
    masters: Masters,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    products: Products,
) -> Tensor:  # [T, H] -> [T, H]
    """The chosen experts' outputs, weighted and added, and that of the shared block.

    `choice`: ids and weights.  `masters`: the experts', by their names in the module of all experts.  `shared` [T, H],
    `shared_gate` [T, 1] float32: of the shared block, before the sigmoid.
    """
    names = tuple(masters)
    values = (masters[name] for name in names)
    return _Combine.apply(x, *choice, shared, shared_gate, (layer, products, names), *values)  # type: ignore[no-untyped-call]


def loaded_together(spec: MixtureSpec, prefix: str) -> list[tuple[str, ...]]:
    """Names of the masters that are packed as one weight: each expert's gate and up projections."""
    if spec.stacked:
        return []
    gate, up, _ = spec.names
    return [tuple(f"{prefix}{expert}.{name}.weight" for name in (gate, up)) for expert in range(spec.experts)]


def kept_bytes(layer: Mixture, hidden: int) -> int:
    """What a mixture keeps of a token for its gradients, without the shared block: the input, logits and outputs."""
    return hidden * layer.experts.dtype.itemsize + 4 * layer.spec.experts + 8 * layer.spec.router.chosen


class _FloatLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return layer(x, torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = backward.linear_input(grad, [weight.to(x.dtype)]).to(x.dtype) if needs_x else None
        grad_weight = backward.linear_weight(grad, x.float()) if needs_weight else None
        return grad_x, None, grad_weight, grad.sum(0) if needs_bias else None


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        ids, weights = router.choose(logits)
        ctx.save_for_backward(logits, ids)
        ctx.spec = router.spec
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad: Tensor) -> Any:
        logits, ids = ctx.saved_tensors
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            scores = torch.sigmoid(leaf) if ctx.spec.sigmoid else torch.softmax(leaf, -1)
            weights = scores.gather(1, ids.long())
            if ctx.spec.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + ctx.spec.added).clamp(min=MIN_SUM)
            (grad_logits,) = torch.autograd.grad(weights * ctx.spec.scale, leaf, grad)
        return grad_logits, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        frame: tuple[Experts, Products, tuple[str, ...]],
        *masters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, ids, weights, shared, shared_gate, *masters)
        ctx.frame = frame
        return frame[0](x, ids, weights, shared, shared_gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, ids, weights, shared, shared_gate, *masters = ctx.saved_tensors
        layer, products, names = ctx.frame
        needs = dict(zip(names, ctx.needs_input_grad[6:], strict=True))
        upstream = grad.float()
        grad_shared, grad_gate = _shared_gradients(upstream, shared, shared_gate)
        grad_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        grad_weights = torch.zeros_like(weights)
        grads = _Gradients(layer, dict(zip(names, masters, strict=True)), needs, products)
        for expert in range(layer.spec.experts):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            rows, share = x[token], weights[token, slot, None]
            grad_rows, outputs = grads.of_expert(expert, rows, upstream[token] * share)
            grad_weights[token, slot] = (upstream[token] * outputs).sum(-1)
            grad_x[token] += grad_rows.float()  # a token has an expert once
        results = [grads.result[name] if needs[name] else None for name in names]
        return grad_x.to(x.dtype), None, grad_weights, grad_shared, grad_gate, None, *results


def _shared_gradients(
    upstream: Tensor, shared: Tensor | None, gate: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a shared block's output [T, H], and of its gate [T, 1]."""
    if shared is None:
        return None, None
    if gate is None:
        return upstream.to(shared.dtype), None
    open_ = torch.sigmoid(gate)
    of_gate = (upstream * shared.float()).sum(-1, keepdim=True) * open_ * (1.0 - open_)
    return (upstream * open_).to(shared.dtype), of_gate


class _Gradients:
    """Gradients of the experts' masters, zeros for those that no token had."""

    def __init__(self, layer: Experts, masters: Masters, needs: Mapping[str, bool], products: Products) -> None:
        self._layer, self._masters, self._needs, self._products = layer, masters, needs, products
        self.result = {
            name: torch.zeros(master.shape, dtype=torch.float32, device=master.device)
            for name, master in masters.items()
            if needs[name]
        }

    def of_expert(self, expert: int, rows: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """(gradient of the rows [n, H], the expert's outputs [n, H] float32) for that of the outputs, float32."""
        layer, spec = self._layer, self._layer.spec
        gate_up_bias = None if layer.gate_up_bias is None else layer.gate_up_bias[expert]
        down_bias = None if layer.down_bias is None else layer.down_bias[expert]
        both = layer.quant.gated_linear(rows, layer.gate_up[expert], gate_up_bias, None)
        inner = gated(both, spec.activation)
        outputs = layer.quant.linear(inner, layer.down[expert], down_bias, torch.float32)
        grad = upstream.to(rows.dtype)
        weights = self._weights(expert)
        grad_inner = self._products.linear_input(grad, weights[2:])
        grad_both = ops.activation_gradients(grad_inner.contiguous(), both, spec.activation, True)
        self._add(expert, grad_both, rows, grad, inner)
        return self._products.linear_input(grad_both, weights[:2]), outputs

    def _weights(self, expert: int) -> Sequence[Tensor]:
        """Gate [I, H], up [I, H] and down [H, I] masters of an expert."""
        spec = self._layer.spec
        if not spec.stacked:
            return [self._masters[f"{expert}.{name}.weight"] for name in spec.names]
        gate, up = self._masters["gate_up_proj"][expert].chunk(2)
        return [gate, up, self._masters["down_proj"][expert]]

    def _add(self, expert: int, grad_both: Tensor, rows: Tensor, grad: Tensor, inner: Tensor) -> None:
        """Put the gradients of an expert's masters into `result`."""
        spec, needs, result = self._layer.spec, self._needs, self.result
        names = spec.names
        gate, up, down = (f"{expert}.{name}.weight" for name in names)
        if needs.get(gate) or needs.get(up) or needs.get("gate_up_proj"):
            whole = self._products.linear_weight(grad_both, rows)
            if spec.stacked:
                result["gate_up_proj"][expert] = whole
            else:
                for name, half in zip((gate, up), whole.chunk(2), strict=True):
                    if needs[name]:
                        result[name].copy_(half)
        if needs.get(down) or needs.get("down_proj"):
            target = result["down_proj"][expert] if spec.stacked else result[down]
            target.copy_(self._products.linear_weight(grad, inner))
        if needs.get("gate_up_proj_bias"):
            result["gate_up_proj_bias"][expert] = grad_both.float().sum(0)
        if needs.get("down_proj_bias"):
            result["down_proj_bias"][expert] = grad.float().sum(0)
