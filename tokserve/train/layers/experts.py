"""A mixture of experts with gradients: the router's choice and the experts' outputs are the server's.

Which experts a token has is not differentiable; gradients reach the router through the weights of those it chose.  The
bias that some routers add for the choice alone gets none.

The backward pass sorts the choices by expert, those of one in the order of their tokens.  A token adds up the gradients
from its experts in the order of its choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.families.mixtures.experts import Experts, Mixture, MixtureSpec, Router
from tokserve.layers.linear import Linear
from tokserve.layers.quant import Packed, gated
from tokserve.ops.dense import PackedWeight
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
        spec = ctx.spec
        return ops.route_gradients(grad, logits, ids, spec.sigmoid, spec.normalize, spec.added, spec.scale), None


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
        experts = _Experts(layer, dict(zip(names, masters, strict=True)), needs, products)
        grad_x, grad_weights = _expert_gradients(experts, grad, x, ids, weights)
        grad_shared, grad_gate = _shared_gradients(grad, shared, shared_gate)
        of_masters = experts.of_masters()
        return grad_x, None, grad_weights, grad_shared, grad_gate, None, *map(of_masters.get, names)


def _shared_gradients(grad: Tensor, shared: Tensor | None, gate: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a shared block's output [T, H], and of its gate [T, 1]."""
    if shared is None or gate is None:
        return (None if shared is None else grad), None
    share = 1.0 / (1.0 + torch.exp(-gate))
    of_gate = ops.row_products(grad, shared)[:, None] * share * (1.0 - share)
    return (grad.float() * share).to(shared.dtype), of_gate


def _expert_gradients(
    experts: _Experts, grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, H] and of the choices' weights [T, k], for that of the weighted sum [T, H]; those of the
    masters are in `experts`."""
    owners, order = torch.sort(ids.flatten(), stable=True)
    starts = torch.searchsorted(owners, torch.arange(experts.count + 1, dtype=owners.dtype, device=owners.device))
    tokens, shares = order // ids.shape[1], weights.flatten().index_select(0, order)
    of_rows, of_shares = x.new_empty(len(order), x.shape[1]), torch.empty_like(shares)
    for expert, rows in experts.parts(starts.int(), len(order)):
        inputs, upstream, share = x[tokens[rows]], grad[tokens[rows]], shares[rows, None]
        both = experts.product(expert, inputs)
        inner = gated(both, experts.activation)
        through = experts.through_down(expert, upstream)
        of_shares[rows] = ops.row_products(through, inner)
        grad_inner = (through.float() * share).to(x.dtype)
        grad_both = ops.activation_gradients(grad_inner, both, experts.activation, True)
        of_rows[rows] = experts.through_up(expert, grad_both)
        experts.add(expert, grad_both, inputs, (upstream.float() * share).to(x.dtype), inner)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    grad_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place in places.view(ids.shape).unbind(1):
        grad_x += of_rows.index_select(0, place)
    return grad_x.to(x.dtype), of_shares.index_select(0, places).view(ids.shape)


class _Experts:
    """A layer's experts in the backward pass: expert after expert with the products of dense layers, or all together.

    Where methods take an expert, None stands for all, with the rows of all.  The gradients of masters are zero for
    experts that no token had.
    """

    def __init__(self, layer: Experts, masters: Masters, needs: Mapping[str, bool], products: Products) -> None:
        spec, hidden = layer.spec, layer.hidden
        self._layer, self._masters, self._needs, self._products = layer, masters, needs, products
        self.activation, self.count = spec.activation, spec.experts
        self._starts = torch.empty(0, dtype=torch.int32)
        self._of_up = self._zeros(slice(0, -1), 2 * spec.inner, hidden)
        self._of_down = self._zeros(slice(-1, None), hidden, spec.inner)

    def _names(self, expert: int) -> list[str]:
        """The masters of an expert: of gate and up, or of both together, and of down."""
        if self._layer.spec.stacked:
            return ["gate_up_proj", "down_proj"]
        return [f"{expert}.{name}.weight" for name in self._layer.spec.names]

    def _zeros(self, shards: slice, *shape: int) -> Tensor | None:
        """Zeros for the gradients of these shards of all experts; None if no master needs one."""
        if not any(self._needs[name] for expert in range(self.count) for name in self._names(expert)[shards]):
            return None
        return torch.zeros(self.count, *shape, device=next(iter(self._masters.values())).device)

    def parts(self, starts: Tensor, count: int) -> Iterator[tuple[int | None, slice]]:
        """The experts, and their rows of all.  `starts` [E + 1] int32: where the rows of each expert begin."""
        if self._products.grouped:
            self._starts = starts
            yield None, slice(0, count)
            return
        for expert, (first, end) in enumerate(pairwise(starts.tolist())):
            if end > first:
                yield expert, slice(first, end)

    def product(self, expert: int | None, rows: Tensor) -> Tensor:  # [n, H] -> [n, 2 I]
        """What the activations are made of."""
        layer = self._layer
        if expert is None:
            return ops.expert_products(rows, _weights(layer.gate_up), self._starts, True)
        return layer.quant.gated_linear(rows, layer.gate_up[expert], None, None)

    def through_down(self, expert: int | None, grad: Tensor) -> Tensor:  # [n, H] -> [n, I], may be float32
        """The gradient of the inputs of the down projection."""
        if expert is None:
            return ops.expert_products(grad, _weights(self._layer.down), self._starts, False, torch.float32)
        return self._products.linear_input(grad, self._of(expert)[-1:])

    def through_up(self, expert: int | None, grad: Tensor) -> Tensor:  # [n, 2 I] -> [n, H]
        """The gradient of the inputs of the gate and up projections."""
        if expert is None:
            return ops.expert_products(grad, _weights(self._layer.gate_up), self._starts, False)
        return self._products.linear_input(grad, self._of(expert)[:-1])

    def _of(self, expert: int) -> list[Tensor]:
        """The masters of an expert."""
        masters = [self._masters[name] for name in self._names(expert)]
        return [master[expert] for master in masters] if self._layer.spec.stacked else masters

    def add(self, expert: int | None, grad_both: Tensor, rows: Tensor, grad: Tensor, inner: Tensor) -> None:
        """Keep the gradients of the weights of gate and up [2 I, H], and of down [H, I]."""
        for total, upstream, inputs in ((self._of_up, grad_both, rows), (self._of_down, grad, inner)):
            if total is not None and expert is None:
                total.copy_(ops.expert_weight_gradients(upstream, inputs, self._starts))
            elif total is not None:
                total[expert] = self._products.linear_weight(upstream, inputs)

    def of_masters(self) -> dict[str, Tensor]:
        """The gradients of those that need one, by name."""
        if self._layer.spec.stacked:
            parts = dict(zip(self._names(0), (self._of_up, self._of_down), strict=True))
        else:
            parts = {}
            for expert in range(self.count):
                gate, up, down = self._names(expert)
                halves = (None, None) if self._of_up is None else self._of_up[expert].chunk(2)
                parts |= {
                    gate: halves[0],
                    up: halves[1],
                    down: None if self._of_down is None else self._of_down[expert],
                }
        return {name: part for name, part in parts.items() if part is not None and self._needs[name]}


def _weights(packed: Sequence[Packed | None]) -> list[Tensor]:
    """The weights of experts on a device whose ops pack none in another layout."""
    return [weight.packed for weight in packed if isinstance(weight, PackedWeight)]
