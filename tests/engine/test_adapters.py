"""Loading, replacing and unloading adapters over the scripted executor, which checks every plan against the slots."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.test_control import DEPTHS, PROMPT, answers, ask, update
from tokserve.base.errors import StartError
from tokserve.features.lora.commands import MAX_NAME, Adapters
from tokserve.protocol.messages import Reply, Status


def make(**options: Any) -> Engine:
    return Engine(context=80, num_blocks=100, **{"enable_lora": True, "max_loras": 2} | options)


def load(engine: Engine, name: str, path: str = "p", **args: Any) -> Reply:
    call_id = 1000 + len(engine.messages)
    return ask(engine, "load_lora_adapter", call_id=call_id, lora_name=name, lora_path=path, **args)


def spans(engine: Engine, rid: str) -> list[tuple[str, int, int]]:
    return engine.received[rid].outputs[-1].spans


def statuses(engine: Engine) -> list[list[tuple[str, int]]]:
    announced = [message for _, message in engine.messages if isinstance(message, Status)]
    return [[(adapter.name, adapter.generation) for adapter in status.adapters] for status in announced]


@DEPTHS
def test_requests_of_several_adapters_and_none_run_together(depth: int) -> None:
    engine = make(depth=depth)
    for name in ("a", "b"):
        assert load(engine, name, f"/{name}").error is None
    for number, adapter in enumerate(["", "a", "b", "a", ""]):
        engine.add(f"r{number}", PROMPT, adapter=adapter, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    engine.run()
    for number in range(5):
        engine.check_complete(f"r{number}")
    assert [spans(engine, f"r{n}")[0][0] for n in range(4)] == ["v1", "v1+a@1", "v1+b@2", "v1+a@1"]
    assert engine.tokens("r1") == engine.tokens("r3") != engine.tokens("r2")
    assert engine.received["r3"].cached and not engine.received["r2"].cached  # no blocks of another adapter
    assert statuses(engine) == [[("a", 1)], [("a", 1), ("b", 2)]]
    engine.check_empty()


@DEPTHS
def test_the_same_name_replaces_the_weights_of_requests_in_flight(depth: int) -> None:
    engine = make(depth=depth)
    load(engine, "a", "/old")
    engine.add("r", PROMPT, adapter="a", max_tokens=30, ignore_eos=True)
    engine.add("plain", PROMPT, max_tokens=30, ignore_eos=True)
    engine.steps(8)
    reply = load(engine, "a", "/new")
    assert reply.result == {"lora_name": "a", "lora_path": "/new", "generation": 2}
    engine.add("later", PROMPT, adapter="a", max_tokens=5, ignore_eos=True)
    engine.run()
    for rid in ("r", "plain", "later"):
        engine.check_complete(rid)
    assert [label for label, _, _ in spans(engine, "r")] == ["v1+a@1", "v1+a@2"]
    assert [label for label, _, _ in spans(engine, "later")] == ["v1+a@2"]
    assert engine.received["later"].cached == 0  # although r has the same prompt
    assert len(spans(engine, "plain")) == 1
    assert statuses(engine)[-1] == [("a", 2)]
    engine.check_empty()


def test_a_failed_load_leaves_all_as_it_was() -> None:
    engine = make()
    load(engine, "a", "/good")
    count = len(statuses(engine))
    for name in ("a", "b"):
        reply = load(engine, name, "bad")
        assert (reply.error, reply.status, reply.field) == ("no adapter", 400, "lora_path")
    assert len(statuses(engine)) == count
    engine.add("r", PROMPT, adapter="a", max_tokens=5)
    engine.run()
    engine.check_complete("r")
    assert load(engine, "b").error is None


def test_more_than_there_are_slots_for_are_refused() -> None:
    engine = make(lora_eviction="none")
    load(engine, "a"), load(engine, "b")
    reply = load(engine, "c")
    assert reply.status == 409 and reply.field == "lora_name" and "--max-loras" in str(reply.error)
    assert ask(engine, "unload_lora_adapter", lora_name="a", call_id=71).result == {"lora_name": "a"}
    assert load(engine, "c").error is None
    assert statuses(engine)[-1] == [("b", 2), ("c", 3)]


def test_loading_what_is_there_with_load_inplace_false_is_refused() -> None:
    engine = make()
    assert load(engine, "a", load_inplace=False).error is None
    assert load(engine, "a", load_inplace=False).status == 409
    assert load(engine, "a", load_inplace=True).error is None


@DEPTHS
def test_unload_hides_the_name_and_lets_requests_end(depth: int) -> None:
    engine = make(depth=depth, max_loras=1)
    load(engine, "a", "/one")
    engine.add("r", PROMPT, adapter="a", max_tokens=20, ignore_eos=True)
    engine.steps(4)
    engine.call("unload_lora_adapter", lora_name="a", call_id=71)
    engine.steps(2)
    assert not answers(engine, 71) and statuses(engine)[-1] == []
    verdict = engine.submit("late", engine.make("late", PROMPT, adapter="a"))
    assert verdict.refusal == "model_not_found"
    assert load(engine, "b", "/b").error is None and "b" not in engine.executor.adapters.values()  # the slot is in use
    engine.run()
    engine.check_complete("r")
    assert answers(engine, 71)[0].error is None
    assert load(engine, "a", "/two").error is None
    engine.add("new", PROMPT, adapter="a", max_tokens=4, ignore_eos=True)
    engine.run()
    engine.check_complete("new")
    assert engine.received["new"].cached == 0


def test_unloading_what_is_not_there_is_a_404() -> None:
    reply = ask(make(), "unload_lora_adapter", lora_name="nobody")
    assert reply.status == 404 and reply.field == "lora_name"


@DEPTHS
def test_the_adapter_that_is_unused_for_longest_loses_its_slot_and_comes_back(depth: int) -> None:
    """peer-suites-3 A4: nothing that was loaded becomes unknown."""
    engine = make(depth=depth, max_loras=2)
    for name in ("a", "b"):
        load(engine, name, f"/{name}")
    engine.add("r", PROMPT, adapter="a", max_tokens=2, ignore_eos=True)
    engine.run()
    assert load(engine, "c", "/c").result["evicted"] == "b"
    assert [adapter.name for adapter in engine.feature(Adapters).listed()] == ["a", "b", "c"]
    for number, name in enumerate(("b", "c", "a", "b")):
        engine.add(f"s{number}", PROMPT, adapter=name, max_tokens=4, ignore_eos=True)
        engine.run()
        engine.check_complete(f"s{number}")
    assert [spans(engine, f"s{n}")[0][0] for n in range(4)] == ["v1+b@2", "v1+c@3", "v1+a@1", "v1+b@2"]
    assert engine.received["s3"].cached  # its KV is of the same weights
    engine.check_empty()


@DEPTHS
def test_requests_of_more_adapters_than_there_are_slots_for_are_all_served(depth: int) -> None:
    engine = make(depth=depth, max_loras=2, max_num_seqs=3)
    names = "abcdefg"
    for name in names:
        load(engine, name, f"/{name}")
    for number in range(40):
        engine.add(f"r{number}", [*PROMPT, number % 9], adapter=names[number % 7], max_tokens=6, ignore_eos=True)
    engine.run(limit=5000)
    for number in range(40):
        engine.check_complete(f"r{number}")
    engine.check_empty()


@DEPTHS
def test_an_adapter_in_use_keeps_its_slot_until_its_requests_have_ended(depth: int) -> None:
    engine = make(depth=depth, max_loras=1)
    load(engine, "a", "/a")
    engine.add("r", PROMPT, adapter="a", max_tokens=20, ignore_eos=True)
    engine.steps(3)
    assert load(engine, "b", "/b").error is None and engine.executor.adapters == {0: "/a"}
    engine.add("s", PROMPT, adapter="b", max_tokens=4, ignore_eos=True)
    engine.add("t", PROMPT, adapter="a", max_tokens=4, ignore_eos=True)
    engine.run()
    for rid in "rst":
        engine.check_complete(rid)


def test_adapters_are_loaded_while_requests_are_frozen_and_use_every_slot() -> None:
    engine = make(max_loras=1)
    load(engine, "a", "/a")
    engine.add("r", PROMPT, adapter="a", max_tokens=20, ignore_eos=True)
    engine.steps(3)
    ask(engine, "pause", call_id=70, mode="keep")
    assert load(engine, "b", "/b").error is None
    engine.add("s", PROMPT, adapter="b", max_tokens=4, ignore_eos=True)
    engine.steps(3)
    assert load(engine, "c", "/c").error is None and load(engine, "a", "/new").error is None
    ask(engine, "resume", call_id=71)
    engine.run()
    for rid in "rs":
        engine.check_complete(rid)


def test_an_adapter_whose_files_have_changed_does_not_come_back_as_another() -> None:
    engine = make(max_loras=1)
    for name in ("a", "b"):
        load(engine, name, f"/{name}")
    engine.feature(Adapters)._by_name["a"].path = "/changed"
    engine.add("r", PROMPT, adapter="a", max_tokens=4)
    engine.add("s", PROMPT, adapter="b", max_tokens=4)
    engine.run()
    assert "have changed" in (engine.finish("r").message or "")
    engine.check_complete("s")
    assert load(engine, "a", "/changed").error is None
    engine.add("t", PROMPT, adapter="a", max_tokens=4)
    engine.run()
    engine.check_complete("t")
    engine.check_empty()


@DEPTHS
def test_an_adapter_that_cannot_come_back_ends_its_request_and_nothing_else(depth: int) -> None:
    engine = make(max_loras=1, depth=depth)
    for name in ("a", "b"):
        load(engine, name, f"/{name}")
    engine.feature(Adapters)._by_name["a"].path = "/changed"
    engine.add("r", PROMPT, adapter="a", max_tokens=4)
    engine.run()
    assert "have changed" in (engine.finish("r").message or "")
    engine.add("s", PROMPT, adapter="b", max_tokens=4)
    engine.run()
    engine.check_complete("s")
    engine.check_empty()


def test_requests_that_wait_for_an_adapter_can_be_aborted() -> None:
    engine = make(max_loras=1)
    for name in ("a", "b"):
        load(engine, name, f"/{name}")
    engine.executor.slow = deque()
    engine.add("r", PROMPT, adapter="a", max_tokens=4)
    engine.steps(2)
    engine.abort("r")
    engine.executor.settle()
    engine.run()
    assert engine.finish("r").detail == "abort_user"
    engine.check_empty()


def test_a_request_that_arrives_during_a_load_keeps_its_adapter() -> None:
    engine = make(max_loras=1)
    load(engine, "a", "/a")
    engine.executor.slow = deque()
    engine.call("load_lora_adapter", lora_name="b", lora_path="/b", call_id=90)
    engine.add("r", PROMPT, adapter="a", max_tokens=30, ignore_eos=True)
    engine.steps(2)
    engine.executor.settle()
    engine.run()
    engine.check_complete("r")
    assert answers(engine, 90)[0].error is None and engine.executor.adapters == {0: "/a"}


def test_an_unload_while_the_load_reads_wins_or_loses_but_leaves_one_slot_each() -> None:
    engine = make(max_loras=1, lora_eviction="none")
    load(engine, "a", "/one")
    engine.executor.slow = deque()
    engine.call("load_lora_adapter", lora_name="a", lora_path="/two", call_id=80)
    engine.call("unload_lora_adapter", lora_name="a", call_id=81)
    engine.executor.settle()
    engine.run()
    assert answers(engine, 81)[0].error is None and answers(engine, 80)[0].error is None
    assert [(adapter.name, adapter.path) for adapter in engine.feature(Adapters).listed()] == [("a", "/two")]
    assert load_slow(engine, "b").status == 409


def load_slow(engine: Engine, name: str) -> Reply:
    engine.executor.slow = None
    return load(engine, name)


def test_loads_at_once_come_one_after_the_other() -> None:
    engine = make()
    engine.executor.slow = deque()
    for number in range(4):
        engine.call("load_lora_adapter", lora_name="ab"[number % 2], lora_path=f"/{number}", call_id=80 + number)
    for _ in range(10):
        engine.executor.settle(1)
        engine.step()
    assert [answers(engine, 80 + n)[0].result["generation"] for n in range(4)] == [1, 2, 3, 4]
    assert [adapter.path for adapter in engine.feature(Adapters).listed()] == ["/2", "/3"]


@DEPTHS
def test_a_weight_update_changes_the_requests_of_adapters_too(depth: int) -> None:
    engine = make(depth=depth)
    load(engine, "a")
    engine.add("r", PROMPT, adapter="a", max_tokens=30, ignore_eos=True)
    engine.steps(6)
    update(engine, "w2")
    engine.add("new", PROMPT, adapter="a", max_tokens=5, ignore_eos=True)
    engine.run()
    for rid in ("r", "new"):
        engine.check_complete(rid)
    assert [label for label, _, _ in spans(engine, "r")] == ["v1+a@1", "1+a@1"]
    assert engine.received["new"].cached == 0
    old = spans(engine, "r")[0][2]
    assert engine.stats.tokens_by_age == [35 - old, old, 0, 0, 0]


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "a\nb", "a\x00"])
def test_invalid_adapter_names_are_refused(name: str) -> None:
    reply = load(make(), name)
    assert (reply.status, reply.field) == (400, "lora_name")


def test_the_longest_name_is_valid_and_clients_load_from_allowed_directories() -> None:
    engine = make()
    assert load(engine, "x" * MAX_NAME).error is None and engine.executor.adapter_from_anywhere is False


def test_missing_paths_are_refused() -> None:
    engine = make()
    assert (load(engine, "a", "").status, load(engine, "a", "").field) == (400, "lora_path")


@DEPTHS
def test_an_adapters_directory_is_an_update_that_stands_before_the_model(depth: int) -> None:
    """rl-faults E1: prime-rl sends the directory of its adapter to /update_weights."""
    engine = make(depth=depth, served_model_name=["mine", "alias"])
    engine.executor.directories["/adapter"] = engine.executor.directories["/other"] = "adapter", "stamp"
    done = ask(engine, "update_weights_from_dir", call_id=80, weight_dir="/adapter")
    assert (done.result["weight_version"], done.result["epoch"], done.result["lora_name"]) == ("1", 1, "mine")
    engine.weights_of["1"] = ""
    engine.loads = {1: "/adapter", 2: "/other"}
    engine.add("r", PROMPT, adapter="mine", max_tokens=20, ignore_eos=True)
    engine.steps(3)
    named = ask(engine, "update_weights_from_dir", call_id=81, weight_dir="/other", weight_version="v2")
    assert named.result["weight_version"] == "v2" and named.result["generation"] == 2
    engine.weights_of["v2"] = ""
    refused = ask(engine, "update_weights_from_dir", call_id=82, weight_dir="/adapter", weight_version="v2")
    assert (refused.status, refused.code) == (409, "version_in_use")
    assert not ask(engine, "update_weights_from_dir", call_id=83, weight_dir="/other", weight_version="v2").error
    engine.loads[3] = "/other"
    engine.run()
    engine.check_complete("r")
    assert [label for label, _, _ in spans(engine, "r")][:2] == ["1+mine@1", "v2+mine@3"]
    assert ask(engine, "unload_lora_adapter", call_id=84, lora_name="mine").error is None
    assert engine.submit("late", engine.make("late", PROMPT, adapter="mine")).refusal == "model_not_found"


def test_an_adapters_directory_needs_a_server_with_adapters_and_no_open_update() -> None:
    plain = Engine()
    plain.executor.directories["/adapter"] = "adapter", "stamp"
    reply = ask(plain, "update_weights_from_dir", call_id=1, weight_dir="/adapter")
    assert reply.status == 400 and "--enable-lora" in str(reply.error)
    engine = make()
    engine.executor.directories["/adapter"] = "adapter", "stamp"
    ask(engine, "start_weight_update", call_id=2)
    assert ask(engine, "update_weights_from_dir", call_id=3, weight_dir="/adapter").code == "update_open"


def test_a_server_without_adapters_refuses_them() -> None:
    engine = Engine()
    for reply in (load(engine, "a"), ask(engine, "unload_lora_adapter", lora_name="a", call_id=71)):
        assert (reply.status, reply.field) == (400, "lora_name") and "--enable-lora" in str(reply.error)


def test_adapters_of_the_start_are_there_before_the_first_request() -> None:
    engine = make(lora_modules=["a=/one", "b=/two=2"])
    assert [adapter.generation for adapter in engine.feature(Adapters).listed()] == [1, 2]
    assert engine.executor.adapter_from_anywhere is True  # the operator has named it
    engine.loads = {1: "/one", 2: "/two=2"}
    engine.add("r", PROMPT, adapter="b", max_tokens=5)
    engine.run()
    engine.check_complete("r")
    with pytest.raises(StartError, match=r"lora_modules: a: no adapter"):
        make(lora_modules=["a=bad"])
    with pytest.raises(StartError, match="max-loras"):
        make(lora_modules=["a=1", "b=2", "c=3"], lora_eviction="none")
    more = make(lora_modules=["a=1", "b=2", "c=3"])
    more.loads = {1: "1", 2: "2", 3: "3"}
    more.add("r", PROMPT, adapter="c", max_tokens=5)
    more.run()
    more.check_complete("r")
    assert more.executor.adapter_from_anywhere is True


@DEPTHS
def test_frozen_requests_of_a_replaced_adapter_go_on_with_the_new_weights(depth: int) -> None:
    engine = make(depth=depth)
    load(engine, "a", "/old")
    engine.add("r", PROMPT, adapter="a", max_tokens=20, ignore_eos=True)
    engine.steps(6)
    ask(engine, "sleep", level=1, mode="keep")  # its KV goes: all of it is computed again by the new weights
    load(engine, "a", "/new")
    ask(engine, "wake_up", call_id=72)
    engine.run()
    engine.check_complete("r")
    assert [label for label, _, _ in spans(engine, "r")] == ["v1+a@1", "v1+a@2"]
