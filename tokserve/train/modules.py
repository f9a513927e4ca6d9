"""The server's decoder with master parameters: the one file here that knows how a `Decoder` is put together.

The decoder's layers hold the weights rounded and packed, as a server that was given these masters would; `sync` packs
again what has changed.  `hidden` runs the blocks with gradients; what a block computes on the way is kept for the
backward pass while there is room, else computed again there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from tokserve.layers.linear import GatedLinear, Linear
from tokserve.models.decoder import Block, Decoder
from tokserve.train import functions, scores
from tokserve.train.batch import PackedBatch
from tokserve.train.room import Room
from tokserve.train.scores import Items

Masters = Mapping[str, Tensor]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class DecoderModules:
    """A decoder's layers, and the names of the masters of each."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.vocab = decoder.spec.vocab
        self.num_positions = len(decoder.rope_table)
        self.head_name = EMBEDDING if decoder.spec.tied else HEAD
        self._parameters = decoder.parameters_by_name()
        self._groups = self._loaded_together()
        self._packed: dict[str, tuple[int, int]] = {}  # by name, which values of a master are packed

    def _loaded_together(self) -> list[tuple[str, ...]]:
        """Names of masters, those that one layer packs as one weight together."""
        groups: dict[int, list[str]] = {}
        for name, (linear, _) in self.decoder.projections().items():
            groups.setdefault(id(linear), []).append(f"{name}.weight")
        joined = [tuple(names) for names in groups.values()]
        single = self._parameters.keys() - {name for names in joined for name in names}
        return joined + [(name,) for name in self._parameters if name in single]

    def sync(self, masters: Masters, *, everything: bool = False) -> None:
        """Round and pack the masters that changed since the last call."""
        for names in self._groups:
            stamps = {name: (masters[name]._version, masters[name].data_ptr()) for name in names}
            if everything or any(self._packed.get(name) != stamp for name, stamp in stamps.items()):
                for name in names:
                    self._parameters[name].load(masters[name].detach())
                self._packed |= stamps

    def hidden(self, batch: PackedBatch, rows: Tensor, masters: Masters, room: Room) -> Tensor:  # [n] -> [n, H]
        """Hidden states after the final norm of the batch's tokens `rows` int64."""
        x = functions.embedding(batch.input_ids, self.decoder.embedding, masters[EMBEDDING])
        for number, block in enumerate(self.decoder.blocks):
            prefix = f"model.layers.{number}."
            own = {name.removeprefix(prefix): master for name, master in masters.items() if name.startswith(prefix)}
            x = self._block(block, x, batch, own, room)
        return functions.rms_norm(x.index_select(0, rows), self.decoder.norm, masters[NORM])

    def logprobs(self, hidden: Tensor, masters: Masters, items: Items, room: Room) -> Tensor:  # [m, H] -> [n] float32
        """The logprobs of what is scored of the hidden states."""
        return scores.logprobs(hidden, self.decoder.head, masters[self.head_name], items, room)

    def _block(self, block: Block, x: Tensor, batch: PackedBatch, masters: Masters, room: Room) -> Tensor:
        table = self.decoder.rope_table
        if not torch.is_grad_enabled() or room.take(len(x) * kept_bytes(block)):
            return run_block(block, x, batch, table, masters)
        return cast(Tensor, _Recomputed.apply((block, batch, table, tuple(masters)), x, *masters.values()))


def kept_bytes(block: Block) -> int:
    """What a block keeps of a token for its gradients."""
    attention, mlp = block.attention, block.mlp
    widths = attention.qkv.outputs + attention.out.inputs + mlp.gate_up.outputs + mlp.down.inputs
    return int((widths + 4 * attention.qkv.inputs) * attention.dtype.itemsize)


def run_block(block: Block, residual: Tensor, batch: PackedBatch, table: Tensor, masters: Masters) -> Tensor:
    """The residual stream [T, H] after a block.  `masters`: by their names in the block."""
    x = functions.rms_norm(residual, block.attention_norm, masters["input_layernorm.weight"])
    norms = [masters[name] for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if name in masters]
    qkv = _linear(x, block.attention.qkv, "self_attn", masters)
    mixed = functions.attention(qkv, block.attention, batch, table, norms)
    x = _linear(mixed, block.attention.out, "self_attn", masters)
    x, residual = functions.add_rms_norm(x, residual, block.mlp_norm, masters["post_attention_layernorm.weight"])
    return residual + _linear(_gated(x, block.mlp.gate_up, masters), block.mlp.down, "mlp", masters)


def _linear(x: Tensor, layer: Linear, module: str, masters: Masters) -> Tensor:
    weights = [masters[f"{module}.{shard}.weight"] for shard in layer.shards]
    biases = [] if layer.bias is None else [masters[f"{module}.{shard}.bias"] for shard in layer.shards]
    return functions.linear(x, layer, weights, biases)


def _gated(x: Tensor, layer: GatedLinear, masters: Masters) -> Tensor:
    if torch.is_grad_enabled():
        return functions.gate(_linear(x, layer, "mlp", masters), layer.activation)
    return layer(x)


class _Recomputed(torch.autograd.Function):
    """`run_block` that keeps its input alone and runs again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, block: tuple[Any, ...], x: Tensor, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *masters)
        ctx.block = block
        layer, batch, table, names = block
        return run_block(layer, x, batch, table, dict(zip(names, masters, strict=True)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *masters = ctx.saved_tensors
        layer, batch, table, names = ctx.block
        needs = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_(need) for one, need in zip([x, *masters], needs, strict=True)]
            out = run_block(layer, inputs[0], batch, table, dict(zip(names, inputs[1:], strict=True)))
        wanted = [one for one in inputs if one.requires_grad]
        grads = iter(torch.autograd.grad(out, wanted, grad))
        return None, *(next(grads) if need else None for need in needs)
