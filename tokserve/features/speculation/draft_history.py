"""Earlier outputs, kept by group as drafts for later requests of the same group, within a bound of memory.

A group's key holds what separates tenants: the adapter, the cache salt and, unless the request names its group, the
client.  Of the client that has the most, the groups used least recently are dropped first, and within a group its
oldest outputs.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from tokserve.features.speculation.draft_state import Corpus
from tokserve.features.speculation.token_index import SEPARATOR, TokenIndex

GroupKey = tuple[str, str, str, bytes]  # adapter, cache salt, client ("" of groups that requests name), group
MIN_OUTPUT = 4  # tokens; shorter outputs are not kept
MAX_OUTPUTS = 256  # of a group
GROUP_BYTES, OUTPUT_BYTES = 1536, 160  # at most: of a group without outputs, and of an output without tokens
_END, _HAS_SEED, _SEED, _START = range(4)  # where its tokens end, its seed, and where it begins in the corpus
_COLUMNS = 4
_OVERHEAD = 5  # bytes of an indexed token in bytes of the token alone, at most


class _Group:
    """The outputs of one group, oldest first, and the same as one corpus.  They are kept in two arrays: objects of each
    output would be made between others that end before it, and hold the memory around them."""

    __slots__ = ("_corpus", "_joined", "_table", "_tokens")

    def __init__(self) -> None:
        self._tokens = array("i")  # of all outputs
        self._table = array("q")  # by output: _COLUMNS
        self._corpus: Corpus | None = None
        self._joined = 0  # outputs in the corpus

    def __len__(self) -> int:
        return len(self._table) // _COLUMNS

    @property
    def num_bytes(self) -> int:
        return GROUP_BYTES + OUTPUT_BYTES * len(self) + 4 * _OVERHEAD * len(self._tokens)

    def add(self, seed: int | None, tokens: array[int]) -> None:
        self._tokens.extend(tokens)
        self._table.extend((len(self._tokens), seed is not None, seed or 0, -1))

    def halve(self) -> None:
        """Drop the older half."""
        kept = self._table[(len(self) + 1) // 2 * _COLUMNS :]
        dropped = self._end((len(self) + 1) // 2)
        for place in range(0, len(kept), _COLUMNS):
            kept[place + _END] -= dropped
        self._tokens, self._table = self._tokens[dropped:], kept
        self._corpus, self._joined = None, 0

    def _end(self, count: int) -> int:
        """Where the first `count` outputs end."""
        return self._table[(count - 1) * _COLUMNS + _END] if count else 0

    def corpus(self, seed: int, context: Sequence[int]) -> tuple[Corpus, int | None]:
        """All outputs, each after `context`, the prompt's end; and where the newest of the same seed begins."""
        if self._corpus is None:
            self._corpus = Corpus("history", TokenIndex(array("i")))
        text, table = self._corpus.index.tokens, self._table
        for number in range(self._joined, len(self)):
            text.append(SEPARATOR)
            text.extend(context)
            table[number * _COLUMNS + _START] = len(text)
            text.extend(self._tokens[self._end(number) : self._end(number + 1)])
        self._joined = len(self)
        rows = np.frombuffer(table, np.int64).reshape(-1, _COLUMNS)
        starts = rows[(rows[:, _SEED] == seed) & (rows[:, _HAS_SEED] == 1), _START]
        return self._corpus, int(starts[-1]) if len(starts) else None


class _Kept:
    """What is kept of a client: its groups, the least recently used first, and their bytes."""

    __slots__ = ("groups", "num_bytes")

    def __init__(self) -> None:
        self.groups: OrderedDict[GroupKey, None] = OrderedDict()
        self.num_bytes = 0


_bytes_of = attrgetter("num_bytes")


class DraftHistory:
    """`max_bytes`: of all groups together; 0: nothing is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._groups: dict[GroupKey, _Group] = {}
        self._clients: dict[str, _Kept] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, key: GroupKey, seed: int | None, tokens: array[int]) -> None:
        """Keep an output, if it is worth it."""
        if len(tokens) < MIN_OUTPUT or 4 * _OVERHEAD * len(tokens) > self._max_bytes // 2:
            return
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
            self._count(key, group.num_bytes)
        before = group.num_bytes
        group.add(seed, tokens)
        while len(group) > MAX_OUTPUTS or (group.num_bytes > self._max_bytes and len(group) > 1):
            group.halve()
        self._count(key, group.num_bytes - before)
        while self.num_bytes > self._max_bytes:
            most = max(self._clients.values(), key=_bytes_of)
            self._drop(next(iter(most.groups)))

    def _count(self, key: GroupKey, num_bytes: int) -> None:
        """A group was used, and has so many more bytes."""
        kept = self._clients.setdefault(key[2], _Kept())
        kept.groups[key] = None
        kept.groups.move_to_end(key)
        kept.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _drop(self, key: GroupKey) -> _Group:
        group = self._groups.pop(key)
        self._count(key, -group.num_bytes)
        client = key[2]
        kept = self._clients[client]
        del kept.groups[key]
        if not kept.groups:
            del self._clients[client]
        return group

    def find(self, key: GroupKey, seed: int, context: Sequence[int]) -> tuple[Corpus, int | None] | None:
        """The outputs of the group, and the position where one of the same seed begins."""
        group = self._groups.get(key)
        if group is None:
            return None
        self._count(key, 0)
        return group.corpus(seed, context)

    def count(self, key: GroupKey) -> int:
        group = self._groups.get(key)
        return 0 if group is None else len(group)

    def remove(self, group: bytes) -> int:
        """Drop a group that requests name, with all adapters and salts; returns how many outputs it had."""
        return sum(len(self._drop(key)) for key in list(self._groups) if key[3] == group)

    def clear(self) -> None:
        """Drop everything."""
        self._groups.clear()
        self._clients.clear()
        self.num_bytes = 0
