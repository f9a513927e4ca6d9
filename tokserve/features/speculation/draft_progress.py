"""Which positions of a slot have keys and values of the draft model: it computes what it needs, when it needs it.

Its pages are in the blocks of the slots' tables, so blocks that requests share hold its keys and values once.  A full
block is known by a hash of all tokens up to its end, which outlives the request: another request with the same prefix,
or the same one after a preemption, finds what was computed.  A wrong answer costs acceptance, never a result.
"""

from __future__ import annotations

import numpy as np

from tokserve.protocol.plan import Int32
from tokserve.runner.tables.slots import Slots


class DraftProgress:
    """What the draft model has computed, by slot and by block."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._computed: dict[int, int] = {}  # by slot: leading positions of tokens that stay
        self._drafted: dict[int, Int32] = {}  # by slot: tokens computed after those, which may have been rejected
        self._chains: dict[int, list[int]] = {}  # by slot: the hash at the end of each full block
        self._blocks: dict[int, int] = {}  # by block: the hash at the end of what is in it

    def release(self, slot: int) -> None:
        """The slot is free, or another request takes it."""
        self._computed.pop(slot, None)
        self._drafted.pop(slot, None)
        self._chains.pop(slot, None)

    def clear(self) -> None:
        """The pages have lost their contents."""
        self._computed.clear()
        self._drafted.clear()
        self._chains.clear()
        self._blocks.clear()

    def computed(self, slot: int, length: int) -> int:
        """Leading positions of the slot's `length` tokens that are computed, at most all but the last."""
        known = self._computed.get(slot, 0)
        if known == len(self._chains.get(slot, ())) * self._slots.block_size:  # others may have computed more
            known = self._find(slot, length)
        drafted = self._drafted.pop(slot, None)
        if drafted is not None:
            unchanged = self._slots.tokens[slot, known : known + len(drafted)] == drafted
            known += len(drafted) if unchanged.all() else int(unchanged.argmin())
        known = self._computed[slot] = min(known, length - 1)
        return known

    def before_write(self, slot: int, start: int, end: int) -> None:
        """These positions are about to be computed."""
        size = self._slots.block_size
        for block in self._slots.blocks[slot, start // size : -(-end // size)].tolist():
            self._blocks.pop(block, None)

    def on_computed(self, slot: int, end: int) -> None:
        """The positions up to `end`, of tokens that stay, are computed."""
        self._computed[slot] = end
        chain, size = self._chains.setdefault(slot, []), self._slots.block_size
        for index in range(len(chain), end // size):
            chain.append(self._hash(slot, index, chain))
            self._blocks[int(self._slots.blocks[slot, index])] = chain[index]

    def on_drafted(self, slot: int, token_ids: Int32) -> None:
        """The positions of these drafts are computed as well."""
        self._drafted[slot] = token_ids

    def _find(self, slot: int, length: int) -> int:
        chain, size = self._chains.setdefault(slot, []), self._slots.block_size
        for index in range(len(chain), (length - 1) // size):
            code = self._hash(slot, index, chain)
            if self._blocks.get(int(self._slots.blocks[slot, index])) != code:
                break
            chain.append(code)
        return len(chain) * size

    def _hash(self, slot: int, index: int, chain: list[int]) -> int:
        """The hash at the end of the slot's block `index`, where `chain` has those of all before it."""
        size = self._slots.block_size
        tokens = np.ascontiguousarray(self._slots.tokens[slot, index * size : (index + 1) * size])
        return hash((chain[index - 1] if index else 0, tokens.tobytes()))
