"""Memory that is released and comes back, in any order and any parts (peer-suites-3 A1): when everything that was
released is back, requests are served."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.test_control import PROMPT, ask
from tests.tiers import slow_after

Call = tuple[str, dict[str, Any]]
PARTS = (["kv_cache"], ["weights"], ["kv_cache", "weights"])
SGLANG: list[Call] = [
    *(("release_memory", {"tags": tags}) for tags in PARTS),
    *(("wake_up", {"tags": tags if len(tags) == 1 else [*tags, "scheduling"]}) for tags in PARTS),
]
VLLM: list[Call] = [
    ("sleep", {"level": 1}),
    ("sleep", {"level": 2}),
    ("release_kv_cache_memory", {}),
    *(("wake_up", {"tags": [tag]}) for tag in ("weights", "kv_cache", "scheduling")),
]


class Server:
    """An engine, and which memory a client believes to be released."""

    def __init__(self) -> None:
        self.engine = Engine(num_blocks=16)
        self.released: set[str] = set()
        self.num_calls = 0

    def call(self, method: str, args: dict[str, Any]) -> None:
        self.num_calls += 1
        reply = ask(self.engine, method, call_id=self.num_calls, **args)
        assert not reply.error, (method, args, reply)
        if method == "wake_up":
            self.released.difference_update(args["tags"])
        elif method == "sleep":
            self.released |= {"kv_cache", "weights"}
        else:
            self.released.update(args.get("tags", ["kv_cache"]))

    def come_back(self) -> None:
        """Resume what is released; weights that are gone are pushed."""
        for tag in sorted(self.released):
            self.call("wake_up", {"tags": [tag]})
        if self.engine.core.control.weights.dropped:
            self.call_update()

    def call_update(self) -> None:
        for method, args in (
            ("start_weight_update", {}),
            ("update_weights", {"update": {"weights": "w"}}),
            ("finish_weight_update", {}),
        ):
            self.num_calls += 1
            reply = ask(self.engine, method, call_id=self.num_calls, **args)
            assert not reply.error, reply
        self.engine.weights_of[self.engine.core.control.weights.version] = "w"

    def check_serving(self) -> None:
        engine, rid = self.engine, f"r{self.num_calls}"
        assert not engine.core.control.frozen and engine.core.control.state == "running"
        assert not engine.core.control.status().sleeping and engine.executor.has_kv
        engine.add(rid, PROMPT, max_tokens=1, ignore_eos=True)
        engine.run()
        engine.check_complete(rid)
        engine.messages.clear()


def play(server: Server, calls: Sequence[Call]) -> None:
    server.released.clear()
    for method, args in calls:
        server.call(method, args)
    server.come_back()
    server.check_serving()


@pytest.mark.slow
@pytest.mark.parametrize("longest", slow_after([3, 4], 1))
@pytest.mark.parametrize("calls", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_when_everything_is_back_requests_are_served(calls: list[Call], longest: int) -> None:
    server = Server()
    for length in range(1, longest + 1):
        for sequence in product(calls, repeat=length):
            if length < 4 or sequence[0][0] != "wake_up":  # as the first call it changes nothing
                play(server, sequence)


def test_only_the_named_memory_is_released() -> None:
    server = Server()
    server.call("release_memory", {"tags": ["kv_cache"]})
    assert not server.engine.executor.has_kv and server.engine.executor.weights is not None
    server.call("wake_up", {"tags": ["kv_cache"]})
    server.call("release_memory", {"tags": ["weights"]})
    assert server.engine.executor.has_kv and server.engine.executor.weights is None
    server.come_back()
    server.check_serving()


def test_a_release_ends_requests_and_refuses_unknown_memory() -> None:
    engine = Engine()
    engine.add("r", PROMPT, max_tokens=30, ignore_eos=True)
    engine.steps(3)
    ask(engine, "release_memory", call_id=1, tags=["kv_cache"])
    assert engine.finish("r").detail == "abort_pause"
    for number, tags in enumerate((["disk"], [], ["scheduling"])):
        assert ask(engine, "release_memory", call_id=2 + number, tags=tags).field == "tags"
    ask(engine, "start_weight_update", call_id=8)
    assert ask(engine, "release_memory", call_id=9, tags=["weights"]).status == 409
    assert not ask(engine, "release_memory", call_id=10, tags=["kv_cache"]).error
