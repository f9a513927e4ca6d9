"""Memory for packed weights: adjacent tensors, freed with the last one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests import needs
from tokserve.ops.cpu.arena import ALIGNMENT, CHUNK, HUGE, Arena


def mappings() -> Iterator[tuple[int, int, list[str]]]:
    """Begin, end and flags of every mapping."""
    begin = end = 0
    for line in needs.MAPPINGS.read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = int(match[1], 16), int(match[2], 16)
        elif line.startswith("VmFlags:"):
            yield begin, end, line.split()[1:]


def mapped(address: int) -> list[str] | None:
    """The flags of the mapping at an address; None if there is none."""
    return next((flags for begin, end, flags in mappings() if begin <= address < end), None)


def ends(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@pytest.mark.slow
def test_tensors_of_any_type_and_size_lie_apart_and_aligned() -> None:
    arena, kept = Arena(), []
    for count in (1, 63, 64, 1000, 0, 5_000_001, 12_000_000, 20_000_000, 7):
        for dtype in (torch.bfloat16, torch.float32, torch.uint8):
            tensor = arena.empty(count, dtype)
            assert (tensor.dtype, tensor.shape) == (dtype, (count,))
            kept.append(tensor.fill_(len(kept)))
    spans = sorted(ends(tensor) for tensor in kept if len(tensor))
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    assert all(torch.equal(tensor, torch.full_like(tensor, i)) for i, tensor in enumerate(kept))


def test_small_tensors_share_a_mapping_that_begins_with_a_huge_page() -> None:
    arena = Arena()
    first, second = arena.empty(100, torch.float32), arena.empty(CHUNK // 8, torch.float32)
    assert first.data_ptr() % HUGE == 0
    assert second.data_ptr() == first.data_ptr() + 448
    large = arena.empty(CHUNK, torch.uint8)
    assert large.data_ptr() % HUGE == 0
    assert arena.empty(1, torch.uint8).data_ptr() == ends(second)[1]


@needs.HUGE.skips()
def test_the_mapping_is_advised_to_be_of_huge_pages() -> None:
    arena = Arena()
    for tensor in (arena.empty(10, torch.uint8), arena.empty(CHUNK, torch.uint8)):
        flags = mapped(tensor.data_ptr())
        assert flags is not None and "hg" in flags


@needs.SMAPS.skips()
def test_a_mapping_goes_with_its_last_tensor() -> None:
    arena = Arena()
    first, second = arena.empty(HUGE, torch.uint8), arena.empty(HUGE, torch.uint8)
    address = first.data_ptr()
    del first
    assert mapped(address) is not None
    del second
    assert mapped(address) is None
    third = arena.empty(HUGE, torch.uint8).fill_(1)  # in a new one
    assert mapped(third.data_ptr()) is not None
