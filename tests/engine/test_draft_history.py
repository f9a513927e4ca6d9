"""Earlier outputs as drafts: separated by tenant, bounded in memory, found by seed."""

from __future__ import annotations

import random
import sys
import tracemalloc
from array import array

import pytest

from tokserve.features.speculation.draft_history import MAX_OUTPUTS, DraftHistory, GroupKey
from tokserve.features.speculation.token_index import SEPARATOR

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


def test_a_client_with_much_history_drops_its_oldest() -> None:
    history = DraftHistory(200_000)
    history.add(key(client="good"), 1, array("i", range(20)))
    for number in range(100):
        history.add(key(str(number), client="greedy"), 1, array("i", range(1000)))
    assert history.find(key(client="good"), 1, CONTEXT) is not None
    assert history.find(key("99", client="greedy"), 1, CONTEXT) is not None
    assert history.find(key("0", client="greedy"), 1, CONTEXT) is None
    assert history.num_bytes <= 200_000


def filled(bound: int, count: int, looked_up: float, *, measured: bool = False) -> DraftHistory:
    """A history that got so many outputs, of a few groups and of many, short and long ones.  `measured`: what it takes,
    all the while, with Python's own objects."""
    rng = random.Random(0)
    texts = [array("i", rng.choices(range(9999), k=rng.choice([4, 5, 8, 30, 300]))) for _ in range(500)]
    before = 0
    if measured:
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
    history = DraftHistory(bound)
    for number in range(count):
        group = key(str(number if rng.random() < 0.3 else rng.randrange(20)))
        history.add(group, number, texts[number % 500][:])
        assert history.num_bytes <= bound
        if rng.random() < looked_up:
            outputs = history.find(group, number, CONTEXT)
            if outputs is not None:
                outputs[0].index.catch_up(len(outputs[0].index.tokens), 1 << 30)
        if measured and number % 64 == 0:
            assert tracemalloc.get_traced_memory()[0] - before <= bound
    if measured:
        tracemalloc.stop()
    return history


def test_memory_stays_within_the_bound() -> None:
    history = filled(1 << 18, 1500, looked_up=0.5, measured=True)
    assert history.num_bytes > 1 << 17 and len(history) > 20
    history.clear()
    assert len(history) == 0 and history.num_bytes == 0


@pytest.mark.slow
def test_memory_stays_within_the_bound_over_a_million_outputs() -> None:
    assert filled(4 << 20, 1_000_000, looked_up=0.002).num_bytes > 2 << 20


def test_a_group_keeps_its_latest_outputs() -> None:
    history = DraftHistory(1 << 30)
    for number in range(MAX_OUTPUTS + 1):
        history.add(key(), number, array("i", [number] * 5))
    outputs = history.find(key(), MAX_OUTPUTS, CONTEXT)
    assert outputs is not None and outputs[1] is not None and 0 not in outputs[0].index.tokens
    assert history.remove(b"g") == (MAX_OUTPUTS + 1) // 2 + 1 or len(history) == 0
    assert history.num_bytes == 0


def test_the_outputs_of_a_group_are_few_objects() -> None:
    """Thousands of small ones, kept longer than what was made beside them, would hold the memory around them."""
    history = DraftHistory(1 << 20)
    history.add(key(), 1 << 62, array("i", range(9)))
    before = sys.getallocatedblocks()
    for number in range(MAX_OUTPUTS - 1):
        history.add(key(), (1 << 62) + number, array("i", range(9)))
        assert history.find(key(), 1 << 62, CONTEXT) is not None
    assert sys.getallocatedblocks() - before < MAX_OUTPUTS // 4


def test_an_output_without_a_seed_is_found_by_none() -> None:
    history = DraftHistory(1 << 20)
    history.add(key(), None, array("i", [1, 2, 3, 4]))
    outputs = history.find(key(), 0, CONTEXT)
    assert outputs is not None and outputs[1] is None
    assert outputs[0].index.tokens.tolist() == [SEPARATOR, *CONTEXT, 1, 2, 3, 4]


def test_the_newer_half_of_a_group_is_found_as_before() -> None:
    history = DraftHistory(1 << 30)
    for number in range(MAX_OUTPUTS + 2):
        history.add(key(), number, array("i", [number] * (4 + number % 3)))
        history.find(key(), number, CONTEXT)
    for number in range(MAX_OUTPUTS + 2):
        outputs = history.find(key(), number, CONTEXT)
        assert outputs is not None and (outputs[1] is None) == (number < (MAX_OUTPUTS + 2) // 2)
        if outputs[1] is not None:
            tokens = outputs[0].index.tokens[outputs[1] : outputs[1] + 4 + number % 3]
            assert tokens.tolist() == [number] * (4 + number % 3)
            assert outputs[0].index.tokens[outputs[1] - 3 : outputs[1]].tolist() == [SEPARATOR, *CONTEXT]
