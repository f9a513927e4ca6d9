"""A linear layer whose rows come from one or several checkpoint tensors.

q, k and v are *shards* of one weight, so that a layer is one matrix product; so are gate and up, whose product ends in
the activation.  The layer packs shards one by one as they come; a quantization method that needs the whole weight gets
it when the last one is there, and only the packed form is kept.  Shards that the method accepts as they are stored are
packed so, if they can be joined.  Adapters add to the output of shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.low_rank import LayerAdapters, LowRank
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import Span, Split, is_whole
from tokserve.layers.parameter import Parameter, StoredWeight, as_dense, part_of
from tokserve.layers.places import NOWHERE, MatrixPlace, TensorPart, VectorPlace
from tokserve.layers.quant import Packed, gated, pack_rows

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]
FUSED = ("silu", "gelu_tanh")  # activations that the gated product takes


class Linear:
    """y = x W^T + b; `shards` maps names to numbers of output features, in the order of the output.

    `split`: how the ranks of the options' group divide the weight.  By "column", each computes a part of every shard's
    outputs, equal ones unless `rows` says which of a shard, and in which order; by "row", each takes a part of the
    inputs, and y is the sum of the ranks' results in rank order, of which the first has the bias; with `adds` False a
    rank's own result.
    `inputs` and `shards` are the checkpoint's; the attributes of these names are the rank's.
    `packed`: the weight as the method packs it; a tied layer is given its owner's.
    """

    packed: Packed

    def __init__(
        self,
        inputs: int,
        shards: Mapping[str, int],
        options: LayerOptions,
        *,
        bias: bool = False,
        split: Split | None = None,
        rows: Mapping[str, Sequence[Span]] | None = None,
        adds: bool = True,
    ) -> None:
        self._whole = {shard: (outputs, inputs) for shard, outputs in shards.items()}
        self._group, self._split = options.group, split if options.group.size > 1 else None
        self._adds = adds and self._split == "row"
        self.inputs = self._group.share(inputs, "the input width") if split == "row" else inputs
        spans = rows or {}
        if self._split == "column":
            spans = {
                shard: spans[shard] if shard in spans else (self._group.span(outputs, shard),)
                for shard, outputs in shards.items()
            }
        else:
            spans = {shard: parts for shard, parts in spans.items() if not is_whole(parts, shards[shard])}
        self._spans = {shard: tuple(parts) for shard, parts in spans.items()}
        self.shards = dict(shards) | {shard: sum(span.length for span in spans) for shard, spans in self._spans.items()}
        self.outputs = sum(self.shards.values())
        self.dtype = options.dtype
        self.quant = options.quant
        self.bias = torch.zeros(self.outputs, dtype=self.dtype, device=ops.torch_device) if bias else None  # [outputs]
        self.lora: LayerAdapters | None = None  # where adapters are served
        self._weight: Any = None  # while loading: some rows of it, packed, or the tensor [outputs, inputs]
        self._awaited: set[str] = set()
        self._stored: dict[str, StoredWeight] = {}  # shards as they are stored, while loading

    def parameters(self) -> dict[str, Parameter]:
        """`<shard>.weight` and, with a bias, `<shard>.bias`."""
        parameters = {}
        kept = self.quant.kept_dtype(self.dtype)
        for shard, shape in self._whole.items():
            load_stored = partial(self.load_stored, shard)
            parameters[f"{shard}.weight"] = Parameter(
                shape,
                partial(self.load, shard),
                kept,
                load_stored,
                rounded=self.dtype,
                places=partial(self.places, shard),
                share=self.shards[shard] * self.inputs / (shape[0] * shape[1]),
                held=self.held(shard),
            )
            if self.bias is not None:
                places, held = partial(self.bias_places, shard), self.held(shard)
                if self._split == "row":
                    held = None if self._group.rank == 0 else NOWHERE
                load_bias = partial(self.load_bias, shard)
                parameters[f"{shard}.bias"] = Parameter(shape[:1], load_bias, self.dtype, places=places, held=held)
        return parameters

    def places(self, shard: str) -> list[MatrixPlace]:
        """Where a shard's weight lies; empty if it is quantized."""
        if not isinstance(self.packed, ops.PackedWeight):
            return []
        return [MatrixPlace(self.packed, self._first_row(shard))]

    def bias_places(self, shard: str) -> list[VectorPlace]:
        return [] if self.bias is None else [VectorPlace(self._rows(self.bias, shard))]

    def load(self, shard: str, tensor: Tensor) -> None:
        """Take a shard's weight, of the checkpoint's shape; the last one packs the layer."""
        _check_shape(shard, tensor, self._shape(shard))
        self._load(shard, as_dense(self.part(shard, tensor)))

    def _load(self, shard: str, tensor: Tensor) -> None:
        """Take this rank's part of a shard's weight [size, inputs]."""
        if self.shards.keys() == {shard} and not self.quant.packs_rows:
            self.packed = self.pack(tensor.to(self.dtype))
            return
        self._awaited = self._awaited or set(self.shards)
        if self.quant.packs_rows:
            first = self._first_row(shard)
            self._weight = pack_rows(self.pack, tensor, self.dtype, self.outputs, first, self._weight)
        else:
            if self._weight is None:
                self._weight = torch.empty(self.outputs, self.inputs, dtype=self.dtype, device=tensor.device)
            self._rows(self._weight, shard).copy_(tensor)
        self._awaited.discard(shard)
        if not self._awaited:
            self.packed = self.pack(self._weight) if isinstance(self._weight, Tensor) else self._weight
            self._weight = None
        elif self._awaited == self._stored.keys():
            self._load_dense()

    def load_stored(self, shard: str, weight: StoredWeight) -> None:
        """Take a shard's weight in the form in which it is stored; the last one packs the layer.  Shards that the
        method does not accept, or that cannot be joined with the others, become tensors of floats."""
        _check_shape(shard, weight, self._shape(shard))
        part = self.part(shard, weight)
        if isinstance(part, Tensor) or not self.quant.accepts(part):
            self._load(shard, as_dense(part))
            return
        self._stored[shard] = part.clone()
        if self._stored.keys() == self.shards.keys():
            first, *others = (self._stored[name] for name in self.shards)
            whole = first.joined(others) if others else first
            if whole is None:
                self._load_dense()
            else:
                self._stored = {}
                self.packed = self.pack(whole)
        elif self._awaited and self._awaited == self._stored.keys():
            self._load_dense()

    def _load_dense(self) -> None:
        stored, self._stored = self._stored, {}
        for shard, weight in stored.items():
            self._load(shard, weight.dense())

    def load_bias(self, shard: str, tensor: Tensor) -> None:
        """Take a shard's bias, of the checkpoint's shape."""
        if self.bias is None:
            raise ValueError(f"{shard} has no bias")
        _check_shape(shard, tensor, self._shape(shard)[:1])
        if shard in self._spans:
            tensor = torch.cat([tensor.narrow(0, *span) for span in self._spans[shard]])
        if self._split != "row" or self._group.rank == 0:
            self._rows(self.bias, shard).copy_(tensor)

    def _shape(self, shard: str) -> tuple[int, int]:
        """The shape of a shard's weight in the checkpoint."""
        if shard not in self._whole:
            raise ValueError(f"no shard {shard!r}; there are: {', '.join(self._whole)}")
        return self._whole[shard]

    def part(self, shard: str, weight: Tensor | StoredWeight) -> Tensor | StoredWeight:
        """What this rank has of a shard's weight."""
        held = self.held(shard)
        return weight if held is None else part_of(weight, *held)

    def whole(self, shard: str) -> tuple[int, int]:
        """Inputs and outputs of a shard, of all ranks together."""
        outputs, inputs = self._shape(shard)
        return inputs, outputs

    def adapter_part(self, shard: str, weights: LowRank) -> LowRank:
        """What this rank adds for an adapter of a shard: of divided outputs its own, of divided inputs its share of the
        inner products, which `up` takes as they are."""
        held = self.held(shard)
        if held is None:
            return weights
        dim, spans = held
        if dim == 0:
            up = torch.cat([weights.up.narrow(0, *span) for span in spans])
            return LowRank(weights.down, up, weights.scale)
        return LowRank(weights.down.narrow(1, *spans[0]), weights.up, weights.scale)

    def held(self, shard: str) -> TensorPart | None:
        """What this rank has of a shard's weight, in the order of the output; None: all of it, as it is."""
        if shard in self._spans:
            return TensorPart(0, self._spans[shard])
        if self._split == "row":
            return TensorPart(1, (Span(self._group.rank * self.inputs, self.inputs),))
        return None

    def pack(self, weight: Tensor | StoredWeight, *rest: Any) -> Packed:
        """The whole weight for the product of this layer, or rows of it where the method `packs_rows`; a copy."""
        return self.quant.pack(weight, *rest)

    def __call__(
        self, x: Tensor, out_dtype: torch.dtype | None = None, *, adapters: Tensor | None = None
    ) -> Tensor:  # [T, inputs] -> [T, outputs]
        """`adapters` [T] int32: the slot of each row's adapter, negative for none; None: no row has one."""
        out = self.quant.linear(x, self.packed, self.bias, torch.float32 if self._adds else out_dtype)
        if adapters is not None and self.lora is not None:
            if out.dtype == x.dtype:
                self.lora.add(out, x, adapters)
            else:  # a part of a sum, which is not rounded before it is added to the others
                added = torch.zeros(out.shape, dtype=x.dtype, device=x.device)
                self.lora.add(added, x, adapters)
                out += added
        return self._group.add(out, out_dtype or x.dtype) if self._adds else out

    def _rows(self, tensor: Tensor, shard: str) -> Tensor:
        start = self._first_row(shard)
        return tensor[start : start + self.shards[shard]]

    def _first_row(self, shard: str) -> int:
        names = list(self.shards)
        return sum(self.shards[name] for name in names[: names.index(shard)])


class GatedLinear(Linear):
    """activation(first half) * second half of x W^T + b, for a gate and what it gates: two shards of equal
    size, or one that holds both."""

    def __init__(
        self,
        inputs: int,
        shards: Mapping[str, int],
        activation: Activation,
        options: LayerOptions,
        *,
        bias: bool = False,
        split: Split | None = None,
        rows: Mapping[str, Sequence[Span]] | None = None,
    ) -> None:
        super().__init__(inputs, shards, options, bias=bias, split=split, rows=rows)
        self.activation = activation

    def pack(self, weight: Tensor | StoredWeight, *rest: Any) -> Packed:
        return self.quant.pack_gated(weight, *rest)

    def __call__(  # type: ignore[override]
        self, x: Tensor, *, adapters: Tensor | None = None
    ) -> Tensor:  # [T, inputs] -> [T, outputs / 2] of x's dtype
        """Adapters add to the product before the activation; the bits of rows without one are the same either way."""
        if (adapters is None or self.lora is None) and self.activation in FUSED:
            return self.quant.gated_linear(x, self.packed, self.bias, self.activation)
        both = self.quant.gated_linear(x, self.packed, self.bias, None)
        if adapters is not None and self.lora is not None:
            self.lora.add(both, x, adapters)
        return gated(both, self.activation)


def _check_shape(shard: str, weight: Tensor | StoredWeight, shape: tuple[int, ...]) -> None:
    if tuple(weight.shape) != shape:
        raise ValueError(f"{shard}: expected a tensor of shape {list(shape)}, found {list(weight.shape)}")
