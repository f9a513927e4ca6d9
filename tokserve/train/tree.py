"""Sequences to one packed batch in which a common prefix is there once.

Sequences are sorted by their tokens, so that those with a common prefix are neighbours; the lengths of the prefixes
that neighbours share make a tree.  A node is a run of tokens that the same sequences have.  Its tokens lie together in
the batch, its keys and values in blocks of its own, after the whole blocks of its ancestors; where it begins within a
block, the ancestors' tokens of that block are stored there once more.  Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
BLOCK = 16  # tokens of a block, by default


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens of the batch from `token` on, for positions start .. end - 1 of the sequences that have them."""

    token: int
    start: int
    end: int
    path: Int64  # [end]: where the tokens of positions 0 .. end - 1 are in the batch
    parent: int  # number of the node with the positions before `start`, negative for none


@dataclass(frozen=True, slots=True)
class Packing:
    """T tokens of R nodes, node after node."""

    input_ids: Int64  # [T]
    positions: Int64  # [T]
    nodes: list[Node]
    index: list[Int64]  # by sequence: where its tokens are in the batch
    block_tables: Int32  # [R, max_blocks]
    slots: Int64  # [T]: number of the block * `block` + offset
    copied: Int64  # [C]: tokens that are stored a second time, and
    copied_slots: Int64  # [C]: where
    num_blocks: int
    block: int = BLOCK  # tokens of a block


def order(sequences: Sequence[Int32]) -> list[int]:
    """Numbers of the sequences, sorted by their tokens."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def shared(one: Int32, other: Int32) -> int:
    """Tokens that two sequences have in common at their beginning."""
    count = min(len(one), len(other))
    unequal = np.flatnonzero(one[:count] != other[:count])
    return int(unequal[0]) if unequal.size else count


def chunks(sequences: Sequence[Int32], max_tokens: int, *, share: bool) -> list[list[int]]:
    """Numbers of sequences in groups of at most `max_tokens` tokens, or of one longer sequence.  `share`: neighbours in
    sorted order count the tokens that they share once."""
    groups: list[list[int]] = []
    budget = 0
    previous: Int32 | None = None
    for number in order(sequences) if share else range(len(sequences)):
        sequence = sequences[number]
        common = shared(previous, sequence) if share and previous is not None else 0
        if not groups or len(sequence) - common > budget:
            groups.append([])
            budget, common = max_tokens, 0
        groups[-1].append(number)
        budget -= len(sequence) - common
        previous = sequence
    return groups


def pack(sequences: Sequence[Int32], *, share: bool, block: int = BLOCK) -> Packing:
    """The sequences, which are in sorted order if they `share`.  `block`: tokens of a block."""
    nodes: list[Node] = []
    ends: list[Int64] = [np.empty(0, np.int64)] * len(sequences)  # by sequence, its path
    tables: list[Int32] = []
    owners: list[int] = []  # by node, a sequence that has it
    builder = _Blocks(block)
    total = 0
    common = [0] + [shared(one, other) if share else 0 for one, other in pairwise(sequences)]
    empty = np.empty(0, np.int64)
    pending = [(0, len(sequences), 0, empty, np.empty(0, np.int32), -1)]
    while pending:
        first, last, start, path, table, parent = pending.pop()
        end = min(common[first + 1 : last], default=len(sequences[first]))
        if end > start:
            path = np.concatenate([path, np.arange(total, total + end - start)])
            table = builder.extend(table, start, end, path)
            nodes.append(Node(total, start, end, path, parent))
            parent = len(nodes) - 1
            tables.append(table)
            owners.append(first)
            total += end - start
        cuts = [number for number in range(first + 1, last) if common[number] == end]
        children = list(zip([first, *cuts], [*cuts, last], strict=True))
        for begin, stop in reversed(children):
            if stop - begin == 1 and len(sequences[begin]) == end:
                ends[begin] = path
            else:
                pending.append((begin, stop, end, path, table, parent))
    return _packing(sequences, nodes, owners, ends, tables, builder)


def _packing(
    sequences: Sequence[Int32],
    nodes: list[Node],
    owners: list[int],
    ends: list[Int64],
    tables: list[Int32],
    builder: _Blocks,
) -> Packing:
    runs = [sequences[owner][node.start : node.end] for owner, node in zip(owners, nodes, strict=True)]
    block_tables = np.zeros((len(nodes), max((len(table) for table in tables), default=0)), np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    positions = [np.arange(node.start, node.end) for node in nodes]
    return Packing(
        input_ids=_joined(runs),
        positions=_joined(positions),
        nodes=nodes,
        index=ends,
        block_tables=block_tables,
        slots=_joined(builder.slots),
        copied=_joined(builder.copied),
        copied_slots=_joined(builder.copied_slots),
        num_blocks=builder.count,
        block=builder.size,
    )


class _Blocks:
    """Hands out blocks of `size` tokens in ascending order, and notes which tokens go where."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0
        self.slots: list[Int64] = []
        self.copied: list[Int64] = []
        self.copied_slots: list[Int64] = []

    def extend(self, table: Int32, start: int, end: int, path: Int64) -> Int32:
        """The block table of a node's positions start .. end - 1 after its parent's `table`; `path`: its tokens."""
        kept = start // self.size
        added = -(-end // self.size) - kept
        table = np.concatenate([table[:kept], np.arange(self.count, self.count + added, dtype=np.int32)])
        self.count += added
        self.slots.append(self._slots(table, np.arange(start, end)))
        before = np.arange(kept * self.size, start)
        self.copied.append(path[before])
        self.copied_slots.append(self._slots(table, before))
        return table

    def _slots(self, table: Int32, positions: Int64) -> Int64:
        return table[positions // self.size].astype(np.int64) * self.size + positions % self.size


def _joined(parts: Sequence[NDArray[np.integer]]) -> Int64:
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)
