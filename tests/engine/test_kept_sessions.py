"""Blocks of open sessions are kept before those of other requests, within their share, and nobody starves."""

from __future__ import annotations

import random

from tests.engine.harness import Engine
from tokserve.features.sessions.kept_blocks import KeptBlocks

SIZE = 4  # of a block


def engine(share: float = 0.5, blocks: int = 16) -> Engine:
    return Engine(num_blocks=blocks, block_size=SIZE, sessions=True, session_cache_share=share)


def ask(e: Engine, key: str, prompt: list[int], session: str = "") -> int:
    """Run a request, and return how many tokens of its prompt were cached."""
    e.add(key, prompt, max_tokens=1, session=session)
    e.run()
    e.check_complete(key)
    return e.received[key].cached


def prompt_of(number: int, length: int = 16) -> list[int]:
    return [1 + number % 18, *(1 + i % 18 for i in range(length - 1))]


def test_a_session_finds_its_blocks_after_strangers_have_used_all_others() -> None:
    e = engine()
    ask(e, "turn", prompt_of(0), "s")
    for number in range(1, 9):
        ask(e, f"other{number}", prompt_of(number))
    assert ask(e, "next", [*prompt_of(0), 15, 14], "s") == 16
    assert e.stats.rooms["session_blocks"] == 4 and e.stats.rooms["session_hits"] == 16


def test_without_a_share_or_a_session_they_are_gone() -> None:
    for share, session in ((0.0, "s"), (0.5, "")):
        e = engine(share)
        ask(e, "turn", prompt_of(0), session)
        for number in range(1, 9):
            ask(e, f"other{number}", prompt_of(number))
        assert ask(e, "next", [*prompt_of(0), 15, 14], session) == 0


def test_the_sessions_used_last_have_the_share() -> None:
    e = engine(share=0.5)  # eight blocks: two sessions
    for number in range(3):
        ask(e, f"turn{number}", prompt_of(number), f"s{number}")
    assert e.stats.rooms["session_blocks"] == 8
    for number in range(10, 18):
        ask(e, f"other{number}", prompt_of(number))
    assert [ask(e, f"next{n}", [*prompt_of(n), 15], f"s{n}") for n in (2, 1, 0)] == [16, 16, 0]


def test_a_session_that_is_closed_keeps_nothing() -> None:
    e = engine()
    ask(e, "turn", prompt_of(0), "s")
    e.call("release_session", session="s")
    e.call("release_session", session="unknown")
    e.run()
    assert e.stats.rooms["session_blocks"] == 0
    for number in range(1, 9):
        ask(e, f"other{number}", prompt_of(number))
    assert ask(e, "next", [*prompt_of(0), 15], "s") == 0


def test_requests_that_need_the_whole_cache_get_it() -> None:
    e = engine(share=1.0)
    ask(e, "turn", prompt_of(0, 40), "s")
    assert ask(e, "large", prompt_of(5, 60)) == 0


def test_a_reset_of_the_cache_forgets_sessions() -> None:
    e = engine()
    ask(e, "turn", prompt_of(0), "s")
    e.call("reset_prefix_cache")
    e.run()
    assert e.stats.rooms["session_blocks"] == 0 and ask(e, "next", [*prompt_of(0), 15], "s") == 0


def test_the_books_are_right_after_random_turns() -> None:
    draw = random.Random(7)
    for share in (0.1, 0.4, 1.0):
        e = engine(share, blocks=24)
        for number in range(50):
            prompt = prompt_of(draw.randrange(5), draw.randrange(4, 60))
            ask(e, f"r{number}", prompt, draw.choice(["", "a", "b", "c"]))
            kept = e.feature(KeptBlocks)
            assert len(kept._holders) <= int(share * 24)
            assert kept._holders == {h: n for h, n in kept._holders.items() if n > 0}
            if number % 20 == 19:
                e.call("reset_prefix_cache")
                e.run()
        e.check_empty()
