"""Earlier outputs as drafts: separated by tenant, bounded in memory, found by seed."""

from __future__ import annotations

import random
from array import array

from tokserve.engine.speculation.draft_history import MAX_OUTPUTS, DraftHistory, GroupKey
from tokserve.engine.speculation.token_index import SEPARATOR

CONTEXT = array("i", [7, 8])


def key(group: str = "g", *, adapter: str = "", salt: str = "", client: str = "") -> GroupKey:
    return adapter, salt, client, group.encode()


def test_outputs_are_found_by_group_and_seed() -> None:
    history = DraftHistory(1 << 20)
    history.add(key(), 5, array("i", [1, 2, 3, 4]))
    history.add(key(), 6, array("i", [1, 2, 3, 5, 6]))
    outputs = history.find(key(), 6, CONTEXT)
    assert outputs is not None
    corpus, start = outputs
    assert start is not None and corpus.index.tokens[start : start + 5].tolist() == [1, 2, 3, 5, 6]
    assert corpus.index.tokens.tolist().count(SEPARATOR) == 2
    again = history.find(key(), 9, CONTEXT)
    assert again is not None and again[1] is None and again[0] is corpus
    history.add(key(), 6, array("i", [9, 9, 9, 9]))
    newest = history.find(key(), 6, CONTEXT)
    assert newest is not None and newest[1] is not None and corpus.index.tokens[newest[1]] == 9


def test_tenants_do_not_share() -> None:
    history = DraftHistory(1 << 20)
    history.add(key(), 1, array("i", range(9)))
    for other in (key("h"), key(adapter="a"), key(salt="s"), key(client="c")):
        assert history.find(other, 1, CONTEXT) is None


def test_short_outputs_and_those_larger_than_the_bound_are_not_kept() -> None:
    history = DraftHistory(10_000)
    history.add(key(), 1, array("i", [1, 2, 3]))
    history.add(key(), 1, array("i", [1]) * 5000)
    assert len(history) == 0
    assert DraftHistory(0).find(key(), 1, CONTEXT) is None


def test_memory_stays_within_the_bound() -> None:
    rng = random.Random(0)
    bound = 50_000
    history = DraftHistory(bound)
    for number in range(3000):
        group = key(str(rng.randrange(40)))
        history.add(group, number, array("i", [rng.randrange(99) for _ in range(rng.randrange(60))]))
        if rng.random() < 0.3:
            history.find(group, number, CONTEXT)
        assert history.num_bytes <= bound
    measured = 0
    for name in range(40):
        outputs = history.find(key(str(name)), 0, CONTEXT)
        if outputs is not None:
            outputs[0].index.catch_up(len(outputs[0].index.tokens), 1 << 30)
            measured += outputs[0].index.num_bytes
    assert 0 < measured <= bound
    history.clear()
    assert len(history) == 0 and history.num_bytes == 0


def test_a_group_keeps_its_latest_outputs() -> None:
    history = DraftHistory(1 << 30)
    for number in range(MAX_OUTPUTS + 1):
        history.add(key(), number, array("i", [number] * 5))
    outputs = history.find(key(), MAX_OUTPUTS, CONTEXT)
    assert outputs is not None and outputs[1] is not None and 0 not in outputs[0].index.tokens
    assert history.remove(b"g") == (MAX_OUTPUTS + 1) // 2 + 1 or len(history) == 0
    assert history.num_bytes == 0
