"""The index finds what a search of all positions finds, whether tokens come one by one or in bulk."""

from __future__ import annotations

import random
from array import array

import pytest

from tokserve.features.speculation import token_index
from tokserve.features.speculation.token_index import MAX_MATCH, PAIR, SEPARATOR, TokenIndex


def search(tokens: array[int], indexed: int, context: array[int], longer_than: int) -> tuple[int, int] | None:
    """All positions, the latest first."""
    best: tuple[int, int] | None = None
    for position in range(indexed, PAIR - 1, -1):
        count = 0
        most = min(position, len(context), MAX_MATCH)
        while count < most and tokens[position - 1 - count] == context[len(context) - 1 - count]:
            count += 1
        if count >= max(PAIR, longer_than + 1) and (best is None or count > best[1]):
            best = position, count
    return best


@pytest.mark.parametrize("vocab", [2, 7, 300_000])
@pytest.mark.parametrize("bulk", [3, 1000])
def test_the_index_finds_the_longest_match(vocab: int, bulk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_index, "MAX_CANDIDATES", 10_000)
    rng = random.Random(vocab + bulk)
    tokens: array[int] = array("i")
    index = TokenIndex(tokens)
    hits = 0
    for _ in range(40):
        start = rng.randrange(len(tokens) + 1)
        repeated = tokens[start : start + rng.randrange(30)]
        tokens += repeated
        tokens.extend(rng.randrange(vocab) for _ in range(rng.randrange(9)))
        before = index.num_indexed
        index.catch_up(rng.randint(0, len(tokens)), bulk)
        assert index.num_indexed - before <= bulk
        assert index.num_bytes >= 4 * len(tokens)
        longer = rng.choice([0, 0, 1, 5])
        match = index.find(tokens, longer)
        assert match == search(tokens, index.num_indexed, tokens, longer)
        hits += match is not None
    assert hits > 2


def test_tokens_one_by_one_and_in_bulk_make_the_same_index() -> None:
    rng = random.Random(1)
    tokens = array("i", [rng.randrange(9) if rng.random() < 0.9 else SEPARATOR for _ in range(700)])
    single, bulk = TokenIndex(tokens), TokenIndex(tokens)
    while single.num_indexed < len(tokens):
        single.catch_up(len(tokens), 1)
    bulk.catch_up(300, 300)
    bulk.catch_up(len(tokens), 700)
    for end in range(2, len(tokens)):
        context = tokens[:end]
        assert single.find(context) == bulk.find(context)


def test_a_separator_ends_a_match() -> None:
    index = TokenIndex(array("i", [1, 2, SEPARATOR, 3, 4, 5]))
    index.catch_up(6, 6)
    assert index.find(array("i", [1, 2, 7, 3, 4])) == (5, 2)
    assert index.find(array("i", [4])) is None and index.find(array("i", [2, 3])) is None
