"""Sample inputs of products with weights of 4 or 8 bits, which come unpacked."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.samples.common import PRODUCTS, Samples, normal
from tokserve.ops.wna16 import SIGNED, UNSIGNED, QuantizedRows

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _codes(seed: int, rows: int, columns: int, bits: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)


def _float8(seed: int, rows: int, columns: int) -> Tensor:
    """The bits of every number of e4m3."""
    codes = _codes(seed, rows, columns, 8)
    return torch.where((codes & 127) == 127, 64, codes)


def _scales(seed: int, rows: int, groups: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (normal(torch.float32, seed, rows, groups).abs() * 0.01 + 0.002).to(dtype)


def weights(rows: int, columns: int) -> list[QuantizedRows]:
    """One of every kind of scales, of this shape."""
    codes, bytes_ = _codes(1, rows, columns, 4), _codes(2, rows, columns, 8)
    few, many, fine = -(-columns // 64), -(-columns // 32), -(-columns // 16)
    one, supers = min(columns, 128), -(-columns // 256)
    parts = _codes(3, rows, many, 6).view(torch.int8)
    powers = torch.randint(-9, -4, (rows, many), generator=torch.Generator().manual_seed(4))
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    return [
        QuantizedRows(codes, SIGNED, 64, _scales(1, rows, few, torch.bfloat16)),
        QuantizedRows(codes, UNSIGNED, 32, _scales(2, rows, many), mins=-_scales(3, rows, many) * 8),
        QuantizedRows(
            codes, UNSIGNED, 32, _scales(4, rows, supers) / 32, parts, -_scales(5, rows, supers) / 16, parts.flip(1), 8
        ),
        QuantizedRows(
            bytes_,
            None,
            16,
            _scales(6, rows, -(-fine // 16), torch.float32) / 99,
            _codes(7, rows, fine, 8).view(torch.int8),
            ratio=16,
        ),
        QuantizedRows(codes, NONLINEAR, 32, _scales(8, rows, many) / 16),
        QuantizedRows(codes, E2M1, 32, torch.exp2(powers.float()).to(torch.bfloat16), folded=True),
        QuantizedRows(codes, SIGNED, columns, _scales(9, rows, 1)),
        QuantizedRows(
            codes,
            SIGNED,
            one,
            (scales := _scales(10, rows, -(-columns // one))),
            mins=scales,
            sub_mins=_codes(11, rows, -(-columns // one), 3).view(torch.int8),
            order=order,
        ),
        QuantizedRows(_float8(12, rows, columns), None, 64, _scales(13, rows, few, torch.float32), float8=True),
    ]


def quantize_int4(dtype: torch.dtype) -> Samples:
    """Groups that are whole and cut off, of zeros, of halves, and ones that are not finite."""
    for rows, columns, group in ((1, 1, 32), (3, 130, 64), (70, 256, 128), (5, 33, 32), (2, 40, 8)):
        weight = normal(dtype, rows, rows, columns)
        yield weight, group
        yield weight[:, : columns // 2 + 1], group
        for value in (0.0, -0.0, float("inf"), float("-inf"), float("nan")):
            special = weight.clone()
            special[0, :group] = value if value == 0 else special[0, :group]
            special[-1, -1] = value
            yield special, group
    yield torch.arange(-64, 64).to(dtype).view(2, 64) / 2, 32
    yield -torch.rand(4, 64, generator=torch.Generator().manual_seed(1)).to(dtype), 32


def linear_wna16(dtype: torch.dtype) -> Samples:
    """Weights come unpacked: the test packs them with the `pack_wna16` of the implementation."""
    for number, (tokens, columns, rows) in enumerate(PRODUCTS):
        x, bias = normal(dtype, tokens, tokens, columns), normal(dtype, 2, rows)
        kinds = weights(rows, columns)
        for kind in kinds if number in (1, 6) else kinds[number % 9 : number % 9 + 1]:
            yield x, [kind], None, None
        yield x, [kinds[(number + 1) % 9]], bias, None
        yield x, [kinds[(number + 2) % 9]], None, torch.float32
    yield (
        normal(dtype, 9, 3, 160),
        [kind for kind in weights(70, 160) if not kind.folded and not kind.float8],
        normal(dtype, 3, 490),
        None,
    )


def gated_linear_wna16(dtype: torch.dtype) -> Samples:
    for number, (x, weight, bias, out_dtype) in enumerate(linear_wna16(dtype)):
        if out_dtype is None and len(weight) == 1 and weight[0].shape[0] % 2 == 0:
            yield x, weight, bias, "gelu_tanh" if number % 2 else "silu"
            yield x, weight, bias, None


def embedding_wna16(dtype: torch.dtype) -> Samples:
    """Weights come unpacked, as for `linear_wna16`."""
    for tokens, rows, columns in ((1, 64, 64), (5, 130, 40), (70, 7, 192), (0, 3, 8), (4, 1, 1)):
        ids = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(tokens))
        for kind in weights(rows, columns):
            if kind.order is None:
                yield ids, [kind], dtype
