"""The paged KV cache's memory: how many blocks there are, and the tensors that hold them.

The engine assigns blocks, and the ops define the layout within a block; this file handles bytes and shapes only.
Memory is reserved at once and touched as it is used.  A reused block keeps its old contents, which may be NaN:
`paged_attention` leaves out what lies past a row's length instead of multiplying it by zero.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tokserve.base.errors import StartError
from tokserve.base.memory import gib
from tokserve.config import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES, CacheConfig
from tokserve.layers.batch import Pages
from tokserve.protocol.kv_spec import KVLayout, KVSpec, LayerSpec, StateLayout, one_state

MIB = 1 << 20
LEAST_CONTEXT = 512  # tokens: shorter ones are not worth serving
FLOAT8 = "float8_e4m3fn"
MAX_SNAPSHOTS = 1 << 16
MAX_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
RESCALE_CHUNK = 1 << 24  # numbers converted at a time
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    FLOAT8: torch.float8_e4m3fn,
}

logger = logging.getLogger(__name__)


def cache_specs(specs: tuple[LayerSpec, ...], cache: CacheConfig) -> tuple[LayerSpec, ...]:
    """The layers' specs, in the dtype that the configuration gives.  Raises StartError."""
    if cache.kv_cache_dtype == "auto":
        return specs
    for spec in specs:
        if isinstance(spec, KVSpec) and spec.kind != "kv":
            whose = "a model with latent attention" if spec.kind == "latent" else "a draft head's hidden states"
            raise StartError(f"option kv_cache_dtype: {cache.kv_cache_dtype} is not for {whose}")
    return tuple(replace(spec, dtype=FLOAT8) if isinstance(spec, KVSpec) else spec for spec in specs)


def layout(
    specs: tuple[LayerSpec, ...],
    cache: CacheConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    free_bytes: int,
    bounded: bool = True,
    most_drafts: int = 0,
    agree: Callable[[int], int] = int,
) -> KVLayout:
    """How many blocks to have.  `free_bytes` of the device's memory are free.  `most_drafts`: of a request in a step.
    `agree`: of several ranks' numbers of blocks the least, which all can have.

    `kv_cache_memory_bytes` if given; else what `max_num_seqs` contexts of `max_model_len` need, at most the
    configured share of the free memory and, if `bounded`, 4 GiB (or one such context, where that is more).
    Recurrent states come first, one for each of `max_num_seqs` and as many snapshots as the configuration has room for.
    Raises StartError if one request of `max_model_len` would not fit and may not be shortened, or not even a short one.
    """
    block_size = cache.block_size or DEFAULT_BLOCK_SIZE
    _check_chunks(specs, block_size, max_model_len)
    states = _states(specs, cache, max_num_seqs, most_drafts, free_bytes, agree)
    if states is not None:
        free_bytes -= KVLayout(specs, 0, block_size, states).state_bytes()
    block_bytes = sum(spec.block_bytes(block_size) for spec in specs)
    context_blocks = -(-max_model_len // block_size)
    context_bytes = context_blocks * block_bytes
    if cache.kv_cache_memory_bytes is not None:
        limit, why = cache.kv_cache_memory_bytes, "given by --kv-cache-memory-bytes"
    else:
        share = int(cache.gpu_memory_utilization * free_bytes)
        limit = min(max(DEFAULT_CPU_KV_BYTES, context_bytes), share) if bounded else share
        why = "the share of the free memory that may be taken"
    if limit < context_bytes:
        fits = limit // block_bytes * block_size
        if not (cache.shorten_context and fits >= min(max_model_len, LEAST_CONTEXT)):
            auto = "" if cache.shorten_context else " (auto: what fits)"
            raise StartError(
                f"the KV cache of one request of max_model_len {max_model_len} needs {gib(context_bytes)}, but only "
                f"{gib(limit)} ({why}) may be used; raise --kv-cache-memory-bytes to at least {_option(context_bytes)}"
                + (f", or lower --max-model-len to at most {fits}{auto}" if fits > 1 else "")
            )
    if not block_bytes:  # no layer attends: blocks count the prefixes that are cached
        return KVLayout(specs, agree(max_num_seqs * context_blocks), block_size, states)
    blocks = limit // block_bytes
    if cache.kv_cache_memory_bytes is None:
        blocks = min(blocks, max_num_seqs * context_blocks)
    return KVLayout(specs, agree(blocks), block_size, states)


def _check_chunks(specs: tuple[LayerSpec, ...], block_size: int, max_model_len: int) -> None:
    """Raise StartError if the blocks of a context would lie across the boundaries of chunks of attention."""
    longest = -(-max_model_len // block_size) * block_size
    for chunk in {spec.chunk for spec in specs if isinstance(spec, KVSpec) and 0 < spec.chunk < longest}:
        if chunk % block_size:
            raise StartError(
                f"option block_size: blocks of {block_size} tokens do not divide the model's chunks of attention of "
                f"{chunk}"
            )


def _option(size: int) -> str:
    """A value of --kv-cache-memory-bytes that is at least `size`."""
    return str(size) if size < MIB else f"{-(-size // MIB)}M"


def _states(
    specs: tuple[LayerSpec, ...],
    cache: CacheConfig,
    slots: int,
    most_drafts: int,
    free_bytes: int,
    agree: Callable[[int], int],
) -> StateLayout | None:
    spare = most_drafts + 1
    size = one_state(specs, spare)
    if not size:
        return None
    room = int(cache.gpu_memory_utilization * free_bytes)
    if slots * size > room:
        raise StartError(
            f"the recurrent states of max_num_seqs {slots} requests need {gib(slots * size)}, but only {gib(room)} "
            f"(the share of the free memory that may be taken) may be used"
            + (f"; lower --max-num-seqs to at most {room // size}" if room >= size else "")
        )
    block_size = cache.block_size or DEFAULT_BLOCK_SIZE
    interval = -(-cache.state_snapshot_interval // block_size) * block_size
    enabled = cache.enable_prefix_caching and interval
    snapshots = min(cache.state_snapshot_memory_bytes, room - slots * size) // size if enabled else 0
    snapshots = agree(snapshots)
    if enabled and not snapshots and cache.state_snapshot_memory_bytes:
        logger.warning(
            "a recurrent state takes %s, and there is room for no snapshot: prefixes are not reused; raise "
            "--state-snapshot-memory-bytes",
            gib(size),
        )
    return StateLayout(slots, min(snapshots, MAX_SNAPSHOTS), interval, spare)


def allocate(layout: KVLayout) -> Pages:
    """Per layer the tensors of its spec, each [num_blocks, *shape of a block] or [states, *shape of a state].  Raises
    StartError."""
    return [
        tuple(_reserve(layout, rows, shape, dtype) for rows, shape, dtype in _tensors(layout, spec))
        for spec in layout.specs
    ]


def _tensors(layout: KVLayout, spec: LayerSpec, spare: int = 0) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
    """Rows, shape of a row and dtype of each of a layer's tensors, with `spare` blocks more."""
    if isinstance(spec, KVSpec):
        return [(layout.num_blocks + spare, shape, DTYPES[spec.dtype]) for shape in spec.shapes(layout.block_size)]
    assert layout.states is not None
    rows = layout.states.slots + layout.states.snapshots
    return [(rows, shape, DTYPES[dtype]) for shape, dtype in spec.state_shapes(layout.states.spare_inputs)]


def allocate_on(device: torch.device, layout: KVLayout, *, spare: int = 0) -> Pages:
    """Allocate as `allocate` does, in a device's own memory, with `spare` blocks more."""
    try:
        return [
            tuple(
                torch.zeros(rows, *shape, dtype=dtype, device=device)
                for rows, shape, dtype in _tensors(layout, spec, spare)
            )
            for spec in layout.specs
        ]
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"cannot allocate {gib(layout.bytes() + layout.state_bytes())} for the KV cache and recurrent states; "
            "lower --gpu-memory-utilization or give --kv-cache-memory-bytes"
        ) from error


def rescale(kv: Pages, old: list[tuple[float, float]], new: list[tuple[float, float]]) -> None:
    """Convert float8 pages stored by the layers' `old` scales to their `new` ones, rounded again.  So a running request
    goes on with the keys and values that older weights stored."""
    for caches, old_scales, new_scales in zip(kv, old, new, strict=True) if kv else ():
        if old_scales == new_scales:
            continue
        for cache, old_scale, new_scale in zip(caches, old_scales, new_scales, strict=True):
            if old_scale != new_scale:
                for pages in torch.split(cache, max(1, RESCALE_CHUNK // cache[0].numel())):
                    pages.copy_((pages.float() * (old_scale / new_scale)).clamp(-MAX_FLOAT8, MAX_FLOAT8))


def _reserve(layout: KVLayout, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[rows, *shape] of zeros, page aligned, no page touched."""
    try:
        size = rows * math.prod(shape) * dtype.itemsize
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise StartError(
            f"cannot reserve {gib(layout.bytes() + layout.state_bytes())} for the KV cache and recurrent states "
            f"({error}); lower --kv-cache-memory-bytes or --max-num-seqs"
        ) from error
    return torch.frombuffer(memory, dtype=dtype).view(rows, *shape)
