"""The server's decoder with master parameters: the one file here that knows how a `Decoder` is put together.

The decoder's layers hold the weights rounded and packed, as a server that was given these masters would; `sync` packs
again what has changed.  `hidden` runs the blocks with gradients; what a block computes on the way is kept for the
backward pass while the budget lasts, else computed again there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokserve.families.mixtures.experts import Mixture
from tokserve.features.lora.layer import LoraSlots
from tokserve.layers.low_rank import LowRank
from tokserve.models.decoder import Decoder
from tokserve.models.provenance import EMBEDDING, HEAD
from tokserve.train import scores, support
from tokserve.train.adapters import lora_a_name, lora_b_name
from tokserve.train.batch import PackedBatch
from tokserve.train.binding import Binding
from tokserve.train.byte_budget import ByteBudget
from tokserve.train.fingerprint import fingerprint
from tokserve.train.layers import experts, functions, norms
from tokserve.train.layers.blocks import BlockPass, Masters, joined, kept_bytes, norm_masters
from tokserve.train.scores import Items

POSITIONS = "model.embed_positions.weight"


class DecoderModules:
    """A decoder's layers, and the names of the masters of each.  Raises StartError for layers without a gradient on the
    binding's device."""

    def __init__(self, decoder: Decoder, binding: Binding) -> None:
        support.check_spec(decoder.spec)
        self.decoder = decoder
        self.page = binding.page  # tokens of a block of keys
        self.vocab = decoder.spec.vocab
        self.num_positions = len(decoder.rope_table)
        self.head_name = EMBEDDING if decoder.spec.tied else HEAD
        self._norm_name = f"model.{decoder.spec.norm_name}"
        self._parameters = decoder.parameters_by_name()
        self._linears = decoder.named_linears()
        self._targets = decoder.adapter_targets()
        self._groups = self._loaded_together()
        self._products = binding.products
        self._adapter: dict[str, float] = {}  # by module, what the product of its factors is multiplied by
        self.adapted = False  # whether the adapter counts
        self._packed: dict[str, int] = {}  # by name, the fingerprint of the values that are packed

    def _loaded_together(self) -> list[tuple[str, ...]]:
        """Names of masters, those that one layer packs as one weight together."""
        groups: dict[str, list[str]] = {}
        for target, (name, _) in self._targets.items():
            groups.setdefault(name, []).append(f"{target}.weight")
        together = [tuple(names) for names in groups.values()]
        for number, block in enumerate(self.decoder.blocks):
            if isinstance(block.mlp, Mixture):
                prefix = joined("model.layers", str(number), block.mlp_name, block.mlp.spec.experts_name, "")
                together += experts.loaded_together(block.mlp.spec, prefix)
        single = self._parameters.keys() - {name for names in together for name in names}
        return together + [(name,) for name in self._parameters if name in single]

    def sync(self, masters: Masters, *, everything: bool = False) -> None:
        """Round and pack the masters that changed since the last call; what is loaded together is given together."""
        for names in self._groups:
            if names[0] in masters and self._changed(names, masters, everything):
                for name in names:
                    self._parameters[name].load(masters[name].detach())
        self._sync_adapter(masters, everything)

    @property
    def constants(self) -> set[str]:
        """Names of masters that have no gradient: biases that routers add for the choice alone, factors of layers."""
        factors = {
            joined("model.layers", str(number), block.factor_name)
            for number, block in enumerate(self.decoder.blocks)
            if block.factor is not None
        }
        return factors | {
            joined("model.layers", str(number), block.mlp_name, name)
            for number, block in enumerate(self.decoder.blocks)
            if isinstance(block.mlp, Mixture) and (name := block.mlp.spec.router.correction_bias) is not None
        }

    @property
    def names(self) -> list[str]:
        """The names of all masters."""
        return list(self._parameters)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the projections, by the name of their module."""
        return {
            target: (self._linears[name].inputs, self._linears[name].shards[shard])
            for target, (name, shard) in self._targets.items()
        }

    @property
    def renames(self) -> tuple[tuple[str, str], ...]:
        """Prefixes of names in checkpoints, and what they are here."""
        return self.decoder.spec.renames

    def adapt(self, scales: Mapping[str, float], rank: int) -> None:
        """Give the layers a slot for an adapter of rank up to `rank`, in place of any other, and use it.  `scales`: by
        module, what the product of its factors is multiplied by.  None: no adapter."""
        self._adapter, self.adapted = dict(scales), bool(scales)
        for linear in self._linears.values():
            linear.lora = LoraSlots(linear.inputs, linear.shards, 1, rank, linear.dtype) if scales else None
        for name in [name for name in self._packed if name not in self._parameters]:
            del self._packed[name]

    def _sync_adapter(self, masters: Masters, everything: bool) -> None:
        for module, scale in self._adapter.items() if self.adapted else ():
            names = (lora_a_name(module), lora_b_name(module))
            if names[0] in masters and self._changed(names, masters, everything):
                name, shard = self._targets[module]
                linear = self._linears[name]
                assert isinstance(linear.lora, LoraSlots)
                factors = [masters[name].detach() for name in names]
                linear.lora.place(0, shard, linear.adapter_part(shard, LowRank(factors[0], factors[1], scale)))

    def _changed(self, names: Sequence[str], masters: Masters, everything: bool) -> bool:
        stamps = {name: fingerprint(masters[name]) for name in names}
        changed = everything or any(self._packed.get(name) != stamp for name, stamp in stamps.items())
        self._packed |= stamps
        return changed

    def hidden(
        self,
        batch: PackedBatch,
        rows: Tensor,
        masters: Masters,
        budget: ByteBudget,
        streams: list[Tensor] | None = None,
    ) -> Tensor:  # [n] -> [n, H]
        """Hidden states after the final norm of the batch's tokens `rows` int64.  `streams`: a list that the residual
        stream [T, H] before each block is appended to."""
        x = functions.embedding(batch.input_ids, self.decoder.embedding, masters[EMBEDDING])
        if self.decoder.position_table is not None:
            added = functions.positions(batch.positions, self.decoder.position_table, masters[POSITIONS])
            x = norms.add_residual(added, x, 1.0)
        for number in range(len(self.decoder.blocks)):
            if streams is not None:
                streams.append(x)
            prefix = f"model.layers.{number}."
            of_block = {
                name.removeprefix(prefix): master
                for name, master in masters.items()
                if name.startswith(prefix) and (name in self._parameters or self.adapted)
            }
            x = self._block(number, x, batch, of_block, budget)
        return norms.norm(x.index_select(0, rows), self.decoder.norm, norm_masters(masters, self._norm_name))

    def logprobs(
        self, hidden: Tensor, masters: Masters, items: Items, budget: ByteBudget
    ) -> Tensor:  # [m, H] -> [n] float32
        """The logprobs of what is scored of the hidden states."""
        return scores.logprobs(hidden, self.decoder.head, masters[self.head_name], items, budget, self._products)

    def _block(self, number: int, x: Tensor, batch: PackedBatch, masters: Masters, budget: ByteBudget) -> Tensor:
        spec = self.decoder.spec
        block, rope = self.decoder.blocks[number], spec.blocks[number].attention.rope
        table, scales = self.decoder.rope_tables[spec.ropes.index(rope)], self._scales(f"model.layers.{number}.")
        if not torch.is_grad_enabled() or budget.take(len(x) * kept_bytes(block)):
            return BlockPass(block, batch, table, masters, scales, self._products).run(x)
        frame = (block, batch, table, scales, self._products, tuple(masters))
        return functions.applied(_Recomputed, frame, x, *masters.values())

    def _scales(self, prefix: str) -> dict[str, float]:
        scales = self._adapter if self.adapted else {}
        return {name.removeprefix(prefix): scale for name, scale in scales.items() if name.startswith(prefix)}


class _Recomputed(torch.autograd.Function):
    """A block that keeps its input alone and runs again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, frame: tuple[Any, ...], x: Tensor, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *masters)
        ctx.frame = frame
        block, batch, table, scales, products, names = frame
        return BlockPass(block, batch, table, dict(zip(names, masters, strict=True)), scales, products).run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *masters = ctx.saved_tensors
        block, batch, table, scales, products, names = ctx.frame
        needs = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_(needed) for one, needed in zip([x, *masters], needs, strict=True)]
            leaves = dict(zip(names, inputs[1:], strict=True))
            out = BlockPass(block, batch, table, leaves, scales, products).run(inputs[0])
        differentiable = [one for one in inputs if one.requires_grad]
        grads = iter(torch.autograd.grad(out, differentiable, grad))
        return None, *(next(grads) if needed else None for needed in needs)
