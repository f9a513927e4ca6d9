"""gpt-oss's own form: the experts of a layer as MXFP4, 4-bit numbers with a power of two for each 32 inputs.

`gate_up_proj_blocks` [E,N,K/32,16] has two numbers in a byte, the low half first; `gate_up_proj_scales` [E,N,K/32] has
the exponents plus 127.  Together they are the transpose of what a bfloat16 checkpoint calls `gate_up_proj` [E,K,N].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokserve.families.quantization.methods import WNA16
from tokserve.families.quantization.quantized import E2M1, QuantizedWeight, power_of_two
from tokserve.layers.parameter import StoredWeight
from tokserve.models.formats import Described, Grouped, Part
from tokserve.ops.wna16 import QuantizedRows

BLOCKS, EXPONENTS = "blocks", "scales"  # roles
ENDINGS = {"_blocks": BLOCKS, "_scales": EXPONENTS}
GROUP = 32
BYTES = ("U8", torch.uint8)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """One projection of all experts, gate and up rows in turns."""

    blocks: Tensor  # [E,N,G,16] uint8
    exponents: Tensor  # [E,N,G] uint8
    interleaved: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """[E,K,N], as where they are floats."""
        return weight_shape(tuple(self.blocks.shape))

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, which holds every value."""
        return torch.bfloat16

    def expert(self, index: int) -> QuantizedWeight:
        codes, scales = self.blocks[index].flatten(1), power_of_two(self.exponents[index], 128)
        return QuantizedWeight((QuantizedRows(codes, E2M1, GROUP, scales, folded=True, nibbles=True),))

    def dense(self) -> Tensor:
        """The weight [E,K,N] in bfloat16."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for index, weight in enumerate(whole):
            weight.copy_(self.expert(index).dense().t())
        return whole

    def tensors(self) -> tuple[Tensor, ...]:
        return self.blocks, self.exponents

    def clone(self) -> Mxfp4Experts:
        return Mxfp4Experts(self.blocks.clone(), self.exponents.clone(), self.interleaved)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Floats: no rank has a part of an expert."""
        return self.dense().narrow(dim, start, length)

    def joined(self, others: Sequence[StoredWeight]) -> None:
        """Returns None: a weight holds all experts, and is not joined with others."""

    def packed_rows(self) -> None:
        """Returns None: its rows are not looked up."""


def weight_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """[E,K,N] of blocks [E,N,G,16]."""
    experts, outputs, groups, size = blocks
    return experts, groups * size * 2, outputs


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Experts as MXFP4, all else as floats."""

    name: str = "mxfp4"
    needs: frozenset[str] = frozenset((BLOCKS, EXPONENTS))
    optional: frozenset[str] = frozenset()

    def part(self, name: str, tensor: Described) -> Part:
        for ending, role in ENDINGS.items():
            if name.endswith(ending):
                return Part(name.removesuffix(ending), role)
        return Part(name)

    def shape(self, parts: Mapping[str, Described]) -> tuple[int, ...]:
        """[E,K,N]; that of the blocks if these are none."""
        shape = tuple(parts[BLOCKS].shape)
        return weight_shape(shape) if len(shape) == 4 else shape

    def fits(self, role: str, tensor: Described, shape: tuple[int, ...]) -> bool:
        """Whether a part is of bytes, in the one shape for its role."""
        if len(shape) != 3 or tensor.dtype not in BYTES:
            return False
        experts, inputs, outputs = shape
        groups = (experts, outputs, inputs // GROUP)
        expected = {BLOCKS: (*groups, GROUP // 2), EXPONENTS: groups}.get(role)
        return inputs % GROUP == 0 and tuple(tensor.shape) == expected

    def assemble(self, parts: Mapping[str, Tensor]) -> Mxfp4Experts:
        return Mxfp4Experts(parts[BLOCKS], parts[EXPONENTS])

    def incomplete(self, parts: Mapping[str, Collection[str]]) -> list[tuple[str, list[str]]]:
        """Weights of which one part came."""
        return [("without both blocks and scales", list(parts))]

    def refusal(self, tensor: Described) -> str | None:
        return None

    def native_method(self, weights: Mapping[str, Grouped], *, has_float8: bool, rounded: bool) -> str | None:
        return WNA16.name if any(weight.parts for weight in weights.values()) else None


def describes(quantization: Mapping[str, Any]) -> bool:
    """Whether that entry of config.json is of this kind."""
    return quantization.get("quant_method") == "mxfp4"
