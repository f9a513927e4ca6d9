"""Where a sequence's last tokens occurred before: a hash chain over pairs of tokens, as in LZ77.

Each position remembers the latest earlier position with the same hash of the two tokens before it, in 12 to 20 bytes
a token.  Appending a token takes about a microsecond (in bulk, with numpy, a quarter of that), and a search walks at
most `MAX_CANDIDATES` of a chain.
"""

from __future__ import annotations

from array import array

import numpy as np

PAIR = 2  # tokens that a candidate has in common with the context, at least
MAX_MATCH = 16  # tokens; longer matches count as this long
MAX_CANDIDATES = 16  # of a chain that a search looks at
MIN_BULK = 64  # tokens that are indexed with numpy; fewer one by one
SEPARATOR = -1  # between sequences; no token
_FACTORS = (0x9E3779B1, 0x85EBCA77)
_MIN_HEADS = 64


class TokenIndex:
    """Searches `tokens`, which others may append to; `catch_up` indexes what is new."""

    def __init__(self, tokens: array[int]) -> None:
        self.tokens = tokens
        self._next = array("i", [-1])  # by position: the position before it in its chain, -1 at the end
        self._heads = array("i", [-1]) * _MIN_HEADS  # by hash: the newest position of its chain
        self._mask = _MIN_HEADS - 1

    @property
    def num_indexed(self) -> int:
        """Positions whose preceding pair can be searched for."""
        return len(self._next) - 1

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self.tokens) + len(self._next) + len(self._heads))

    def catch_up(self, end: int, most: int) -> None:
        """Index positions up to `end`, but no more than `most` of them."""
        start = self.num_indexed
        end = min(end, start + most, len(self.tokens))
        if end > len(self._heads):
            self._grow(end)
        if end - start >= MIN_BULK:
            self._index_bulk(start, end)
            return
        tokens, following, heads, mask = self.tokens, self._next, self._heads, self._mask
        for position in range(start + 1, end + 1):
            if position < PAIR:
                following.append(-1)
                continue
            key = (tokens[position - 2] * _FACTORS[0] + tokens[position - 1] * _FACTORS[1] & 0xFFFFFFFF) >> 8 & mask
            following.append(heads[key])
            heads[key] = position

    def _grow(self, end: int) -> None:
        """More heads; what was indexed is indexed again."""
        size = len(self._heads)
        while size < end:
            size *= 2
        size = min(size, 1 << 24)
        if size == len(self._heads):
            return
        indexed = self.num_indexed
        self._heads, self._mask = array("i", [-1]) * size, size - 1
        self._next = array("i", [-1])
        self._index_bulk(0, indexed)

    def _index_bulk(self, start: int, end: int) -> None:
        """Index positions start + 1 to end with numpy, as that many single steps would."""
        first = max(start + 1, PAIR)
        self._next.extend([-1] * (end + 1 - len(self._next)))
        if first > end:
            return
        pairs = np.frombuffer(self.tokens, np.int32)[first - 2 : end].astype(np.uint32)
        keys = pairs[:-1] * np.uint32(_FACTORS[0]) + pairs[1:] * np.uint32(_FACTORS[1])
        keys = keys >> np.uint32(8) & np.uint32(self._mask)  # of the positions first .. end
        order = np.argsort(keys, kind="stable").astype(np.int32)
        ordered, positions = keys[order], order + np.int32(first)
        heads, following = np.frombuffer(self._heads, np.int32), np.frombuffer(self._next, np.int32)
        before = np.empty(len(order), np.int32)
        before[1:] = positions[:-1]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = ordered[1:] != ordered[:-1]
        before[is_first] = heads[ordered[is_first]]
        following[positions] = before
        is_last = np.ones(len(order), np.bool_)
        is_last[:-1] = is_first[1:]
        heads[ordered[is_last]] = positions[is_last]

    def find(self, context: array[int], longer_than: int = 0) -> tuple[int, int] | None:
        """(position, length): `length` tokens before `position` are the last of `context`, the most of any candidate
        and, of equally many, the latest; None if there are not more than `longer_than` anywhere.

        The position after the context's own end is not a candidate as long as it is not indexed.
        """
        end = len(context)
        if end < PAIR:
            return None
        first, last = context[-2], context[-1]
        key = (first * _FACTORS[0] + last * _FACTORS[1] & 0xFFFFFFFF) >> 8 & self._mask
        position, tokens, following = self._heads[key], self.tokens, self._next
        best, length = -1, max(longer_than, PAIR - 1)
        for _ in range(MAX_CANDIDATES):
            if position < 0:
                break
            if tokens[position - 1] == last and tokens[position - 2] == first:
                most = min(position, end, MAX_MATCH)
                count = PAIR
                while count < most and tokens[position - 1 - count] == context[end - 1 - count]:
                    count += 1
                if count > length:
                    best, length = position, count
                    if count >= MAX_MATCH:
                        break
            position = following[position]
        return None if best < 0 else (best, length)
