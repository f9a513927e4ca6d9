"""A linear layer whose rows come from one or several checkpoint tensors.

q, k and v are *shards* of one weight, so that a layer is one matrix product; so are gate and up, whose product
ends in the activation.  The layer fills an unpacked weight shard by shard, has its quantization method pack it when
the last one is there, and keeps only the packed form; shards that are stored as float8 it joins as they are, where the
method takes them and they are alike.  Adapters add to the output of shards.  It must not know file formats or what its
shards mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.lora import LoraSlots
from tokserve.layers.parameter import Parameter, Scaled
from tokserve.layers.quant import UNQUANTIZED, Float8, Packed, QuantMethod, gated

Activation = Literal["silu", "gelu_tanh"]


class Linear:
    """y = x W^T + b; `shards` maps names to numbers of output features, in the order of the output.

    `packed`: the weight as the method packs it; a tied layer is given its owner's.
    """

    packed: Packed

    def __init__(
        self,
        inputs: int,
        shards: Mapping[str, int],
        dtype: torch.dtype,
        *,
        bias: bool = False,
        quant: QuantMethod = UNQUANTIZED,
    ) -> None:
        self.inputs = inputs
        self.shards = dict(shards)
        self.outputs = sum(shards.values())
        self.dtype = dtype
        self.quant = quant
        self.bias = torch.zeros(self.outputs, dtype=dtype, device=ops.torch_device) if bias else None  # [outputs]
        self.lora: LoraSlots | None = None  # where adapters are served
        self._weight: Tensor | None = None  # [outputs, inputs], while loading
        self._awaited: set[str] = set()
        self._scaled: dict[str, Scaled] = {}  # shards that are stored as float8, while loading

    def parameters(self) -> dict[str, Parameter]:
        """`<shard>.weight` and, with a bias, `<shard>.bias`."""
        found = {}
        kept = self.quant.kept_dtype(self.dtype)
        for shard, size in self.shards.items():
            scaled = partial(self.load_scaled, shard) if isinstance(self.quant, Float8) else None
            found[f"{shard}.weight"] = Parameter((size, self.inputs), partial(self.load, shard), kept, scaled)
            if self.bias is not None:
                found[f"{shard}.bias"] = Parameter((size,), partial(self.load_bias, shard), self.dtype)
        return found

    def load(self, shard: str, tensor: Tensor) -> None:
        """Take a shard's weight [size, inputs]; the last one packs the layer."""
        if self.shards.keys() == {shard} and tensor.shape == (self.outputs, self.inputs):
            self.packed = self.pack(tensor.to(self.dtype))
            return
        if self._weight is None:
            self._weight = torch.empty(self.outputs, self.inputs, dtype=self.dtype, device=tensor.device)
            self._awaited = set(self.shards)
        _fill(self._rows(self._weight, shard), shard, tensor)
        self._awaited.discard(shard)
        if not self._awaited:
            self.packed = self.pack(self._weight)
            self._weight = None
        elif self._awaited == self._scaled.keys():
            self._load_dense()

    def load_scaled(self, shard: str, weight: Scaled) -> None:
        """Take a shard's weight [size, inputs] that is stored as float8; the last one packs the layer.

        If all shards come so, in groups of one size that the method takes, they are kept; else what they mean is.
        """
        assert isinstance(self.quant, Float8)
        self._scaled[shard] = Scaled(weight.values.clone(), weight.scales.clone(), weight.group)
        if self._scaled.keys() == self.shards.keys():
            parts = [self._scaled[name] for name in self.shards]
            if any(part.group != weight.group for part in parts) or not self.quant.takes(weight.scales, weight.group):
                self._load_dense()
                return
            self._scaled = {}
            values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts], 1)
            self.packed = self.quant.pack_scaled(values, scales, weight.group)
        elif self._awaited and self._awaited == self._scaled.keys():
            self._load_dense()

    def _load_dense(self) -> None:
        scaled, self._scaled = self._scaled, {}
        for shard, weight in scaled.items():
            self.load(shard, weight.dense())

    def load_bias(self, shard: str, tensor: Tensor) -> None:
        """Take a shard's bias [size]."""
        if self.bias is None:
            raise ValueError(f"{shard} has no bias")
        _fill(self._rows(self.bias, shard), shard, tensor)

    def pack(self, weight: Tensor) -> Packed:
        """The whole weight for the product of this layer; a copy."""
        return self.quant.pack(weight)

    def __call__(
        self, x: Tensor, out_dtype: torch.dtype | None = None, *, adapters: Tensor | None = None
    ) -> Tensor:  # [T, inputs] -> [T, outputs]
        """`adapters` [T] int32: the slot of each row's adapter, negative for none; None: no row has one."""
        out = self.quant.linear(x, self.packed, self.bias, out_dtype)
        if adapters is not None and self.lora is not None:
            self.lora.add(out, x, adapters)
        return out

    def _rows(self, tensor: Tensor, shard: str) -> Tensor:
        if shard not in self.shards:
            raise ValueError(f"no shard {shard!r}; there are: {', '.join(self.shards)}")
        names = list(self.shards)
        start = sum(self.shards[name] for name in names[: names.index(shard)])
        return tensor[start : start + self.shards[shard]]


class GatedLinear(Linear):
    """activation(first half) * second half of x W^T + b, for two shards of equal size: a gate and what it gates."""

    def __init__(
        self,
        inputs: int,
        shards: Mapping[str, int],
        dtype: torch.dtype,
        activation: Activation,
        *,
        bias: bool = False,
        quant: QuantMethod = UNQUANTIZED,
    ) -> None:
        super().__init__(inputs, shards, dtype, bias=bias, quant=quant)
        self.activation = activation

    def pack(self, weight: Tensor) -> Packed:
        """The whole weight for the product of this layer; a copy."""
        return self.quant.pack_gated(weight)

    def __call__(  # type: ignore[override]
        self, x: Tensor, *, adapters: Tensor | None = None
    ) -> Tensor:  # [T, inputs] -> [T, outputs / 2] of x's dtype
        """Adapters add to the product before the activation; the bits of rows without one are the same either way."""
        if adapters is None or self.lora is None:
            return self.quant.gated_linear(x, self.packed, self.bias, self.activation)
        both = self.quant.gated_linear(x, self.packed, self.bias, None)
        self.lora.add(both, x, adapters)
        return gated(both, self.activation)


def _fill(target: Tensor, shard: str, tensor: Tensor) -> None:
    if tensor.shape != target.shape:
        raise ValueError(f"{shard}: expected a tensor of shape {list(target.shape)}, found {list(tensor.shape)}")
    target.copy_(tensor)
