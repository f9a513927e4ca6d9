"""Checksums of tensors, as a server has them of its weights: a trainer compares them with those of its own.

A checksum is SHA-256 over `torch.DTYPE (SHAPE)` in ASCII, and then the values, row by row, little-endian.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def checksum(tensor: Tensor) -> str:
    """Of dtype, shape and values, as hex; strides and the device do not matter."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksums(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """By name: of a `state_dict()`, or of `named_parameters()`."""
    return {name: checksum(tensor) for name, tensor in dict(tensors).items()}
