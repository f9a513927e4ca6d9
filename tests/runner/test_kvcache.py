"""Sizes of the KV cache, and the errors where it cannot be had."""

import pytest
import torch

from tokserve.base.errors import StartError
from tokserve.config import CacheConfig
from tokserve.protocol.kv_spec import KVLayout, KVSpec, StateSpec
from tokserve.runner import kvcache

GIB = 1 << 30
SPECS = (KVSpec(2, 16, "float32"), KVSpec(2, 16, "bfloat16"))
BLOCK_BYTES = 16 * (2 * 2 * 16 * 4 + 2 * 2 * 16 * 2)


def blocks(seqs: int = 4, length: int = 100, free: int = GIB, **options: object) -> int:
    cache = CacheConfig(block_size=16, **options)  # type: ignore[arg-type]
    actual = kvcache.layout(SPECS, cache, max_num_seqs=seqs, max_model_len=length, free_bytes=free)
    assert actual.specs == SPECS and actual.block_size == 16
    return actual.num_blocks


def test_the_default_cache_holds_full_contexts() -> None:
    assert blocks() == 4 * 7


def test_blocks_are_of_the_size_that_was_asked_for() -> None:
    actual = kvcache.layout(SPECS, CacheConfig(block_size=8), max_num_seqs=4, max_model_len=100, free_bytes=GIB)
    assert (actual.block_size, actual.num_blocks) == (8, 4 * 13)


def test_default_is_bounded_by_4_gib_and_by_the_share_of_free_memory() -> None:
    assert blocks(seqs=4096, length=10_000, free=100 * GIB) == 4 * GIB // BLOCK_BYTES
    assert blocks(seqs=4096, length=10_000, free=GIB, gpu_memory_utilization=0.5) == GIB // 2 // BLOCK_BYTES


@pytest.mark.parametrize(("block_size", "length", "fits"), [(16, 500, True), (48, 500, False), (48, 96, True)])
def test_blocks_divide_chunks_of_attention(block_size: int, length: int, fits: bool) -> None:
    """A context that may be longer than one chunk has no block across a boundary."""
    specs, cache = (KVSpec(2, 16, "float32"), KVSpec(2, 16, "float32", chunk=128)), CacheConfig(block_size=block_size)
    options = {"max_num_seqs": 4, "max_model_len": length, "free_bytes": GIB}
    if fits:
        assert kvcache.layout(specs, cache, **options).block_size == block_size
        return
    with pytest.raises(StartError, match="option block_size: blocks of 48 tokens do not divide"):
        kvcache.layout(specs, cache, **options)


def test_snapshots_are_taken_where_blocks_end() -> None:
    specs = (*SPECS, StateSpec(3, 8, "float32"))
    for requested, interval in ((0, 0), (1, 16), (16, 16), (100, 112)):
        cache = CacheConfig(block_size=16, state_snapshot_interval=requested)
        states = kvcache.layout(specs, cache, max_num_seqs=4, max_model_len=100, free_bytes=GIB).states
        assert states is not None and states.interval == interval and bool(states.snapshots) == bool(interval)


def test_one_context_may_take_more_than_4_gib_if_there_is_memory() -> None:
    length = 8 * GIB // BLOCK_BYTES * 16
    assert blocks(length=length, free=100 * GIB) == 8 * GIB // BLOCK_BYTES


def test_bytes_given_are_taken_literally() -> None:
    assert blocks(kv_cache_memory_bytes=1000 * BLOCK_BYTES + 1, free=0) == 1000
    assert blocks(kv_cache_memory_bytes=7 * BLOCK_BYTES) == 7


@pytest.mark.parametrize("options", [{"kv_cache_memory_bytes": 7 * BLOCK_BYTES - 1}, {"free": 3 * BLOCK_BYTES}])
def test_too_little_for_one_request_names_bytes_and_flags(options: dict[str, int]) -> None:
    with pytest.raises(StartError) as caught:
        blocks(**options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert str(7 * BLOCK_BYTES) in message
    assert "--kv-cache-memory-bytes" in message and "--max-model-len" in message


def test_a_context_that_need_not_be_full_is_what_fits() -> None:
    """newcomer-3 D9: `--max-model-len auto`."""
    for options in ({"kv_cache_memory_bytes": 40 * BLOCK_BYTES}, {"free": 45 * BLOCK_BYTES}):
        with pytest.raises(StartError, match=r"\(auto: what fits\)"):
            blocks(length=10_000, **options)  # type: ignore[arg-type]
        assert blocks(length=10_000, shorten_context=True, **options) == 40  # type: ignore[arg-type]
    least = kvcache.LEAST_CONTEXT // 16
    assert blocks(length=10_000, shorten_context=True, kv_cache_memory_bytes=least * BLOCK_BYTES) == least
    with pytest.raises(StartError, match="may be used"):
        blocks(length=10_000, shorten_context=True, kv_cache_memory_bytes=least * BLOCK_BYTES - 1)


def test_sizes_are_in_units_for_people() -> None:
    with pytest.raises(StartError) as caught:
        blocks(length=3 * GIB // BLOCK_BYTES * 16, free=2 * GIB)
    assert "needs 3.0 GiB, but only 1.8 GiB (the share" in str(caught.value)


def test_advice_on_max_model_len_works() -> None:
    limit = 5 * BLOCK_BYTES + 3
    with pytest.raises(StartError, match=r"--max-model-len to at most 80"):
        blocks(kv_cache_memory_bytes=limit)
    assert blocks(kv_cache_memory_bytes=limit, length=80) == 5


def test_tensors_have_the_layout_and_read_as_zeros() -> None:
    caches = kvcache.allocate(KVLayout(SPECS, 3, 16))
    assert [k.dtype for k, _ in caches] == [torch.float32, torch.bfloat16]
    for k, v in caches:
        assert k.shape == v.shape == (3, 2, 16, 16)
        assert k.is_contiguous() and k.data_ptr() % 4096 == 0
        assert not k.any() and not v.any()
        k[2] = 1.0
        assert not v.any()


def test_memory_is_reserved_but_not_touched() -> None:
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1])
    caches = kvcache.allocate(KVLayout((KVSpec(8, 128, "float32"),), 8192, 16))
    with open("/proc/self/statm") as file:
        after = int(file.read().split()[1])
    assert sum(k.nbytes + v.nbytes for k, v in caches) == GIB
    assert (after - before) * 4096 < GIB // 8


def test_more_than_the_address_space_is_a_start_error() -> None:
    with pytest.raises(StartError, match="--kv-cache-memory-bytes"):
        kvcache.allocate(KVLayout(SPECS, 1 << 55, 16))


def test_memory_is_the_sum_of_the_specs_tensors() -> None:
    layout = KVLayout(SPECS, 3, 16)
    caches = kvcache.allocate(layout)
    for spec, tensors in zip(SPECS, caches, strict=True):
        assert [tuple(tensor.shape[1:]) for tensor in tensors] == list(spec.shapes(16))
        assert sum(tensor.nbytes for tensor in tensors) == 3 * spec.block_bytes(16)
    assert layout.bytes() == sum(tensor.nbytes for tensors in caches for tensor in tensors) == 3 * BLOCK_BYTES
    on_device = kvcache.allocate_on(torch.device("cpu"), layout, spare=1)
    assert [t.shape[0] for tensors in on_device for t in tensors] == [4] * 4


def test_latent_rows_are_one_tensor_and_never_float8() -> None:
    spec = KVSpec(1, 40, "bfloat16", kind="latent")
    assert spec.shapes(16) == ((16, 40),) and spec.bytes_per_token() == 80
    assert kvcache.cache_specs((spec,), CacheConfig()) == (spec,)
    with pytest.raises(StartError, match="kv_cache_dtype: fp8 is not for a model with latent attention"):
        kvcache.cache_specs((SPECS[0], spec), CacheConfig(kv_cache_dtype="fp8"))
