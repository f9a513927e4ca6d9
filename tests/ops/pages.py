"""Caches as rows [B,Hk,P,D], the layout of samples and references, and in the layout of an implementation.

The layout of csrc/pages.h in torch's permutations: so that a store is compared with the reference's, and
attention reads pages that no store of the same implementation wrote.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CACHES = {"store_kv": 2, "norm_rope_store": 6, "paged_attention": 1}  # where the keys' cache is among the arguments


def _depth(name: str, cache: Tensor) -> int:
    """Elements that lie together in a page of this implementation; 0: it holds rows."""
    depth = 2 if cache.dtype == torch.bfloat16 else 1
    return depth if name == "cpp" and cache.shape[2] % 16 == 0 and cache.shape[3] % depth == 0 else 0


def held(name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as implementation `name` holds them."""
    blocks, heads, page, dim = keys.shape
    depth = _depth(name, keys)
    if not depth:
        return keys, values
    own_keys = keys.view(blocks, heads, page, dim // depth, depth).transpose(2, 3)
    own_values = values.view(blocks, heads, page // depth, depth, dim).transpose(3, 4)
    return own_keys.reshape(keys.shape), own_values.reshape(keys.shape)


def rows(name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What implementation `name` holds, as rows."""
    blocks, heads, page, dim = keys.shape
    depth = _depth(name, keys)
    if not depth:
        return keys, values
    own_keys = keys.view(blocks, heads, dim // depth, page, depth).transpose(2, 3)
    own_values = values.view(blocks, heads, page // depth, dim, depth).transpose(3, 4)
    return own_keys.reshape(keys.shape), own_values.reshape(keys.shape)


def arguments_held(op: str, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of op with the caches as implementation `name` holds them."""
    at = CACHES.get(op)
    return arguments if at is None else (*arguments[:at], *held(name, *arguments[at : at + 2]), *arguments[at + 2 :])


def arguments_as_rows(op: str, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of op whose caches implementation `name` holds, with the caches as rows."""
    at = CACHES.get(op)
    return arguments if at is None else (*arguments[:at], *rows(name, *arguments[at : at + 2]), *arguments[at + 2 :])
