"""Chooses the engine of a request among several: by the prefix that an engine has cached, and by load.

An engine's expected cost of a request is the work that it has already, plus the prompt tokens that it would have to
compute; the lowest wins.  Requests of a group, or with the same drafts, stay with one engine unless that has much more
to do than another.  Nothing here changes a result: any engine gives the same one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from tokserve.client.request_state import RequestState

MAX_BLOCKS = 128  # leading blocks of a prompt that are compared
MAX_PREFIXES = 1 << 17  # remembered: a block each
MAX_GROUPS = 1 << 14


class PrefixRouter:
    """`block_size`: tokens of a cached block.  `slack`: tokens by which the load of a group's engine may exceed twice
    the least."""

    def __init__(self, num_engines: int, block_size: int, slack: int) -> None:
        self._num_engines = num_engines
        self._block_bytes = 4 * block_size
        self._slack = slack
        self._engines_of: OrderedDict[int, int] = OrderedDict()  # engines that have a prefix, a bit each, by its hash
        self._groups: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._next = 0  # of equal engines

    def choose(self, requests: Sequence[RequestState], loads: Mapping[int, int]) -> int:
        """The engine for requests that are submitted together.  `loads`: work in tokens of the engines that may serve
        them, one at least; see `Requests.tokens`."""
        request = requests[0]
        options = request.engine_requests[0].options
        keys = self._prefix_keys(request.prompt.ids, (options.adapter, options.cache_salt))
        groups = [(kind, name) for kind, name in (("group", options.group_id), ("drafts", options.draft_group)) if name]
        engine = self._group_engine(groups, loads)
        if engine is None:
            engine = self._cheapest(keys, loads)
        self._remember(engine, keys, groups)
        return engine

    def forget(self, engine: int | None = None) -> None:
        """The engine, or every engine, has nothing cached any more."""
        if engine is None:
            self._engines_of.clear()
            return
        others = ~(1 << engine)
        for key, engines in list(self._engines_of.items()):
            if engines & others:
                self._engines_of[key] = engines & others
            else:
                del self._engines_of[key]

    def _prefix_keys(self, packed: bytes, domain: tuple[str, str | None]) -> list[int]:
        """A hash for each of the prompt's leading whole blocks, with all before it."""
        key, size = hash(domain), self._block_bytes
        keys = []
        for start in range(0, min(len(packed) // size, MAX_BLOCKS) * size, size):
            key = hash((key, packed[start : start + size]))
            keys.append(key)
        return keys

    def _group_engine(self, groups: Sequence[tuple[str, str]], loads: Mapping[int, int]) -> int | None:
        """The engine of the requests' group, unless it has much more to do than another."""
        engine = next((self._groups[group] for group in groups if group in self._groups), None)
        if engine is None or engine not in loads or loads[engine] > 2 * min(loads.values()) + self._slack:
            return None
        return engine

    def _cheapest(self, keys: Sequence[int], loads: Mapping[int, int]) -> int:
        saved = self._saved(keys)
        order = sorted(loads, key=lambda engine: (engine - self._next) % self._num_engines)
        engine = min(order, key=lambda engine: loads[engine] - saved.get(engine, 0))
        self._next = (engine + 1) % self._num_engines
        return engine

    def _saved(self, keys: Sequence[int]) -> dict[int, int]:
        """The tokens of the longest prefix that each engine has, by engine."""
        saved: dict[int, int] = {}
        engines = (1 << self._num_engines) - 1
        for index, key in enumerate(keys):
            still = engines & self._engines_of.get(key, 0)
            for engine in range(self._num_engines):
                if (engines ^ still) >> engine & 1:
                    saved[engine] = index * self._block_bytes // 4
            engines = still
            if not engines:
                return saved
        return saved | {
            engine: len(keys) * self._block_bytes // 4 for engine in range(self._num_engines) if engines >> engine & 1
        }

    def _remember(self, engine: int, keys: Sequence[int], groups: Sequence[tuple[str, str]]) -> None:
        bit = 1 << engine
        for key in keys:
            self._engines_of[key] = self._engines_of.pop(key, 0) | bit
        while len(self._engines_of) > MAX_PREFIXES:
            self._engines_of.popitem(last=False)
        for group in groups:
            self._groups[group] = engine
            self._groups.move_to_end(group)
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
