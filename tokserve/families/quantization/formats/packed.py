"""Weights of 4 or 8 bits packed into 32-bit words, as GPTQ, AWQ and compressed-tensors store them.

A matrix has words with its codes, a scale per output and group of inputs, and perhaps zero points and an order of its
inputs.  Bits and group size follow from the shapes of the parts, so that layers may differ; what the config says
decides only how words are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tokserve.families.quantization.methods import WNA16
from tokserve.families.quantization.quantized import QuantizedWeight
from tokserve.models.formats import FLOATS, Described, Grouped, Part
from tokserve.ops.wna16 import SIGNED, STEP, QuantizedRows

INTEGERS = {"I32": torch.int32, "I8": torch.int8, "I64": torch.int64}  # in safetensors
WORD = 32  # bits
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the codes in a word, from the lowest bits on
CODES, SCALES, ZEROS, ORDER, SHAPE = "codes", "scales", "zeros", "order", "shape"  # roles
Layout = Literal["gptq", "gptq_v2", "awq", "compressed-tensors"]
ENDINGS: dict[str, dict[str, str]] = {  # what follows the name of a module -> role
    "gptq": {".qweight": CODES, ".qzeros": ZEROS, ".scales": SCALES, ".g_idx": ORDER},
    "awq": {".qweight": CODES, ".qzeros": ZEROS, ".scales": SCALES},
    "compressed-tensors": {
        ".weight_packed": CODES,
        ".weight": CODES,
        ".weight_scale": SCALES,
        ".weight_zero_point": ZEROS,
        ".weight_g_idx": ORDER,
        ".weight_shape": SHAPE,
    },
}
UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".input_global_scale")  # of activations


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Matrices in one of these layouts.  `bits`: where the shapes do not say it; `group`: where groups may be uneven,
    0: one group."""

    layout: Layout
    bits: int
    group: int
    needs: frozenset[str]
    optional: frozenset[str]

    @property
    def name(self) -> str:
        return self.layout

    def part(self, name: str, tensor: Described) -> Part | None:
        """The part that a tensor is, by the ending of its name; a tensor of floats that ends in .weight is whole."""
        if name.endswith(UNUSED):
            return None
        for ending, role in ENDINGS["gptq" if self.layout == "gptq_v2" else self.layout].items():
            if name.endswith(ending):
                if role == CODES and tensor.dtype in FLOATS.values():
                    return Part(name)
                return Part(name.removesuffix(ending) + ".weight", role)
        return Part(name)

    def shape(self, parts: Mapping[str, Described]) -> tuple[int, ...]:
        """[N,K] of the codes."""
        rows, columns = parts[CODES].shape
        if parts[CODES].dtype in ("I8", torch.int8):
            return rows, columns
        count = WORD // self._bits(parts)
        if self.layout == "awq":
            return columns * count, rows
        return (rows, columns * count) if self.layout == "compressed-tensors" else (columns, rows * count)

    def _bits(self, parts: Mapping[str, Described]) -> int:
        """Zero points are packed along the outputs, of which there are as many as scales."""
        if self.layout == "compressed-tensors":
            return self.bits
        outputs = parts[SCALES].shape[-1]
        words = parts[ZEROS].shape[-1] if ZEROS in parts else outputs * self.bits // WORD
        return words * WORD // max(outputs, 1) or self.bits

    def fits(self, role: str, tensor: Described, shape: tuple[int, ...]) -> bool:
        """Whether its dtype is one for this role, and the sizes are among those that it can have."""
        if len(shape) != 2:
            return False
        rows, columns = shape
        if role == SCALES:
            side = tensor.shape[0] if self.layout == "compressed-tensors" else tensor.shape[-1]
            return tensor.dtype in FLOATS.values() and len(tensor.shape) in (1, 2) and side == rows
        if role in (ORDER, SHAPE):
            return is_integer(tensor) and tuple(tensor.shape) == ((columns,) if role == ORDER else (2,))
        return role in (CODES, ZEROS) and is_integer(tensor) and len(tensor.shape) in (1, 2)

    def assemble(self, parts: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        """The weight; a tensor of floats where inputs are in groups of different sizes."""
        rows, columns = self.shape(parts)
        bits = 8 if parts[CODES].dtype == torch.int8 else self._bits(parts)
        codes = self._codes(parts[CODES], bits, rows, columns)
        scales = parts[SCALES] if self.layout == "compressed-tensors" else parts[SCALES].t()
        scales = scales.reshape(rows, -1).contiguous()
        groups = scales.shape[1]
        offsets = self._offsets(parts.get(ZEROS), bits, rows, groups)  # [N,G] integers, or None
        group = columns if groups == 1 else self.group or -(-columns // groups)
        order = parts.get(ORDER)
        arranged = in_groups(order, columns, group, groups)
        if arranged is False or (groups > 1 and (group % STEP or -(-columns // group) != groups)):
            return _scattered(codes, scales, offsets, bits, order, group)
        mins, sub_mins = minima(scales, offsets)
        if bits == 8:
            codes = codes ^ 128  # to the bits of int8
        if isinstance(arranged, Tensor):
            codes = codes[:, arranged.long()]
        return QuantizedWeight(
            (
                QuantizedRows(
                    codes.contiguous(),
                    SIGNED if bits == 4 else None,
                    group,
                    scales,
                    mins=mins,
                    sub_mins=sub_mins,
                    order=arranged.int() if isinstance(arranged, Tensor) else None,
                ),
            )
        )

    def _codes(self, words: Tensor, bits: int, rows: int, columns: int) -> Tensor:
        """[N,K] uint8, of which the middle of the range is zero where there are no zero points."""
        if words.dtype == torch.int8:
            return words.view(torch.uint8) ^ 128
        if self.layout == "awq":
            return unpacked(words, bits, AWQ_ORDER).t().contiguous()
        if self.layout == "compressed-tensors":
            return unpacked(words, bits)[:, :columns]
        return unpacked(words.t().contiguous(), bits)[:, :columns]

    def _offsets(self, zeros: Tensor | None, bits: int, rows: int, groups: int) -> Tensor | None:
        """Middle of the range - zero point [N,G]; None where all are zero."""
        if zeros is None:
            return None
        middle = 1 << bits - 1
        if self.layout == "compressed-tensors":
            if zeros.dtype == torch.int8:
                points = zeros.reshape(rows, groups).int()
            else:  # packed along the outputs
                points = unpacked(zeros.t().contiguous(), bits)[:, :rows].t().int() - middle
            offsets = -points
        else:
            points = unpacked(zeros, bits, AWQ_ORDER if self.layout == "awq" else None)[:, :rows].t().int()
            offsets = middle - points - (1 if self.layout == "gptq" else 0)  # the first version stores one less
        return offsets if bool(offsets.any()) else None

    def incomplete(self, parts: Mapping[str, Collection[str]]) -> list[tuple[str, list[str]]]:
        """Weights of which not all parts that they need came."""
        return [(f"without all of {', '.join(sorted(self.needs))}", list(parts))]

    def refusal(self, tensor: Described) -> str | None:
        return None

    def native_method(self, weights: Mapping[str, Grouped], *, has_float8: bool, rounded: bool) -> str | None:
        """Integer weights, where any are."""
        return WNA16.name if any(weight.parts for weight in weights.values()) else None


def is_integer(tensor: Described) -> bool:
    """Whether it is of a dtype that codes and zero points have."""
    return tensor.dtype in INTEGERS or tensor.dtype in INTEGERS.values()


def unpacked(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[M,W] int32 words as [M, W * 32 / bits] uint8 codes, from the lowest bits on, or in `order`."""
    count = WORD // bits
    if order is None:
        rows = words.contiguous().as_strided(words.shape, (words.shape[1], 1))  # a dimension of 1 may have any stride
        octets = rows.view(torch.uint8)
        return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)
    shifts = torch.tensor([bits * order[i] for i in range(count)], dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def in_groups(order: Tensor | None, columns: int, group: int, groups: int) -> Tensor | Literal[False] | None:
    """The inputs sorted by group, of whose numbers `order` [K] has one per input.  None: they are sorted; False: the
    groups are not of `group` inputs each, but for the last."""
    if order is None:
        return None
    expected = torch.arange(columns) // group
    if torch.equal(order.long(), expected):
        return None
    numbers, arranged = torch.sort(order.long(), stable=True)
    return arranged if torch.equal(numbers, expected) else False


def minima(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Minima scale * offset, as a tensor and the integers that multiply it, or as one tensor."""
    if offsets is None:
        return None, None
    if int(offsets.max()) < 128 and int(offsets.min()) >= -128:
        return scales, offsets.to(torch.int8).contiguous()
    return scales.float() * offsets.float(), None


def _scattered(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, order: Tensor | None, group: int
) -> Tensor:
    """What the weight means, in float32, whichever group each input is in."""
    columns = codes.shape[1]
    numbers = torch.arange(columns) // group if order is None else order.long()
    if int(numbers.max()) >= scales.shape[1] or int(numbers.min()) < 0:
        return torch.full(codes.shape, torch.nan)
    factors = codes.float() - (1 << bits - 1)
    if offsets is not None:
        factors += offsets.float()[:, numbers]
    return factors * scales.float()[:, numbers]
