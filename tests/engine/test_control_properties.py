"""Random lives of a trainer: generate, abort, pause, resume, good and bad updates, sleep, wake, adapters, in any order.

The scripted executor checks every plan (no step without weights or memory, no prefix hit on KV of other weights); here
it is checked that nothing is lost, hung or misattributed, and that what is made after a commit is what the new weights
make.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from tests.engine.scripted import Engine

OPEN = [9, 8, 7, 6, 5, 4, 3, 2, 9, 9, 8, 8]
ENDS = {"abort_user", "abort_pause", "abort_quarantine"}


class Life:
    """One engine and what was done to it; every verb gets a call id of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        blocks, size = rng.choice([(40, 4), (14, 4), (100, 2)])
        self.engine = Engine(
            num_blocks=blocks, block_size=size, context=40, depth=rng.choice([1, 2]), max_num_seqs=rng.choice([2, 8]),
            max_num_batched_tokens=rng.choice([5, 64]), enable_lora=True, max_loras=2,
        )  # fmt: skip
        self.engine.executor.slow = deque()
        self.engine.executor.beside = rng.random() < 0.7
        self.calls: dict[int, str] = {}
        self.commits: dict[int, str] = {}  # call id -> weights it would commit
        self.staged = ""
        self.num = 0

    def call(self, method: str, **args: Any) -> int:
        self.num += 1
        self.calls[self.num] = method
        self.engine.call(method, call_id=self.num, **args)
        return self.num

    def act(self) -> None:
        rng = self.rng
        choices = [
            self.add, self.add, self.add, self.abort, self.pause, self.resume, self.resume, self.start, self.stage,
            self.stage, self.finish, self.one_call, self.cancel, self.sleep, self.wake, self.wake, self.label,
            self.release, self.reset, self.leave,
            self.load, self.load, self.unload,
        ]  # fmt: skip
        rng.choice(choices)()
        for _ in range(rng.choice([0, 1, 1, 3, 9])):
            self.engine.executor.settle(rng.choice([0, 0, 1, 5]))
            self.engine.step()
            self.learn()

    def learn(self) -> None:
        """Which versions have come to be, and what they stand for."""
        weights = self.engine.executor.weights
        version = self.engine.core.control.status().weight_version
        if weights is not None:
            assert self.engine.weights_of.setdefault(version, weights) == weights, version

    def add(self) -> None:
        prompt = OPEN[: self.rng.choice([4, 8, 12])] + [self.rng.randrange(4) for _ in range(self.rng.randint(1, 4))]
        self.num += 1
        fields: dict[str, Any] = {"seed": self.rng.randrange(3), "ignore_eos": True, "hold": self.rng.random() < 0.5}
        fields["max_tokens"] = self.rng.choice([1, 5, 20])
        fields["adapter"] = self.rng.choice(["", "one", "two", "three"])
        rid = f"r{self.num}"
        verdict = self.engine.submit(rid, self.engine.make(rid, prompt, **fields))
        if verdict.refusal:
            unknown = fields["adapter"] and self.engine.core.adapters.find(fields["adapter"]) is None
            assert verdict.refusal == "quarantined" or (unknown and verdict.refusal == "model_not_found")
            del self.engine.requests[rid]

    def abort(self) -> None:
        rids = list(self.engine.requests)
        if rids:
            self.num += 1
            self.calls[self.num] = "abort"
            self.engine.abort(self.rng.choice(rids), call_id=self.num)

    def pause(self) -> None:
        self.call("pause", mode=self.rng.choice(["abort", "wait", "keep", "keep"]), clear_cache=self.rng.random() < 0.3)

    def resume(self) -> None:
        self.call("resume")

    def start(self) -> None:
        self.call("start_weight_update")

    def stage(self) -> None:
        fault = {"fault": "bad tensor"} if self.rng.random() < 0.3 else {"weights": f"w{self.num}"}
        self.call("update_weights", update=fault)

    def finish(self) -> None:
        self.call("finish_weight_update", weight_version=None if self.rng.random() < 0.5 else f"v-{self.num}")

    def one_call(self) -> None:
        self.call("update_weights_from_dir", weight_dir=f"d{self.num}")  # the scripted executor has no directories

    def cancel(self) -> None:
        self.call("abort_weight_update")

    def sleep(self) -> None:
        self.call("sleep", level=self.rng.randrange(3), mode=self.rng.choice(["abort", "wait", "keep"]))

    def wake(self) -> None:
        tags = self.rng.choice([None, None, ["weights"], ["kv_cache"], ["kv_cache", "scheduling"]])
        self.call("wake_up", tags=tags)

    def release(self) -> None:
        self.call("release_kv_cache_memory")

    def reset(self) -> None:
        self.call("reset_prefix_cache")

    def leave(self) -> None:
        self.call("shutdown_weight_transfer_engine")

    def label(self) -> None:
        self.call("update_weight_version", new_version=f"l{self.num}")

    def load(self) -> None:
        path = self.rng.choice(["a", "b", "bad"]) + str(self.num)
        self.call("load_lora_adapter", lora_name=self.rng.choice(["one", "two", "three"]), lora_path=path)

    def unload(self) -> None:
        self.call("unload_lora_adapter", lora_name=self.rng.choice(["one", "two", "three"]))

    def settle(self) -> None:
        """Bring it back to life whatever was done: abort what is open, push weights, wake, resume, run to the end."""
        for _ in range(3):
            self.rest()
            self.call("abort_weight_update")
            self.rest()
            self.call("resume")
            self.call("start_weight_update")
            self.rest()
            self.call("update_weights", update={"weights": f"last{self.num}"})
            self.rest()
            self.call("finish_weight_update")
            self.rest()
            self.call("wake_up")
            self.rest()
        assert self.engine.core.control.state == "running"

    def rest(self) -> None:
        for _ in range(3000):
            self.engine.executor.settle()
            busy = self.engine.step()
            self.learn()
            if not busy and not self.engine.executor.slow:
                said = len(self.engine.messages)
                self.engine.step()
                assert len(self.engine.messages) == said, "it had more to say, and rested"
                return
        raise AssertionError("the engine does not come to rest")

    def check(self) -> None:
        engine = self.engine
        answered = {reply.call_id for reply in engine.replies}
        assert answered == set(self.calls), {i: self.calls[i] for i in set(self.calls) - answered}
        assert all(reply.status in (400, 404, 409) for reply in engine.replies if reply.error)
        for rid in engine.requests:
            finish = engine.received[rid].finish
            assert finish is not None, f"{rid} has not ended"
            engine.check_spans(rid)
            if finish.detail in ENDS:
                assert engine.tokens(rid) == engine.solo(rid).tokens[: len(engine.tokens(rid))]
            else:
                engine.check_complete(rid)
        engine.check_empty()


def live(seed: int) -> Life:
    life = Life(seed)
    for _ in range(life.rng.choice([10, 40])):
        life.act()
    life.settle()
    life.engine.add("after", [*OPEN, 1, 2, 3], max_tokens=6, ignore_eos=True)
    life.rest()
    (span,) = life.engine.received["after"].outputs[-1].spans
    assert life.engine.weights_of[span[0]] == life.engine.executor.weights
    life.check()
    return life


@pytest.mark.parametrize("part", range(4))
def test_any_order_of_verbs(part: int) -> None:
    commits = 0
    for seed in range(30 * part, 30 * (part + 1)):
        commits += live(seed).engine.core.control.status().epoch
    assert commits > 100  # else this tests nothing


@pytest.mark.slow
def test_any_order_of_verbs_for_longer() -> None:
    for seed in range(1000, 4000):
        live(seed)
