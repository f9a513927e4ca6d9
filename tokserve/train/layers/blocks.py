"""A decoder's block with gradients: the layers and the order of the server's, with a master beside each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve.families.mixtures.experts import Mixture
from tokserve.families.recurrent.layers import Recurrent
from tokserve.layers.attention import Attention
from tokserve.layers.linear import GatedLinear, Linear
from tokserve.layers.mlp import GatedMLP
from tokserve.layers.norm import NoNorm
from tokserve.layers.parameter import as_dense
from tokserve.models.block import DecoderBlock
from tokserve.train.adapters import lora_a_name, lora_b_name
from tokserve.train.batch import PackedBatch
from tokserve.train.layers import experts, functions, norms
from tokserve.train.layers.activations import activate
from tokserve.train.layers.products import Products
from tokserve.train.layers.recurrent import recurrence

Masters = Mapping[str, Tensor]


def kept_bytes(block: DecoderBlock) -> int:
    """What a block keeps of a token for its gradients."""
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, Attention | Recurrent) and isinstance(mlp, GatedMLP | Mixture)  # others are refused
    projections = attention.projections() if isinstance(attention, Recurrent) else [attention.qkv]
    hidden, of_experts = projections[0].inputs, 0
    if isinstance(mlp, Mixture):
        of_experts = experts.kept_bytes(mlp, hidden)
    dense = mlp.shared if isinstance(mlp, Mixture) else mlp
    widths = sum(linear.outputs for linear in projections) + attention.out.inputs
    widths += 0 if dense is None else dense.gate_up.outputs + dense.down.inputs
    rows = 6 if block.norm_names.after_mlp else 4  # of the residual stream's width
    return int((widths + rows * hidden) * attention.dtype.itemsize) + of_experts


def norm_masters(masters: Masters, name: str) -> list[Tensor]:
    """The masters of a norm: its weight and, if there is one, its bias; none without a name."""
    names = (f"{name}.weight", f"{name}.bias") if name else ()
    return [masters[one] for one in names if one in masters]


def joined(*names: str) -> str:
    """A dotted name; empty parts but the last do not count."""
    return ".".join([*filter(None, names[:-1]), names[-1]])


def within(masters: Masters, module: str) -> dict[str, Tensor]:
    """The masters of a module ("": the block itself), by their names in it."""
    prefix = joined(module, "")
    return {name.removeprefix(prefix): master for name, master in masters.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class BlockPass:
    """One run of a block over a batch.  `masters`: by their names in the block; `scales`: of the adapter, by module."""

    block: DecoderBlock
    batch: PackedBatch
    table: Tensor  # of the rotation of positions
    masters: Masters
    scales: Mapping[str, float]
    products: Products

    def run(self, residual: Tensor) -> Tensor:
        """The residual stream [T, H] after the block."""
        block, masters = self.block, self.masters
        attention, mlp, names, multiplier = block.attention, block.mlp, block.norm_names, block.residual_multiplier
        x = self._norm(residual, block.attention_norm, names.before_attention)
        if isinstance(attention, Recurrent):
            mixed = self._recurrence(x, attention, block.attention_name)
        else:
            assert isinstance(attention, Attention)  # others are refused
            mixed = self._attention(x, attention, block.attention_name)
        mixed = self._norm(mixed, block.attention_post_norm, names.after_attention)
        if block.parallel:
            x = self._norm(residual, block.mlp_norm, names.before_mlp) if block.has_two_norms else x
            residual = norms.add_residual(mixed, residual, multiplier)
        else:
            before_mlp = norm_masters(masters, names.before_mlp)
            x, residual = norms.add_norm(mixed, residual, block.mlp_norm, before_mlp, multiplier)
        if isinstance(mlp, Mixture):
            x = self._mixture(x, mlp, block.mlp_name)
        else:
            assert isinstance(mlp, GatedMLP)  # others are refused
            x = self._gated_mlp(x, mlp, block.mlp_name)
        x = self._norm(x, block.mlp_post_norm, names.after_mlp)
        total = norms.add_residual(x, residual, multiplier)
        return total if block.factor is None else norms.scaled(total, block.factor)

    def _attention(self, x: Tensor, attention: Attention, module: str) -> Tensor:
        norms = [master for name in attention.norm_names for master in norm_masters(self.masters, f"{module}.{name}")]
        projected = self._linear(x, attention.qkv, module)
        projected = functions.with_values(projected, attention)
        mixed = functions.attention(projected, attention, self.batch, self.table, norms)
        return self._linear(mixed, attention.out, module)

    def _recurrence(self, x: Tensor, layer: Recurrent, module: str) -> Tensor:
        vectors = {name: self.masters[f"{module}.{name}"] for name in layer.vectors()}
        projected = [self._linear(x, linear, module) for linear in layer.projections()]
        return self._linear(recurrence(projected, layer, self.batch, vectors), layer.out, module)

    def _linear(self, x: Tensor, layer: Linear, module: str) -> Tensor:
        names = {shard: joined(module, shard) for shard in layer.shards}
        weights = [self._rows(f"{name}.weight", layer, shard) for shard, name in names.items()]
        biases = [self._rows(f"{name}.bias", layer, shard) for shard, name in names.items() if layer.bias is not None]
        out = functions.linear(x, layer, weights, biases, self.products)
        factors = [
            functions.Factors(
                shard, self.masters[lora_a_name(name)], self._rows(lora_b_name(name), layer, shard), self.scales[name]
            )
            for shard, name in names.items()
            if name in self.scales
        ]
        return functions.low_rank(out, x, layer, factors) if factors else out

    def _rows(self, name: str, layer: Linear, shard: str) -> Tensor:
        """A master whose rows are a shard's outputs, in the order in which the layer has them."""
        master = self.masters[name]
        if self.block.transposed and name == joined(*name.split(".")[:-2], shard, "weight"):
            master = master.t()
        return as_dense(layer.part(shard, master))

    def _norm(self, x: Tensor, layer: NoNorm, name: str) -> Tensor:
        return norms.norm(x, layer, norm_masters(self.masters, name))

    def _gated_mlp(self, x: Tensor, mlp: GatedMLP, module: str) -> Tensor:
        is_gated = isinstance(mlp.gate_up, GatedLinear)
        if is_gated and not torch.is_grad_enabled() and not self.scales:
            x = mlp.gate_up(x)
        else:
            x = activate(self._linear(x, mlp.gate_up, module), mlp.activation, gated=is_gated)
        return self._linear(x, mlp.down, module)

    def _mixture(self, x: Tensor, mixture: Mixture, module: str) -> Tensor:
        named, spec = within(self.masters, module), mixture.spec
        choice = experts.choose(experts.router_logits(x, mixture.router.linear, named), mixture.router)
        shared = gate = None
        if mixture.shared is not None:
            shared = self._gated_mlp(x, mixture.shared, joined(module, spec.shared_name))
        if mixture.shared_gate is not None:
            gate = experts.router_logits(x, mixture.shared_gate, named)
        of_experts = within(named, spec.experts_name)
        return experts.combine(x, choice, mixture.experts, of_experts, shared, gate, self.products)
