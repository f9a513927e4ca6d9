"""Blocks of GGUF's tensor types to integers with scales: what ggml's reference dequantization says, without rounding.

A block of 32 has one scale, in float16; a block of 256 has one, and an integer of at most 8 bits for each of its 8 or
16 groups (and for their minima).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokserve.families.quantization.quantized import E2M1, QuantizedWeight, power_of_two
from tokserve.ops.wna16 import SIGNED, UNSIGNED, QuantizedRows

IQ4: tuple[int, ...] = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SMALL, LARGE = 32, 256  # elements of a block


def decoded(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
    """The bytes of a tensor [N,K] (or [K], of a plain type) of that GGUF type; a plain one may share their memory."""
    if kind in PLAIN:
        return raw.view(PLAIN[kind]).view(shape)
    rows = shape[0] if len(shape) == 2 else 1
    return QuantizedWeight((DECODERS[kind](raw.view(rows, -1), shape[-1]),))


def _blocks(raw: Tensor, columns: int, size: int) -> Tensor:  # [N, blocks, bytes]
    return raw.view(len(raw), columns // size, -1)


def _split(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]


def _half(blocks: Tensor, at: int) -> Tensor:  # [N, blocks] float16
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes as [..., 2 n]: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(word: Tensor) -> Tensor:
    """[..., 4] bytes as [..., 32] bits."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (word[..., None] >> shifts & 1).flatten(-2)


def _small(raw: Tensor, columns: int, *, at: int, mins: bool = False, high: int | None = None) -> QuantizedRows:
    """Blocks of 32: scale, perhaps a minimum, perhaps the codes' fifth bits, and 16 bytes of nibbles from `at` on."""
    blocks = _blocks(raw, columns, SMALL)
    codes = _nibbles(blocks[..., at:])
    if high is None:
        factors = UNSIGNED if mins else SIGNED
    else:
        codes = codes | _bits(blocks[..., high : high + 4]) << 4
        codes = codes if mins else codes - 16  # modulo 256: the bits of int8
        factors = None
    low = _half(blocks, 2) if mins else None
    return QuantizedRows(codes.flatten(1), factors, SMALL, _half(blocks, 0), mins=low)


def _iq4_nl(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, SMALL)
    return QuantizedRows(_nibbles(blocks[..., 2:]).flatten(1), IQ4, SMALL, _half(blocks, 0))


def _mxfp4(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, SMALL)
    scales = power_of_two(blocks[..., 0], 128)
    return QuantizedRows(_nibbles(blocks[..., 1:]).flatten(1), E2M1, SMALL, scales, folded=True)


def _q8_0(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, SMALL)
    return QuantizedRows(blocks[..., 2:].flatten(1), None, SMALL, _half(blocks, 0))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [..., 8] of 6 bits, of 12 bytes."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([a & 63, c & 15 | a >> 6 << 4], -1)
    return scales, torch.cat([b & 63, c >> 4 | b >> 6 << 4], -1)


def _signed(parts: Tensor) -> Tensor:
    return parts.flatten(1).contiguous().view(torch.int8)


def _q4_k(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, LARGE)
    scales, mins = _six_bits(blocks[..., 4:16])
    codes = _nibbles(_split(blocks[..., 16:], -1, (4, 32)))  # 32 low, then 32 high of each 32 bytes
    return QuantizedRows(
        codes.flatten(1), UNSIGNED, 32, _half(blocks, 0), _signed(scales), -_half(blocks, 2), _signed(mins), 8
    )


def _q5_k(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, LARGE)
    scales, mins = _six_bits(blocks[..., 4:16])
    low = _split(_nibbles(_split(blocks[..., 48:], -1, (4, 32))), -1, (2, 32)).flatten(2, 3)  # [N,B,8,32]
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    codes = low | (blocks[..., None, 16:48] >> shifts & 1) << 4
    return QuantizedRows(
        codes.flatten(1), None, 32, _half(blocks, 0), _signed(scales), -_half(blocks, 2), _signed(mins), 8
    )


def _pairs(packed: Tensor) -> Tensor:
    """[..., 2 * 32] bytes as [..., 2, 4, 32]: the first two bits of 32 bytes, then the next ones."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return _split(packed, -1, (2, 1, 32)) >> shifts & 3


def _q6_k(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, LARGE)
    low = _split(_nibbles(_split(blocks[..., :128], -1, (2, 64))), -1, (4, 32))  # [N,B,2,4,32]
    codes = (low | _pairs(blocks[..., 128:192]) << 4) - 32  # modulo 256: the bits of int8
    return QuantizedRows(codes.flatten(1), None, 16, _half(blocks, 208), _signed(blocks[..., 192:208]), ratio=16)


def _q2_k(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, LARGE)
    codes, scales = _pairs(blocks[..., 16:80]), blocks[..., :16]
    return QuantizedRows(
        codes.flatten(1),
        UNSIGNED,
        16,
        _half(blocks, 80),
        _signed(scales & 15),
        -_half(blocks, 82),
        _signed(scales >> 4),
        16,
    )


def _q3_k(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, LARGE)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = _split(blocks[..., None, :32] >> shifts & 1, 2, (2, 4))
    codes = (_pairs(blocks[..., 32:96]) | high << 2) + 4  # 8 more than the factor, which is -4 .. 3
    packed = blocks[..., 96:108]
    low, pairs = _nibbles(packed[..., :8]), packed[..., None, 8:] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    scales = (low | (pairs & 3).flatten(-2) << 4) - 32
    return QuantizedRows(codes.flatten(1), SIGNED, 16, _half(blocks, 108), _signed(scales), ratio=16)


def _iq4_xs(raw: Tensor, columns: int) -> QuantizedRows:
    blocks = _blocks(raw, columns, LARGE)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    high = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    codes = _nibbles(_split(blocks[..., 8:], -1, (8, 16)))
    return QuantizedRows(codes.flatten(1), IQ4, 32, _half(blocks, 0), _signed((low | high << 4) - 32), ratio=8)


DECODERS: dict[str, Callable[[Tensor, int], QuantizedRows]] = {
    "Q4_0": lambda raw, columns: _small(raw, columns, at=2),
    "Q4_1": lambda raw, columns: _small(raw, columns, at=4, mins=True),
    "Q5_0": lambda raw, columns: _small(raw, columns, at=6, high=2),
    "Q5_1": lambda raw, columns: _small(raw, columns, at=8, mins=True, high=4),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
