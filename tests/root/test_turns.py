"""Clients take turns."""

from __future__ import annotations

import random

import pytest

from tokserve.base.turns import Turns


def drained(turns: Turns[str]) -> list[str]:
    return [turns.next() for _ in range(len(turns))]


def test_one_client_is_served_in_order() -> None:
    turns: Turns[str] = Turns()
    for item in "abc":
        turns.add("one", item)
    assert drained(turns) == ["a", "b", "c"]
    with pytest.raises(IndexError):
        turns.next()


def test_a_lower_place_comes_first_within_a_client() -> None:
    turns: Turns[str] = Turns()
    for item, place in (("long", 1), ("short", 0), ("longer", 1)):
        turns.add("one", item, place)
    turns.add("two", "other", 1)
    assert drained(turns) == ["short", "other", "long", "longer"]


def test_a_newcomer_waits_for_one_item_of_each_other_client_at_most() -> None:
    turns: Turns[str] = Turns()
    for i in range(100):
        turns.add("greedy", f"g{i}")
    assert turns.next() == "g0"
    turns.add("modest", "m")
    assert [turns.next(), turns.next()][1] == "m"


def test_items_can_be_removed() -> None:
    turns: Turns[str] = Turns()
    chance = random.Random(3)
    items = [f"{i}" for i in range(50)]
    for item in items:
        turns.add(chance.choice("abc"), item, chance.randrange(2))
    removed = chance.sample(items, 20)
    for item in [*removed, "unknown"]:
        turns.remove(item)
    assert len(turns) == 30 and sorted(drained(turns)) == sorted(set(items) - set(removed))
