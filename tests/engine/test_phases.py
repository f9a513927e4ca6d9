"""Commands in two phases over the scripted executor: what is taken back leaves the engine as it was."""

from __future__ import annotations

from typing import Any

from tests.engine.harness import Engine
from tests.engine.test_adapters import load, make
from tests.engine.test_control import PROMPT, ask, busy, state
from tokserve.features.lora.commands import Adapters
from tokserve.protocol.messages import Reply

NO = {"go": False, "reason": "engine 1 refused: no"}


def prepare(engine: Engine, method: str, /, **args: Any) -> Reply:
    reply = ask(engine, "prepare", call_id=70, method=method, args=args, token="t")
    assert reply.error or reply.result == {"prepared": True}
    return reply


def decide(engine: Engine, call_id: int = 71, **decision: Any) -> Reply:
    return ask(engine, "decide", call_id=call_id, **{"token": "t", "go": True} | decision)


def staged(engine: Engine) -> Engine:
    ask(engine, "start_weight_update", call_id=60)
    ask(engine, "update_weights", call_id=61, update={"weights": "w1"})
    return engine


def test_a_prepared_commit_takes_effect_when_that_is_decided() -> None:
    engine = staged(busy())
    assert prepare(engine, "finish_weight_update", weight_version="one").error is None
    before = len(engine.tokens("r0"))
    engine.steps(4)
    assert len(engine.tokens("r0")) > before, "generation goes on"
    assert (engine.core.control.weights.version, state(engine)) == ("v1", "updating")
    done = decide(engine, values={"epoch": 7}).result["result"]
    assert (done["weight_version"], done["epoch"], state(engine)) == ("one", 7, "running")


def test_a_prepared_commit_is_taken_back() -> None:
    engine = staged(busy())
    prepare(engine, "finish_weight_update", weight_version="one")
    assert decide(engine, **NO).error == "engine 1 refused: no"
    status = engine.core.control.status()
    assert (status.weight_version, status.epoch, status.state) == ("v1", 0, "running")
    assert status.failure == "engine 1 refused: no"
    engine.run()
    engine.check_complete("r0")
    ask(engine, "start_weight_update", call_id=62)


def test_nothing_is_lost_for_an_update_in_place_that_another_engine_refuses() -> None:
    engine = busy()
    engine.executor.has_room_for_two = False
    prepare(engine, "start_weight_update")
    assert engine.executor.weights is not None
    assert decide(engine, **NO).error and state(engine) == "running"
    engine.run()
    engine.check_complete("r0")
    assert prepare(engine, "start_weight_update").error is None
    assert decide(engine, 72).result["result"]["update_id"] and engine.executor.weights is None


def test_a_commit_that_is_decided_is_not_aborted() -> None:
    engine = staged(busy(depth=2))
    prepare(engine, "finish_weight_update", weight_version="one")
    engine.call("decide", call_id=71, token="t", go=True, values={"epoch": 1})
    aborted = ask(engine, "abort_weight_update", call_id=72)
    assert aborted.status == 409 and aborted.code == "no_update"
    assert engine.core.control.weights.version == "one"


def test_an_update_that_is_aborted_before_the_decision_is_over() -> None:
    engine = staged(busy())
    prepare(engine, "finish_weight_update", weight_version="one")
    assert ask(engine, "abort_weight_update", call_id=72).error is None
    assert decide(engine, values={"epoch": 1}).status == 409
    assert engine.core.control.weights.version == "v1" and state(engine) == "running"


def test_an_adapter_that_another_engine_refuses_evicts_none() -> None:
    engine = make(lora_eviction="lru")
    load(engine, "a", "/a")
    load(engine, "b", "/b")
    prepare(engine, "load_lora_adapter", lora_name="c", lora_path="/c")
    assert [adapter.name for adapter in engine.feature(Adapters).listed()] == ["a", "b"]
    assert decide(engine, **NO).status == 409
    assert [adapter.name for adapter in engine.feature(Adapters).listed()] == ["a", "b"]
    engine.add("r", PROMPT, adapter="a", max_tokens=4, ignore_eos=True)
    engine.run()
    engine.check_complete("r")
    prepare(engine, "load_lora_adapter", lora_name="c", lora_path="/c")
    done = decide(engine, 73).result["result"]
    assert done == {"lora_name": "c", "lora_path": "/c", "generation": 3, "evicted": "b"}


def test_an_adapter_is_not_unloaded_while_other_engines_load_it() -> None:
    engine = make()
    load(engine, "a", "/a")
    prepare(engine, "load_lora_adapter", lora_name="a", lora_path="/new")
    engine.call("unload_lora_adapter", call_id=75, lora_name="a")
    assert decide(engine).result["result"]["generation"] == 2
    engine.steps(2)
    (unloaded,) = [reply for reply in engine.replies if reply.call_id == 75]
    assert unloaded.error is None and not engine.feature(Adapters).listed()


def test_memory_that_was_given_back_before_all_engines_are_awake_is_not_used() -> None:
    engine = busy()
    ask(engine, "sleep", level=1, mode="keep")
    prepare(engine, "wake_up")
    assert not ask(engine, "release_kv_cache_memory", call_id=73).error
    assert decide(engine).result["result"] == {"status": "sleeping", "asleep": ["kv_cache"]}
    engine.run()
    assert not engine.executor.has_kv and state(engine) == "sleeping"
    ask(engine, "wake_up", call_id=74)
    engine.run()
    engine.check_complete("r0")


def test_memory_goes_back_where_another_engine_cannot_wake_up() -> None:
    engine = busy()
    ask(engine, "sleep", level=1, mode="keep")
    prepare(engine, "wake_up")
    assert engine.executor.has_kv
    assert decide(engine, **NO).status == 409
    assert not engine.executor.has_kv and state(engine) == "sleeping"
    prepare(engine, "wake_up")
    assert decide(engine, 72).result["result"]["status"] == "awake"
    engine.run()
    engine.check_complete("r0")
