"""Packing: every sequence finds its tokens, a common prefix is there once, and blocks hold what they should."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokserve.train import tree
from tokserve.train.tree import BLOCK, Packing

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=12)


def arrays(sequences: list[list[int]]) -> list[tree.Int32]:
    return [np.array(sequence, np.int32) for sequence in sequences]


def packed(sequences: list[list[int]], *, share: bool = True) -> tuple[list[tree.Int32], Packing]:
    token_ids = arrays(sequences)
    if share:
        token_ids = [token_ids[number] for number in tree.order(token_ids)]
    return token_ids, tree.pack(token_ids, share=share)


def check(sequences: list[tree.Int32], packing: Packing) -> None:
    for sequence, index in zip(sequences, packing.index, strict=True):
        assert packing.input_ids[index].tolist() == sequence.tolist()
        assert packing.positions[index].tolist() == list(range(len(sequence)))
    blocks = dict(zip(packing.slots.tolist(), range(len(packing.slots)), strict=True))
    assert len(blocks) == len(packing.slots)
    assert not blocks.keys() & set(packing.copied_slots.tolist())
    blocks |= dict(zip(packing.copied_slots.tolist(), packing.copied.tolist(), strict=True))
    for node, table in zip(packing.nodes, packing.block_tables, strict=True):
        assert packing.positions[node.token : node.token + node.end - node.start].tolist() == list(
            range(node.start, node.end)
        )
        stored = [blocks[int(table[p // BLOCK]) * BLOCK + p % BLOCK] for p in range(node.end)]
        assert stored == node.path.tolist()
        assert packing.positions[node.path].tolist() == list(range(node.end))
    assert max([*packing.slots.tolist(), *packing.copied_slots.tolist()], default=-1) < packing.num_blocks * BLOCK


@settings(deadline=None)
@given(SEQUENCES)
def test_a_prefix_is_there_once(sequences: list[list[int]]) -> None:
    token_ids, packing = packed(sequences)
    check(token_ids, packing)
    prefixes = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    assert len(packing.input_ids) == len(prefixes)


@settings(deadline=None)
@given(SEQUENCES)
def test_without_sharing_each_sequence_is_a_node(sequences: list[list[int]]) -> None:
    token_ids, packing = packed(sequences, share=False)
    check(token_ids, packing)
    assert len(packing.input_ids) == sum(len(sequence) for sequence in sequences)
    assert len(packing.copied) == 0


@settings(deadline=None)
@given(SEQUENCES, st.randoms(use_true_random=False))
def test_the_packing_does_not_depend_on_the_order(sequences: list[list[int]], shuffle: random.Random) -> None:
    _, one = packed(sequences)
    shuffle.shuffle(sequences)
    _, other = packed(sequences)
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.block_tables.tolist() == other.block_tables.tolist()


@settings(deadline=None)
@given(SEQUENCES, st.integers(1, 60), st.booleans())
def test_chunks_are_bounded(sequences: list[list[int]], limit: int, share: bool) -> None:
    token_ids = arrays(sequences)
    groups = tree.chunks(token_ids, limit, share=share)
    assert sorted(number for group in groups for number in group) == list(range(len(sequences)))
    for group in groups:
        packing = tree.pack([token_ids[number] for number in group], share=share)
        check([token_ids[number] for number in group], packing)
        assert len(packing.input_ids) <= max(limit, *(len(sequences[number]) for number in group))
    if not share:
        assert [number for group in groups for number in group] == list(range(len(sequences)))


def test_a_branch_within_a_block_copies_the_tokens_before_it() -> None:
    prefix = list(range(3, 3 + BLOCK + 5))
    _, packing = packed([[*prefix, 1, 1], [*prefix, 2]])
    assert [(node.start, node.end) for node in packing.nodes] == [(0, 21), (21, 23), (21, 22)]
    assert packing.copied.tolist() == list(range(BLOCK, BLOCK + 5)) * 2
    tables = packing.block_tables.tolist()
    assert tables[0][0] == tables[1][0] == tables[2][0]
    assert len({row[1] for row in tables}) == 3


@pytest.mark.parametrize("count", [1, 2, 3000])
def test_many_sequences_of_one_prefix(count: int) -> None:
    sequences = [[7] * 40 + [number // 50, number % 50] for number in range(count)]
    token_ids, packing = packed(sequences)
    assert [index.tolist() for index in packing.index] == [node.tolist() for node in packing.index]
    assert all(a.tolist() <= b.tolist() for a, b in pairwise(token_ids))
    assert len(packing.input_ids) == 40 + -(-count // 50) + count
