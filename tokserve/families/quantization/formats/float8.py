"""Checkpoints that store projections as float8 with scales.

A value is the stored number times its scale, which is the tensor's, its row's (the output channel's) or its block's.
Two entries of config.json describe such checkpoints: "fp8" (DeepSeek, Qwen) and "compressed-tensors" (llm-compressor).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokserve import ops
from tokserve.families.quantization.methods import FLOAT8, WNA16, Float8Weight
from tokserve.models.formats import FLOAT8_DTYPES, FLOATS, Described, Grouped, Part, is_unused

SCALES = ("_scale_inv", "_scale")  # what follows a weight's name in that of its scale; both are multiplied by
VALUES, SCALE = "values", "scales"  # roles
FORMATS = ("float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "block")
BlockSize = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Float8Format:
    """Matrices of float8, each with a scale.  `block`: rows and columns that share one where scales are by block."""

    block: BlockSize
    name: str = "float8"
    needs: frozenset[str] = frozenset((VALUES, SCALE))
    optional: frozenset[str] = frozenset()

    def part(self, name: str, tensor: Described) -> Part | None:
        """A scale by its name, the numbers by their dtype; None: a scale of activations, which are computed here."""
        if is_unused(name):
            return None
        for ending in SCALES:
            if name.endswith(".weight" + ending):
                return Part(name.removesuffix(ending), SCALE)
        if tensor.dtype in FLOAT8_DTYPES and len(tensor.shape) == 2:
            return Part(name, VALUES)
        return Part(name)

    def shape(self, parts: Mapping[str, Described]) -> tuple[int, ...]:
        """The shape of the numbers."""
        return tuple(parts[VALUES].shape)

    def fits(self, role: str, tensor: Described, shape: tuple[int, ...]) -> bool:
        """Whether scales have one of the shapes of `scale_shapes`."""
        if role == VALUES or len(shape) != 2:
            return tuple(tensor.shape) == shape and len(shape) == 2
        return tensor.dtype in FLOATS.values() and tuple(tensor.shape) in scale_shapes(shape, self.block)

    def assemble(self, parts: Mapping[str, Tensor]) -> Float8Weight:
        """Numbers [N,K] with a scale of one of those shapes."""
        return scaled(parts[VALUES], parts[SCALE], self.block)

    def incomplete(self, parts: Mapping[str, Collection[str]]) -> list[tuple[str, list[str]]]:
        """Numbers without their scale, and scales without theirs."""
        return [
            ("without the scale that float8 has", [weight for weight, roles in parts.items() if VALUES in roles]),
            ("whose scale came, but not as float8", [weight for weight, roles in parts.items() if SCALE in roles]),
        ]

    def refusal(self, tensor: Described) -> str | None:
        """Refuses nothing: the dtype says all."""
        return None

    def native_method(self, weights: Mapping[str, Grouped], *, has_float8: bool, rounded: bool) -> str | None:
        """Where the device multiplies float8, that method, if all weights are stored so and the product takes their
        scales; else the one that keeps weights as they are stored, if any is float8 and activations are not rounded to
        integers."""
        matrices = [weight for weight in weights.values() if len(weight.shape) == 2]
        if has_float8 and matrices and self._all_multiplied(matrices):
            return FLOAT8.name
        return WNA16.name if not rounded and any(weight.parts for weight in matrices) else None

    def _all_multiplied(self, matrices: Sequence[Grouped]) -> bool:
        """Whether products take all of them as float8.  Matrices of one width, which may be shards of one layer, must
        have as many groups then."""
        groups_by_width: dict[int, set[int]] = {}
        for weight in matrices:
            if not weight.parts:
                return False
            count = groups(weight.shape, weight.parts[SCALE].shape)
            if count > 1 and self.block[1] % ops.FLOAT8_STEP:
                return False
            groups_by_width.setdefault(weight.shape[1], set()).add(count)
        return all(len(counts) == 1 for counts in groups_by_width.values())


def refusal(quantization: Mapping[str, Any]) -> str | None:
    """What of that entry of config.json is not supported; None if all is."""
    method = quantization.get("quant_method", "unnamed")
    if method == "fp8":
        kind = quantization.get("fmt", "e4m3")
        return None if kind == "e4m3" and block(quantization) else f"asks for fp8 of format {kind!r}"
    if method != "compressed-tensors":
        return f"asks for quantization {method!r}"
    config_groups = quantization.get("config_groups")
    if quantization.get("format") == "dense" and config_groups == {}:
        return None  # no weight is quantized, a KV cache may be
    if quantization.get("format") not in FORMATS or not isinstance(config_groups, dict) or not block(quantization):
        return f"asks for quantization {method!r} of format {quantization.get('format')!r}"
    for config_group in config_groups.values():
        weights = config_group.get("weights") if isinstance(config_group, dict) else None
        scheme = weights if isinstance(weights, dict) else {}
        kind, bits, strategy = scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy")
        if (kind, bits) != ("float", 8) or strategy not in STRATEGIES:
            return f"asks for weights of type {kind!r} with {bits} bits by {strategy}"
    return None


def block(quantization: Mapping[str, Any]) -> BlockSize | None:
    """Rows and columns that share a scale where scales are by block; None if they are not two positive integers."""
    sizes = quantization.get("weight_block_size")
    for config_group in (quantization.get("config_groups") or {}).values():
        weights = config_group.get("weights") if isinstance(config_group, dict) else None
        sizes = sizes or (weights or {}).get("block_structure")
    match sizes or (128, 128):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def scale_shapes(shape: tuple[int, ...], block: BlockSize) -> list[tuple[int, ...]]:
    rows, columns = shape
    return [(), (1,), (1, 1), (rows,), (rows, 1), (-(-rows // block[0]), -(-columns // block[1]))]


def groups(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> int:
    """The number of groups in which a row's inputs are scaled by a scale of one of those shapes."""
    by_block = tuple(scale_shape) not in ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
    return scale_shape[1] if by_block else 1


def scaled(stored: Tensor, scale: Tensor, block: BlockSize) -> Float8Weight:
    """Float8 numbers [N,K] with a scale of one of those shapes."""
    rows, columns = stored.shape
    if groups(tuple(stored.shape), tuple(scale.shape)) > 1:
        spread = scale.float().repeat_interleave(block[0], 0)[:rows]  # [N,G]
        return Float8Weight(stored, spread.t().contiguous(), block[1])
    spread = scale.float().reshape(-1)
    if len(spread) not in (1, rows):
        spread = spread.repeat_interleave(block[0])[:rows]
    return Float8Weight(stored, spread.expand(rows)[None], columns)
