"""Weights as integers with a scale per group of inputs: stored so by a checkpoint, or quantized while they load.

Every such format becomes a `QuantizedWeight`, which the op `linear_wna16` multiplies without rounding it or the
activations.  A fused layer may have shards of different kinds; tensors of floats stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.parameter import StoredWeight
from tokserve.layers.quant import GROUP, STORED_INTEGERS
from tokserve.ops.wna16 import SIGNED, QuantizedRows

E2M1: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the number
TENSORS = ("codes", "scales", "sub_scales", "mins", "sub_mins")  # of QuantizedRows, with a row per output


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Rows of one weight [N,K], in one part or several of different kinds, one below the other."""

    parts: tuple[QuantizedRows, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """float32, which holds the products of most formats exactly."""
        return torch.float32

    def dense(self) -> Tensor:
        """factor * scale + minimum."""
        return torch.cat([part.dense() for part in self.parts])

    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and what else there is."""
        named = (getattr(part, name) for part in self.parts for name in (*TENSORS, "order"))
        return tuple(tensor for tensor in named if tensor is not None)

    def clone(self) -> QuantizedWeight:
        return QuantizedWeight(tuple(_each(part, lambda _, tensor: tensor.clone(), order=True) for part in self.parts))

    def narrow(self, dim: int, start: int, length: int) -> Tensor | StoredWeight:
        """Columns that cut a group in two, or that are not in order, become floats."""
        if dim == 0:
            return QuantizedWeight(tuple(_rows(self.parts, start, start + length)))
        span = [part.group * part.ratio for part in self.parts]
        end = start + length
        if any(part.order is not None for part in self.parts) or any(
            start % size or (end % size and end != self.shape[1]) for size in span
        ):
            return self.dense().narrow(1, start, length)
        return QuantizedWeight(tuple(_columns(part, start, end) for part in self.parts))

    def every_other(self, start: int) -> QuantizedWeight:
        """Rows start, start + 2, ...  It is in one part."""
        (part,) = self.parts
        return QuantizedWeight((_each(part, lambda _, tensor: tensor[start::2]),))

    def joined(self, others: Sequence[StoredWeight]) -> QuantizedWeight | None:
        """All rows in one weight; None unless all are quantized in groups."""
        parts: list[QuantizedRows] = []
        for weight in (self, *others):
            if not isinstance(weight, QuantizedWeight):
                return None
            for part in weight.parts:
                if parts and _alike(parts[-1], part):
                    parts[-1] = _concatenated(parts[-1], part)
                else:
                    parts.append(part)
        return QuantizedWeight(tuple(parts))

    def packed_rows(self) -> ops.PackedWna16:
        return ops.pack_wna16(self.parts)


def _each(part: QuantizedRows, change: Callable[[str, Tensor], Tensor], *, order: bool = False) -> QuantizedRows:
    """The same with every tensor that is there changed."""
    names = (*TENSORS, "order") if order else TENSORS
    tensors = {name: getattr(part, name) for name in names}
    changed: dict[str, Any] = {name: change(name, tensor) for name, tensor in tensors.items() if tensor is not None}
    return replace(part, **changed)


def _rows(parts: Sequence[QuantizedRows], start: int, end: int) -> list[QuantizedRows]:
    kept, first = [], 0
    for part in parts:
        size = part.shape[0]
        begin, stop = max(start - first, 0), min(end - first, size)
        if begin < stop:
            kept.append(_each(part, lambda _, tensor, rows=slice(begin, stop): tensor[rows]))  # type: ignore[misc]
        first += size
    return kept


def _columns(part: QuantizedRows, start: int, end: int) -> QuantizedRows:
    sizes = {"codes": 1 + part.nibbles, "sub_scales": part.group, "sub_mins": part.group}
    sizes["scales"] = sizes["mins"] = part.group * part.ratio
    return _each(part, lambda name, tensor: tensor[:, start // sizes[name] : -(-end // sizes[name])])


def _alike(one: QuantizedRows, other: QuantizedRows) -> bool:
    def kind(part: QuantizedRows) -> tuple[object, ...]:
        dtypes = tuple(None if (t := getattr(part, name)) is None else t.dtype for name in TENSORS)
        return part.factors, part.group, part.ratio, part.folded, part.nibbles, part.order is None, dtypes

    if kind(one) != kind(other) or (one.mins is one.scales) != (other.mins is other.scales):
        return False
    return one.order is None or other.order is None or torch.equal(one.order, other.order)


def _concatenated(one: QuantizedRows, other: QuantizedRows) -> QuantizedRows:
    return _each(one, lambda name, tensor: torch.cat([tensor, getattr(other, name)]))


def quantize_int4(weight: Tensor, group: int) -> QuantizedWeight:
    """The floating weight [N,K] rounded by `ops.quantize_int4`."""
    codes, scales = ops.quantize_int4(weight if weight.stride(1) == 1 else weight.contiguous(), group)
    return QuantizedWeight((QuantizedRows(codes, SIGNED, group, scales),))


class Wna16:
    """Weights as their checkpoint stores them, or floats where it stores floats.  `rounded`: activations are rounded to
    8 bits before they are multiplied by integers."""

    name: str | None = STORED_INTEGERS
    keeps_floats = True
    covers_experts = True
    packs_rows = True

    def __init__(self, *, rounded: bool = False) -> None:
        self.rounded = rounded

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """A byte, which is at least what most formats take."""
        return torch.uint8

    def accepts(self, stored: StoredWeight) -> bool:
        """Whether it is quantized in groups."""
        return isinstance(stored, QuantizedWeight)

    def pack(self, weight: Tensor | QuantizedWeight, *rest: Any) -> Any:
        """Pack a weight in the layout of `ops.linear_wna16`; floats in that of `ops.linear`."""
        if isinstance(weight, Tensor):
            return ops.pack_linear(weight, *rest)
        return ops.pack_wna16(weight.parts, self.rounded)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Multiply with `ops.linear_wna16`, which sums in float32."""
        if isinstance(packed, ops.PackedWna16):
            return ops.linear_wna16(x, packed, bias, out_dtype)
        return ops.linear(x, packed, bias, out_dtype)

    def pack_gated(self, weight: Tensor | QuantizedWeight, *rest: Any) -> Any:
        """Pack a weight in the layout of `ops.gated_linear_wna16`; floats in that of `ops.gated_linear`."""
        if isinstance(weight, Tensor):
            return ops.pack_gated(weight, *rest)
        return ops.pack_gated_wna16(weight.parts, self.rounded)

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        if isinstance(packed, ops.PackedWna16):
            return ops.gated_linear_wna16(x, packed, bias, activation)
        return ops.gated_linear(x, packed, bias, activation)

    def experts(self, *arguments: Any) -> Tensor:
        _, _, _, gate_up, _, down, *_ = arguments
        if any(isinstance(packed, ops.PackedWna16) for packed in (*gate_up, *down)):
            return ops.experts_wna16(*arguments)
        return ops.experts(*arguments)


class Int4(Wna16):
    """Floats become 4-bit integers with a scale per `group` inputs; what is quantized already stays as it is stored."""

    name: str | None = "int4"
    keeps_floats = False

    def __init__(self, group: int = GROUP, *, rounded: bool = False) -> None:
        super().__init__(rounded=rounded)
        self.group = group

    def pack(self, weight: Tensor | QuantizedWeight, *rest: Any) -> Any:
        """Round floats, in the layout of `ops.linear_wna16`."""
        if isinstance(weight, Tensor):
            return ops.pack_int4(weight, self.group, self.rounded, *rest)
        return super().pack(weight)

    def pack_gated(self, weight: Tensor | QuantizedWeight, *rest: Any) -> Any:
        """Round floats, in the layout of `ops.gated_linear_wna16`."""
        if isinstance(weight, Tensor):
            return ops.pack_gated_int4(weight, self.group, self.rounded, *rest)
        return super().pack_gated(weight)


def power_of_two(exponents: Tensor, bias: int) -> Tensor:
    """2 ** (exponent - bias) in bfloat16, of bytes; 255 is not-a-number."""
    powers = torch.exp2(torch.arange(256.0, dtype=torch.float64) - bias).to(torch.bfloat16)
    powers[255] = torch.nan
    return powers[exponents.int()]
