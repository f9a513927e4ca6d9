"""A replaced engine has the state of its predecessor, or refuses to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.harness import Engine
from tests.engine.test_control import PROMPT, ask, busy, state, update
from tokserve.features.lora.commands import Adapters
from tokserve.protocol.messages import Call, Status, decode_to_engine, encode


def successor(engine: Engine, **directories: tuple[str, str]) -> Engine:
    """Another engine after the sudden end of this one, from the same checkpoint."""
    other = Engine(context=80, num_blocks=100)
    other.executor.directories |= directories
    message = decode_to_engine(encode(Call(50, "take_over", {"last": engine.core.control.status()})))
    assert isinstance(message, Call)
    assert ask(other, message.method, **message.args).error is None
    return other


def status(engine: Engine) -> Status:
    return engine.core.control.status()


def serves(engine: Engine) -> str:
    """The version that a request's tokens are reported with."""
    add = engine.make("probe", PROMPT, max_tokens=3, ignore_eos=True)
    assert not engine.submit("probe", add).refusal
    engine.run()
    engine.check_complete("probe")
    ((version, _, _),) = engine.received["probe"].outputs[-1].spans
    return version


def refuses(engine: Engine) -> str:
    """Why a request is refused."""
    submit_reply = engine.submit("refused", engine.make("refused", PROMPT, max_tokens=3))
    assert submit_reply.refusal == "quarantined"
    return submit_reply.message


def test_a_ready_state_is_taken_over() -> None:
    other = successor(busy())
    assert status(other) == Status(weight_version="v1") and serves(other) == "v1"


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_goes_on(mode: str) -> None:
    engine = busy()
    ask(engine, "pause", mode=mode)
    other = successor(engine)
    assert state(other) == "paused" and status(other).paused
    ask(other, "resume")
    assert serves(other) == "v1"


@pytest.mark.parametrize("level", [0, 1])
def test_a_sleep_goes_on(level: int) -> None:
    engine = busy()
    ask(engine, "sleep", level=level)
    other = successor(engine)
    assert state(other) == "sleeping" and status(other) == status(engine)
    assert other.executor.has_kv is (level == 0)
    assert not any(plan.slots.size for plan in other.executor.plans)
    ask(other, "wake_up")
    assert state(other) == "running" and serves(other) == "v1"


def test_a_deep_sleep_goes_on_without_weights() -> None:
    engine = busy()
    update(engine, "w1", "step-1")
    ask(engine, "sleep", level=2)
    other = successor(engine)
    assert status(other) == status(engine) and other.executor.weights is None and not other.executor.has_kv
    assert ask(other, "wake_up").status == 409
    ask(other, "wake_up", tags=["weights"])
    assert update(other, "w2").result["epoch"] == 2
    ask(other, "wake_up")
    assert serves(other) == "2"


def test_released_kv_memory_and_a_pause_beneath_a_sleep_are_kept() -> None:
    engine = busy()
    ask(engine, "pause", mode="keep")
    ask(engine, "release_kv_cache_memory")
    other = successor(engine)
    assert status(other) == status(engine) and not other.executor.has_kv
    ask(other, "wake_up", tags=["kv_cache"])
    assert state(other) == "paused"


def test_weights_of_a_directory_are_read_again_also_asleep() -> None:
    engine = busy()
    engine.executor.directories["d"] = ("w2", "first")
    assert ask(engine, "update_weights_from_dir", weight_dir="d", weight_version="v").error is None
    ask(engine, "update_weight_version", new_version="renamed")
    ask(engine, "sleep", level=1)
    other = successor(engine, d=("w2", "first"))
    assert status(other) == status(engine) and status(other).epoch == 2
    ask(other, "wake_up")
    other.weights_of["renamed"] = "w2"
    assert serves(other) == "renamed"


@pytest.mark.parametrize("actual", [{}, {"d": ("w3", "second")}])
def test_without_the_files_that_were_read_nothing_is_served(actual: Any) -> None:
    engine = busy()
    engine.executor.directories["d"] = ("w2", "first")
    ask(engine, "update_weights_from_dir", weight_dir="d", weight_version="step-7")
    other = successor(engine, **actual)
    assert state(other) == "quarantined" and other.executor.staged is None
    assert "step-7" in refuses(other) and ("have changed" in refuses(other) or not actual)


def test_pushed_weights_are_missed_until_they_are_pushed_again() -> None:
    engine = busy()
    update(engine, "w1")
    update(engine, "w2", "step-120")
    other = successor(engine)
    assert state(other) == "quarantined" and "step-120" in refuses(other)
    assert (status(other).weight_version, status(other).epoch) == ("v1", 3)  # what is in memory, and no epoch twice
    third = successor(other)
    assert status(third) == status(other) and "step-120" in refuses(third)
    done = update(third, "w2", "step-120")
    assert done.result["epoch"] == 4 and serves(third) == "step-120"


def test_without_room_for_two_sets_lost_weights_can_be_pushed_again() -> None:
    engine = busy()
    engine.executor.directories["d"] = ("w2", "first")
    ask(engine, "update_weights_from_dir", weight_dir="d", weight_version="step-1")
    other = Engine(context=80)
    other.executor.has_room_for_two = False
    ask(other, "take_over", last=status(engine))
    assert state(other) == "quarantined" and "step-1" in refuses(other) and other.executor.weights is None
    ask(other, "update_weight_version", new_version="mine")
    assert state(other) == "quarantined"  # a name makes no weights
    update(other, "w2", "step-2")
    assert serves(other) == "step-2"


def test_a_named_version_allows_the_current_weights_to_serve() -> None:
    """Used by trainers whose weights come by worker calls, and by operators who want the checkpoint's weights."""
    engine = busy()
    update(engine, "w1", "step-1")
    other = successor(engine)
    assert ask(other, "update_weight_version", new_version="base").result["epoch"] == 3
    other.weights_of["base"] = ""
    assert serves(other) == "base"
    assert state(successor(other)) == "running"


@pytest.mark.parametrize("call", [True, False])
def test_what_a_worker_call_may_have_changed_and_was_named_is_lost(call: bool) -> None:
    engine = busy()
    if call:
        ask(engine, "collective_rpc", method="load")
    ask(engine, "update_weight_version", new_version="mine")
    other = successor(engine)
    other.weights_of["mine"] = ""
    if call:
        assert "mine" in refuses(other)
    else:
        assert status(other) == status(engine) and serves(other) == "mine"


def test_lost_weights_and_a_deep_sleep() -> None:
    engine = busy()
    update(engine, "w1", "step-1")
    other = successor(engine)
    ask(other, "sleep", level=2)
    assert other.executor.weights is None and state(other) == "quarantined" and status(other).sleeping
    third = successor(other)
    assert third.executor.weights is None and not third.executor.has_kv and status(third) == status(other)
    assert ask(third, "wake_up").status == 409
    update(third, "w2", "step-2")
    ask(third, "wake_up")
    assert serves(third) == "step-2"


@pytest.mark.parametrize("has_room_for_two", [True, False])
def test_an_open_update_has_failed(has_room_for_two: bool) -> None:
    engine = busy()
    engine.executor.has_room_for_two = has_room_for_two
    ask(engine, "start_weight_update")
    ask(engine, "update_weights", update={"weights": "w1"})
    assert state(engine) == "updating"
    other = successor(engine)
    assert state(other) == "running" and status(other).failure == "the engine ended while the weight update was open"
    late = ask(other, "finish_weight_update")
    assert late.status == 409 and "the engine ended" in str(late.error)
    assert serves(other) == "v1"


def test_adapters_are_those_of_the_engine_before() -> None:
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "lora_modules": ["a=/a", "b=/b", "c=/c"]}
    engine = Engine(**options)
    ask(engine, "load_lora_adapter", lora_name="b", lora_path="/newer")
    ask(engine, "unload_lora_adapter", lora_name="c")
    ask(engine, "load_lora_adapter", lora_name="late", lora_path="/late")
    ask(engine, "unload_lora_adapter", lora_name="late")
    last = engine.core._state_now()
    other = Engine(**options)
    ask(other, "take_over", last=last)
    assert other.feature(Adapters).listed() == engine.feature(Adapters).listed()
    other.loads = {4: "/newer"}
    other.add("newer", PROMPT, adapter="b", max_tokens=3, ignore_eos=True)
    other.run()
    other.check_complete("newer")
    assert other.received["newer"].outputs[-1].spans == [("v1+b@4", 0, 3)]
    assert other.core._state_now().num_loads == 5
    for name in ("b", "d"):
        assert ask(other, "load_lora_adapter", lora_name=name, lora_path="/x").error is None
    add = other.make("r", PROMPT, adapter="b", max_tokens=3, ignore_eos=True)
    assert not other.submit("r", add).refusal
    other.run()
    assert other.received["r"].outputs[-1].spans == [("v1+b@6", 0, 3)]
    other.check_complete("r")


def test_adapters_that_cannot_be_read_again_fail_their_requests_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    engine = Engine(**options, lora_modules=["gone=/gone", f"here={tmp_path}"])
    last = engine.core._state_now()
    missing, present = last.adapters
    assert missing.anywhere and present.anywhere
    last = msgspec.structs.replace(last, adapters=[msgspec.structs.replace(missing, path="bad"), present])
    other = Engine(**options)
    ask(other, "take_over", last=last)
    assert other.feature(Adapters).listed() == last.adapters
    assert "adapter gone is not there: bad" in caplog.text and "adapter here" not in caplog.text
    for name in ("here", "gone"):
        other.add(name, PROMPT, adapter=name, max_tokens=3, ignore_eos=True)
    other.run()
    assert other.received["here"].outputs[-1].spans == [("v1+here@2", 0, 3)] and other.executor.adapter_from_anywhere
    assert "'gone' could not be loaded again: no adapter" in str(other.finish("gone").message)


def test_an_adapter_that_was_pushed_fails_its_requests_only(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    engine = Engine(enable_lora=True, lora_modules=[f"p={tmp_path}"])
    last = engine.core._state_now()
    pushed = msgspec.structs.replace(last.adapters[0], path="", version="v7", checksum="c")
    other = Engine(enable_lora=True)
    ask(other, "take_over", last=msgspec.structs.replace(last, adapters=[pushed]))
    assert other.feature(Adapters).listed() == [pushed] and "adapter p was pushed" in caplog.text
    other.add("of it", PROMPT, adapter="p", max_tokens=3, ignore_eos=True)
    other.add("plain", PROMPT, max_tokens=3, ignore_eos=True)
    other.run()
    assert "'p' could not be loaded again: push it again" in str(other.finish("of it").message)
    other.check_complete("plain")


def test_a_quarantine_ends_where_the_last_weights_can_be_had_again() -> None:
    engine = busy()
    engine.executor.has_room_for_two = False
    ask(engine, "start_weight_update")
    ask(engine, "update_weights", update={"fault": "the trainer has gone"})
    assert state(engine) == "quarantined"
    other = successor(engine)
    assert state(other) == "running" and "has gone" in str(status(other).failure) and serves(other) == "v1"
    engine = busy()
    update(engine, "w1", "step-1")
    engine.executor.has_room_for_two = False
    ask(engine, "start_weight_update")
    ask(engine, "update_weights", update={"fault": "the trainer has gone"})
    assert "step-1" in refuses(successor(engine))
