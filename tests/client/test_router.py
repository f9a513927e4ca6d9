"""Which engine a request goes to: the one with its prefix, its group's, or the one with the least to do."""

from __future__ import annotations

from tokserve.client.request_state import RequestState
from tokserve.features.fleet.router import MAX_BLOCKS, PrefixRouter
from tokserve.protocol.messages import EngineRequest
from tokserve.protocol.params import RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, pack_ids

BLOCK = 4


def request(ids: list[int], **options: str) -> list[RequestState]:
    prompt = TokenPrompt(pack_ids(ids))
    sent = EngineRequest("r#0", prompt, SamplingParams(), RequestOptions(**options), 1)  # type: ignore[arg-type]
    return [RequestState("r", prompt, 1, [], [sent])]


def make(size: int = 3, slack: int = 100) -> PrefixRouter:
    return PrefixRouter(size, BLOCK, slack)


def test_equal_engines_get_requests_in_turn() -> None:
    router = make()
    chosen = [router.choose(request([index]), {0: 0, 1: 0, 2: 0}) for index in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_the_engine_with_the_longest_prefix_is_chosen_until_it_has_too_much_to_do() -> None:
    router, idle = make(), dict.fromkeys(range(3), 0)
    shared = list(range(40))
    first = router.choose(request([*shared, 1]), idle)
    assert router.choose(request([*shared, 2, 3]), idle) == first
    assert router.choose(request([*shared, 4]), idle | {first: 39}) == first, "less than what it saves"
    other = router.choose(request([*shared, 5]), idle | {first: 41})
    assert other != first
    assert router.choose(request([*shared, 6]), idle | {other: 1}) == first, "now both have it"
    assert router.choose(request(shared[1:]), idle) == (first + 1) % 3, "another prefix"


def test_a_prefix_counts_in_whole_blocks_and_within_its_salt_and_adapter() -> None:
    for options in ({"cache_salt": "a"}, {"adapter": "a"}):
        router, idle = make(2), {0: 0, 1: 0}
        first = router.choose(request(list(range(8))), idle)
        assert router.choose(request(list(range(8)), **options), idle) != first
    router = make(2)
    first = router.choose(request([1, 2, 3]), idle)
    assert router.choose(request([1, 2, 3]), idle) != first, "less than a block is not cached"


def test_only_the_leading_blocks_of_a_long_prompt_are_compared() -> None:
    router = make(2)
    router.choose(request([7] * (BLOCK * MAX_BLOCKS * 2)), {0: 0, 1: 0})
    assert len(router._engines_of) == MAX_BLOCKS


def test_a_group_stays_where_it_is_unless_that_engine_has_much_more_to_do() -> None:
    for name in ("group_id", "draft_group"):
        router, idle = make(), dict.fromkeys(range(3), 0)
        first = router.choose(request([1], **{name: "g"}), idle)
        assert router.choose(request([2], **{name: "g"}), idle | {first: 100}) == first
        assert router.choose(request([3], **{name: "other"}), idle | {first: 100}) != first
        moved = router.choose(request([4], **{name: "g"}), idle | {first: 101})
        assert moved != first and router.choose(request([5], **{name: "g"}), idle | {moved: 50}) == moved
        rest = {engine: 0 for engine in idle if engine != moved}
        assert router.choose(request([6], **{name: "g"}), rest) != moved, "it is not there now"


def test_what_an_engine_has_lost_is_forgotten() -> None:
    router, idle = make(2), {0: 0, 1: 0}
    shared = list(range(8))
    assert [router.choose(request(shared), {engine: 0}) for engine in (0, 1)] == [0, 1]
    router.forget(0)
    assert [router.choose(request(shared), idle) for _ in range(3)] == [1, 1, 1]
    router.forget()
    assert not router._engines_of
