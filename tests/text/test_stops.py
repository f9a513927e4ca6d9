"""Stop strings: the automaton finds what a plain search of every string finds, and holds back the same text."""

import random

from tokserve.text.stops import StopStrings


def first(stops: list[str], text: str, floor: int) -> tuple[int, int] | None:
    """The match by definition: it ends first after `floor`; of those that end together, it is the longest."""
    actual = [
        (begin + len(stop), begin)
        for stop in stops
        for begin in range(len(text) - len(stop) + 1)
        if text.startswith(stop, begin) and begin + len(stop) > floor
    ]
    return (min(actual)[1], min(actual)[0]) if actual else None


def test_the_same_as_by_definition() -> None:
    rng = random.Random(4)
    for _ in range(3000):
        letters = rng.choice(["ab", "abc", "aä😀"])
        stops = ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 5))]
        text = "".join(rng.choices(letters, k=rng.randint(0, 14)))
        floor = rng.randint(0, 6)
        assert StopStrings(stops).find(text, floor) == first(stops, text, floor), (stops, text, floor)
        held = [
            begin for begin in range(len(text)) if any(s != text[begin:] and s.startswith(text[begin:]) for s in stops)
        ]
        if not any(stop in text for stop in stops):
            assert StopStrings(stops).safe(text) == min(held, default=len(text)), (stops, text)


def test_without_strings_nothing_is_found_or_held() -> None:
    none = StopStrings()
    assert not none and none.find("abc", 0) is None and none.safe("abc") == 3


def test_a_lone_surrogate_is_an_ordinary_character() -> None:
    assert StopStrings(["\ud800a"]).find("x\ud800a", 0) == (1, 3)
