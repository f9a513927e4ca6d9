"""Checksums of tensors, by which a trainer compares its weights with those of a server.

A checksum is SHA-256 over `torch.DTYPE (SHAPE)` in ASCII, followed by the values in row-major order, little-endian.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor


def checksum(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and values, as hex; independent of strides and device."""
    plain = tensor.detach().cpu().contiguous().view(-1)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(np.from_dlpack(plain.view(torch.uint8)).data)
    return digest.hexdigest()


def checksums(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Checksums by name of a `state_dict()`, or of `named_parameters()`."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: checksum(tensor) for name, tensor in pairs}  # each before the next one is made
