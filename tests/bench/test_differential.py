"""benchmarks/differential.py: bodies come from their seed, streams are joined, and differences are found."""

import json
from typing import Any

import httpx
import pytest

from benchmarks.differential import ROUTES, Bodies, ask, differences, joined, kinds

NONE: frozenset[str] = frozenset()


@pytest.mark.parametrize("route", ROUTES)
def test_a_seed_makes_the_same_bodies_of_each_route_again(route: str) -> None:
    bodies = [Bodies(f"7-{number}", 50).body(route, wrong=0.5) for number in range(200)]
    assert bodies == [Bodies(f"7-{number}", 50).body(route, wrong=0.5) for number in range(200)]
    assert len({json.dumps(body) for _, body in bodies}) > 100
    right = [Bodies(f"7-{number}", 50).body(route, wrong=0.0)[1] for number in range(200)]
    for body in right:
        assert all(token < 50 for token in body.get("token_ids", []))


def test_a_stream_is_joined_to_what_would_have_come_at_once() -> None:
    events = [
        {
            "object": "x",
            "choices": [{"index": 1, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}],
        },
        {"choices": [{"index": 0, "delta": {"content": "c"}, "logprobs": {"content": [1]}}]},
        {"choices": [{"index": 0, "delta": {}, "logprobs": {"content": [2, 3]}, "finish_reason": "length"}]},
        {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"total_tokens": 9}},
    ]
    reply = joined("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
    assert reply == {
        "object": "x",
        "done": True,
        "usage": {"total_tokens": 9},
        "choices": [
            {"index": 0, "content": "c", "logprobs": {"content": [1, 2, 3]}, "finish_reason": "length"},
            {"index": 1, "role": "assistant", "content": "ab", "finish_reason": "stop"},
        ],
    }
    assert not joined('data: {"error": {"message": "m"}}\n\n')["done"]


@pytest.mark.parametrize(
    ("first", "second", "actual"),
    [
        ({"a": 1, "id": "x"}, {"a": 1, "id": "y"}, []),
        ({"a": None}, {}, []),
        ({"a": 1}, {}, [("$.a", "only first")]),
        ({"a": 1.0}, {"a": 1.001}, []),
        ({"a": 1.0}, {"a": 1.1}, [("$.a", "value")]),
        ({"a": [1]}, {"a": [1, 2]}, [("$.a", "length")]),
        ({"a": [{"b": "1"}]}, {"a": [{"b": 1}]}, [("$.a[].b", "str, int")]),
        (
            {"top_logprobs": [{"x": 1}]},
            {"top_logprobs": [{"y": 1}]},
            [("$.top_logprobs[].<token>", "only first"), ("$.top_logprobs[].<token>", "only second")],
        ),
    ],
)
def test_differences(first: Any, second: Any, actual: list[tuple[str, str]]) -> None:
    assert list(differences(first, second, frozenset({"id"}))) == actual


def test_replies_are_alike_or_of_a_kind_of_difference() -> None:
    refused = 400, {"error": {"message": "no"}}
    assert kinds("/x", (200, {"a": 1}), (200, {"a": 1}), NONE) == set()
    assert kinds("/x", (200, {"a": 1}), (200, {"a": 2}), NONE) == {"/x  $.a: value"}
    assert kinds("/x", refused, (400, {"error": {"message": "other words"}}), NONE) == set()
    assert kinds("/x", (200, {}), refused, NONE) == {"/x  status 200, 400: 'no'"}


def test_two_unreachable_servers_do_not_agree() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(fail)) as client:
        reply = ask(client, "/tokenize", {})
    assert kinds("/tokenize", reply, reply, NONE) == {"/tokenize  no reply: ConnectError, ConnectError"}
