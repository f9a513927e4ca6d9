"""Random commands of a trainer: generate, abort, pause, resume, updates, sleep, wake, adapters, in any order;
and engines that end suddenly and are replaced.

Requests have one choice or several, groups, priorities, deadlines, prompts up to the context's end, and grammars whose
compilation and masks come late; queues are short, slots and budgets few; some engines draft.

The scripted executor checks every plan (no step without weights or memory, no prefix hit on KV of other weights); here
it is checked that nothing is lost, hung or misattributed, that what is made after a commit is what the new weights
make, that what was told last is what holds, and that an engine in the place of another is what that was.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, cast

import pytest

from tests.engine.drafters import RandomDrafter, text_drafter
from tests.engine.grammars import STEPS, LateGrammars, LateMasks
from tests.engine.harness import Engine
from tests.tiers import slow_after
from tokserve.features.grammar.engine import GrammarFeature
from tokserve.protocol.messages import Abort, Status, StepOutput, Submit, SubmitReply
from tokserve.protocol.params import PoolingParams, SamplingParams, StructuredOutputs

OPEN = [9, 8, 7, 6, 5, 4, 3, 2, 9, 9, 8, 8]
ENDS = {"abort_user", "abort_pause", "abort_quarantine", "abort_disconnect", "deadline", "queue_timeout"}
FOLLOWED = ENDS | {"eos", "grammar", "max_tokens", "context", "error", "grammar_limit"}  # of requests with a grammar
REFUSALS = {"quarantined", "paused", "model_not_found", "queue_full", "invalid"}
CONTEXT = 40


class Life:
    """One engine and what was done to it; every verb gets a call id of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        blocks, size = rng.choice([(40, 4), (14, 4), (10, 4), (100, 2), (CONTEXT, 1)])
        self.options: dict[str, Any] = dict(
            num_blocks=blocks,
            block_size=size,
            context=CONTEXT,
            depth=rng.choice([1, 2]),
            max_num_seqs=rng.choice([1, 2, 8, 8]),
            max_num_batched_tokens=rng.choice([1, 5, 64]),
            max_chunk=rng.choice([None, None, 3]),
            enable_prefix_caching=rng.random() < 0.8,
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            enable_lora=True,
            max_loras=rng.choice([1, 2]),
            reject_while_paused=rng.random() < 0.2,
            max_queued_requests=rng.choice([None, None, 0, 3]),
            max_queued_tokens=rng.choice([None, None, 60]),
            snapshots=[None, 6][seed % 2],
        )
        self.directories: dict[str, tuple[str, str]] = {}  # name -> weights in it, state of its files
        self.num = self.kills = 0
        self.drafts = rng.random() < 0.5
        self.begin({"v1": ""}, has_room_for_two=rng.random() < 0.7)

    def begin(self, weights_of: dict[str, str], has_room_for_two: bool) -> None:
        """An engine to which nothing has happened yet.  `weights_of`: what all versions so far stand for."""
        rng = self.rng
        self.engine = Engine(**self.options)
        self.engine.weights_of = weights_of
        self.engine.executor.directories = self.directories
        self.grammars, self.masks = LateGrammars(rng), LateMasks(rng)
        self.engine.feature(GrammarFeature).grammars = cast(Any, self.grammars)
        self.engine.feature(GrammarFeature).masks = cast(Any, self.masks)
        if self.drafts:
            guesses = RandomDrafter(self.engine.executor, rng.randrange(100), right=0.8)
            self.engine.draft_with(rng.choice([guesses, text_drafter()]))
        self.engine.executor.slow = deque()
        self.engine.executor.has_room_for_two = has_room_for_two
        self.calls: dict[int, str] = {}
        self.commits: dict[int, str] = {}  # call id -> weights it would commit
        self.staged = ""
        self.submits: dict[int, Submit] = {}

    def call(self, method: str, /, **args: Any) -> int:
        self.num += 1
        self.calls[self.num] = method
        self.engine.call(method, call_id=self.num, **args)
        return self.num

    def act(self) -> None:
        rng = self.rng
        choices = [
            self.add,
            self.add,
            self.add,
            self.abort,
            self.abort_group,
            self.disconnect,
            self.pause,
            self.resume,
            self.resume,
            self.start,
            self.stage,
            self.stage,
            self.finish,
            self.one_call,
            self.cancel,
            self.sleep,
            self.wake,
            self.wake,
            self.label,
            self.release,
            self.reset,
            self.leave,
            self.load,
            self.load,
            self.unload,
            self.rewrite,
            self.rpc,
            *([self.kill] if rng.random() < 0.5 else []),
        ]
        rng.choice(choices)()
        for _ in range(rng.choice([0, 1, 1, 3, 9])):
            self.engine.executor.settle(rng.choice([0, 0, 1, 5]))
            self.grammars.finish(0.2)
            self.engine.clock.now += rng.choice([0, 0, 0.01, 0.2])
            self.engine.step()
            self.learn()

    def learn(self) -> None:
        """Which versions have come to be, and what they stand for."""
        weights, holds = self.engine.executor.weights, self.engine.core._state_now()
        version = holds.weight_version
        assert self.last_status() == holds or not self.engine.messages
        if weights is not None and (holds.quarantine is None or holds.lost):
            assert self.engine.weights_of.setdefault(version, weights) == weights, version

    def add(self) -> None:
        rng = self.rng
        self.num += 1
        structured = StructuredOutputs(regex="x") if rng.random() < 0.3 else None
        group_id = rng.choice(["", "g", "h"])
        adds = []
        for index in range(rng.choice([1, 1, 2, 5])):
            suffix_len = rng.choice([1, 2, 4, 27, CONTEXT])
            prompt = (OPEN[: rng.choice([0, 4, 8, 12])] + [rng.randrange(4) for _ in range(suffix_len)])[: CONTEXT - 1]
            fields: dict[str, Any] = {"seed": rng.randrange(3), "ignore_eos": rng.random() < 0.8}
            fields |= {
                "stream": rng.random() < 0.5,
                "max_tokens": rng.choice([1, 5, 20, None]),
                "cache_salt": rng.choice(["", "", "s"]),
            }
            fields |= {"adapter": rng.choice(["", "one", "two", "three"]), "priority": rng.randrange(3)}
            if rng.random() < 0.2:
                fields |= {"prompt_logprobs": 1, "prompt_logprobs_start": rng.choice([0, 3, len(prompt) - 1])}
                if rng.random() < 0.5:
                    fields["max_tokens"] = 0
            if rng.random() < 0.2:
                fields |= {"deadline_ms": rng.choice([1, 500, 5000]), "queue_timeout_ms": rng.choice([None, 1, 300])}
            if structured is None and rng.random() < 0.1:
                fields["task"] = PoolingParams(rng.choice(["last", "mean"]))
            adds.append(
                self.engine.make(
                    f"k{self.num}#{index}", prompt, structured_outputs=structured, group_id=group_id, **fields
                )
            )
        self.submits[self.num] = submit = Submit(self.num, f"k{self.num}", adds)
        self.engine.core.receive(b"A", submit)

    def abort(self) -> None:
        if self.submits:
            self.call("abort", keys=[self.rng.choice(list(self.submits.values())).request_id])

    def abort_group(self) -> None:
        self.call("abort_group", group=self.rng.choice(["g", "h"]))

    def disconnect(self) -> None:
        if self.engine.requests:
            rid = self.rng.choice(list(self.engine.requests))
            self.engine.core.receive(b"A", Abort([rid], "abort_disconnect"))

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
        name = f"d{self.num}"
        if self.rng.random() < 0.8:
            self.directories[name] = f"of {name}", "first"
        self.call("update_weights_from_dir", weight_dir=name)

    def rewrite(self) -> None:
        if self.directories:
            self.directories[self.rng.choice(list(self.directories))] = f"rewritten {self.num}", f"{self.num}"

    def rpc(self) -> None:
        self.call("collective_rpc", method="look")

    def last_status(self) -> Status:
        """The last status sent to the front end."""
        statuses = [message for _, message in self.engine.messages if isinstance(message, Status)]
        return statuses[-1] if statuses else Status(weight_version="v1")

    def kill(self) -> None:
        """The engine ends in the middle of whatever it does; another takes its place."""
        was, old = self.last_status(), self.engine
        self.check_ended()
        self.kills += 1
        self.begin(old.weights_of, old.executor.has_room_for_two)
        self.engine.loads = old.loads
        self.call("take_over", last=was)
        self.rest()
        now, executor = self.last_status(), self.engine.executor
        assert not self.engine.replies[0].error, self.engine.replies[0]
        assert (now.paused, now.asleep) == (was.paused, was.asleep)
        in_place = now.lost and not (
            was.lost or executor.has_room_for_two
        )  # it could not be read again in the place of another
        assert now.dropped is (executor.weights is None) and (now.dropped is was.dropped or in_place)
        assert now.sleeping == was.sleeping and executor.has_kv is ("kv_cache" not in was.asleep)
        if now.lost:
            assert now.quarantine and now.epoch == was.epoch + (not was.lost)
            assert was.lost or was.pushed or self.directories.get(str(was.source), ("", None))[1] != was.stamp
        else:
            assert (now.weight_version, now.epoch, now.quarantine) == (was.weight_version, was.epoch, None)
            assert executor.weights == (None if was.dropped else old.weights_of[now.weight_version])

    def check_ended(self) -> None:
        """Messages before a crash: no reply or end is sent twice, and none is false."""
        engine = self.engine
        assert len({reply.call_id for reply in engine.replies}) == len(engine.replies)
        assert {reply.call_id for reply in engine.replies} <= set(self.calls)
        submit_replies = {submit_reply.call_id for submit_reply in engine.submit_replies}
        assert len(submit_replies) == len(engine.submit_replies) and submit_replies <= self.submits.keys()
        for rid, received in engine.received.items():
            if received.finish is not None:
                self.check_request(rid)

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
        """Restore an engine that serves, from any state: abort, push weights, wake, resume, run to the end."""
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
            self.grammars.finish(1.0)
            busy = self.engine.step()
            self.learn()
            if not busy and not self.engine.executor.slow and not self.masks:
                sent = len(self.engine.messages)
                self.engine.step()
                assert len(self.engine.messages) == sent, "it had more to say, and rested"
                return
        raise AssertionError("the engine does not come to rest")

    def check(self) -> None:
        engine = self.engine
        answered = {reply.call_id for reply in engine.replies}
        assert len(answered) == len(engine.replies)
        assert answered == set(self.calls), {i: self.calls[i] for i in set(self.calls) - answered}
        assert all(reply.status in (400, 404, 409) for reply in engine.replies if reply.error)
        refusals = {submit_reply.call_id: submit_reply.refusal for submit_reply in engine.submit_replies}
        assert len(refusals) == len(engine.submit_replies) and refusals.keys() == self.submits.keys()
        decided: set[str] = set()
        for _, message in engine.messages:
            if isinstance(message, SubmitReply):
                decided.update(add.request_id for add in self.submits[message.call_id].requests)
            elif isinstance(message, StepOutput):
                assert decided.issuperset(message.request_ids), "output before the submit_reply"
        for number, submit in self.submits.items():
            for add in submit.requests:
                if refusals[number]:
                    assert refusals[number] in REFUSALS and add.request_id not in engine.received
                else:
                    self.check_request(add.request_id)
        engine.check_empty()
        assert len(engine.core.intake.accepted) == 0 and not engine.core.intake.accepted.request_ids("g")
        assert engine.core.scheduler._limits.requests == engine.core.scheduler._limits.tokens == 0

    def check_request(self, rid: str) -> None:
        engine, finish = self.engine, self.engine.received[rid].finish
        assert finish is not None, f"{rid} has not ended"
        engine.check_spans(rid)
        tokens = engine.tokens(rid)
        task = engine.requests[rid].task
        if isinstance(task, SamplingParams) and task.structured_outputs is not None:
            assert finish.detail in FOLLOWED
            assert all(token in allowed for token, allowed in zip(tokens, STEPS, strict=False))
        elif finish.detail in ENDS:
            assert tokens == engine.solo(rid).tokens[: len(tokens)]
        else:
            engine.check_complete(rid)


def live(seed: int) -> Life:
    life = Life(seed)
    for _ in range(life.rng.choice([10, 40])):
        life.act()
    life.settle()
    after = life.engine.make("after", [*OPEN, 1, 2, 3], max_tokens=6, ignore_eos=True)
    life.submits[0] = Submit(0, "after", [after])
    life.engine.core.receive(b"A", life.submits[0])
    life.rest()
    (span,) = life.engine.received["after"].outputs[-1].spans
    assert life.engine.weights_of[span[0]] == life.engine.executor.weights
    life.check()
    return life


@pytest.mark.slow
@pytest.mark.parametrize("part", slow_after(range(4), 1))
def test_any_order_of_commands(part: int) -> None:
    commits = kills = 0
    for seed in range(50 * part, 50 * (part + 1)):
        life = live(seed)
        commits += life.last_status().epoch
        kills += life.kills
    assert commits > 100 and kills > 10  # otherwise the test has no case


@pytest.mark.slow
def test_any_order_of_commands_for_longer() -> None:
    for seed in range(1000, 4000):
        live(seed)
