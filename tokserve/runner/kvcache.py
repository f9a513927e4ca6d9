"""The paged KV cache's memory: how many blocks there are, and the tensors that hold them.

Which block belongs to whom is the engine's business, and how a head's elements lie in a block that of the ops; this
file knows bytes and shapes only.  Memory is reserved at once and touched as it is used.  A block is handed on with
what its last owner left in it, which may be NaN: `paged_attention` leaves out what lies past a row's length instead
of multiplying it by zero.
"""

from __future__ import annotations

import mmap
from dataclasses import replace

import torch
from torch import Tensor

from tokserve.config import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES, CacheConfig
from tokserve.errors import StartError
from tokserve.kv_spec import KVLayout, KVSpec
from tokserve.layers.batch import Pages

FLOAT8 = "float8_e4m3fn"
MOST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
RESCALED = 1 << 24  # numbers converted at a time
DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, FLOAT8: torch.float8_e4m3fn,
}  # fmt: skip


def kept(specs: tuple[KVSpec, ...], cache: CacheConfig) -> tuple[KVSpec, ...]:
    """What the layers ask for, in the dtype that the configuration wants."""
    return specs if cache.kv_cache_dtype == "auto" else tuple(replace(spec, dtype=FLOAT8) for spec in specs)


def layout(
    specs: tuple[KVSpec, ...],
    cache: CacheConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    free_bytes: int,
    bounded: bool = True,
) -> KVLayout:
    """How many blocks to have.  `free_bytes` of the device's memory are free.

    `kv_cache_memory_bytes` if given; else what `max_num_seqs` contexts of `max_model_len` need, at most the
    configured share of the free memory and, if `bounded`, 4 GiB (or one such context, where that is more).
    Raises StartError if one request of `max_model_len` would not fit.
    """
    block_size = cache.block_size or DEFAULT_BLOCK_SIZE
    block_bytes = block_size * sum(spec.bytes_per_token() for spec in specs)
    context_blocks = -(-max_model_len // block_size)
    one = context_blocks * block_bytes
    if cache.kv_cache_memory_bytes is not None:
        limit, why = cache.kv_cache_memory_bytes, "given by --kv-cache-memory-bytes"
    else:
        share = int(cache.gpu_memory_utilization * free_bytes)
        limit = min(max(DEFAULT_CPU_KV_BYTES, one), share) if bounded else share
        why = "the share of the free memory that may be taken"
    if limit < one:
        fits = limit // block_bytes * block_size
        raise StartError(
            f"the KV cache of one request of max_model_len {max_model_len} needs {one} bytes, but only {limit} "
            f"({why}) may be used; raise --kv-cache-memory-bytes to at least {one}"
            + (f" or lower --max-model-len to at most {fits}" if fits > 1 else "")
        )
    blocks = limit // block_bytes
    if cache.kv_cache_memory_bytes is None:
        blocks = min(blocks, max_num_seqs * context_blocks)
    return KVLayout(specs, blocks, block_size)


def allocate(layout: KVLayout) -> Pages:
    """Per layer K and V of shape [num_blocks, heads, block_size, dim].  Raises StartError."""
    return [(_reserve(layout, spec), _reserve(layout, spec)) for spec in layout.specs]


def allocate_on(home: torch.device, layout: KVLayout, *, spare: int = 0) -> Pages:
    """As `allocate`, in a device's own memory, with `spare` blocks more."""

    def reserve(spec: KVSpec) -> Tensor:
        shape = (layout.num_blocks + spare, spec.heads, layout.block_size, spec.dim)
        return torch.zeros(shape, dtype=DTYPES[spec.dtype], device=home)

    try:
        return [(reserve(spec), reserve(spec)) for spec in layout.specs]
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"cannot allocate {layout.bytes()} bytes for the KV cache; lower --gpu-memory-utilization or give "
            "--kv-cache-memory-bytes"
        ) from error


def rescale(kv: Pages, old: list[tuple[float, float]], new: list[tuple[float, float]]) -> None:
    """Have float8 pages that were stored by the layers' `old` scales mean the same by the `new` ones, rounded again.

    So a request in flight goes on, on what older weights stored.  What lies in the pages is converted a few at a time.
    """
    for caches, before, after in zip(kv, old, new, strict=True) if kv else ():
        for cache, was, becomes in zip(caches, before, after, strict=True):
            if was != becomes:
                for pages in torch.split(cache, max(1, RESCALED // cache[0].numel())):
                    pages.copy_((pages.float() * (was / becomes)).clamp(-MOST_FLOAT8, MOST_FLOAT8))


def _reserve(layout: KVLayout, spec: KVSpec) -> Tensor:
    """[num_blocks, heads, block_size, dim] of zeros, page aligned, no page touched."""
    size = layout.num_blocks * layout.block_size * spec.bytes_per_token() // 2
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise StartError(
            f"cannot reserve {layout.bytes()} bytes for the KV cache ({error}); lower --kv-cache-memory-bytes"
        ) from error
    flat = torch.frombuffer(memory, dtype=DTYPES[spec.dtype])
    return flat.view(layout.num_blocks, spec.heads, layout.block_size, spec.dim)
