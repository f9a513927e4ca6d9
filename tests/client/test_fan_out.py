"""One command for several engines: the message to each, and the merged reply."""

from __future__ import annotations

from typing import Any

import pytest

from tokserve.base.errors import Conflict, EngineDead, NotFound, RequestError
from tokserve.features.fleet.fan_out import Answer, args_for, is_mixed, outcome


def ok(*results: Any) -> list[Answer]:
    return [Answer(rank, result) for rank, result in enumerate(results)]


def test_each_engine_gets_its_own_part() -> None:
    def both(method: str, **args: Any) -> list[dict[str, Any]]:
        return [args_for(method, args, rank, 2) for rank in range(2)]

    assert both("finish_weight_update", update_id="a.b") == [{"update_id": "a"}, {"update_id": "b"}]
    assert both("finish_weight_update", update_id="a") == [{"update_id": "a"}] * 2, "no id of these engines"
    group = {"rank_offset": 1, "world_size": 3}
    sent = both("init_weight_transfer_engine", init_info=group)
    assert [one["init_info"] for one in sent] == [group, group | {"rank_offset": 2}]
    assert both("init_weight_transfer_engine", init_info={}) == [{"init_info": {}}] * 2
    assert both("update_weights", update=[{"a": 1}, {"a": 2}]) == [{"update": {"a": 1}}, {"update": {"a": 2}}]
    assert both("update_weights", update={"a": 1}) == [{"update": {"a": 1}}] * 2
    with pytest.raises(RequestError, match="each of 2 ranks") as caught:
        both("update_weights", update=[{}])
    assert caught.value.field == "update_info"


def test_replies_of_engines_are_merged() -> None:
    started = outcome("start_weight_update", {}, ok({"update_id": "a", "x": 1}, {"update_id": "b", "x": 1}), 2)
    assert started == {"update_id": "a.b", "x": 1}
    assert outcome("start_weight_update", {}, [Answer(1, {"update_id": "b"})], 3) == {"update_id": ".b."}
    assert outcome("collective_rpc", {}, ok([1], [2]), 2) == [1, 2]
    assert outcome("leave", {}, ok(2, 3), 2) == 5
    assert outcome("abort", {}, ok({"a": "not_found", "b": "finished"}, {"a": "aborted", "b": "not_found"}), 2) == {
        "a": "aborted",
        "b": "finished",
    }
    assert outcome("abort_group", {}, ok({}, {"a": "not_found"}), 2) == {"a": "not_found"}
    assert outcome("remove_draft_corpus", {}, ok({"removed": 1}, {"removed": 3}), 2) == {"removed": 3}
    assert outcome("weights_checksum", {}, ok("c", "c"), 2) == "c"
    with pytest.raises(Conflict, match="engines 0 and 1"):
        outcome("weights_checksum", {}, ok("c", "d"), 2)
    rows = ok({"total": 1, "requests": [{"age": 1.0}]}, {"total": 2, "requests": [{"age": 3.0}, {"age": 0.5}]})
    listed = outcome("requests", {"limit": 2}, rows, 2)
    assert listed == {"total": 3, "requests": [{"age": 3.0, "engine": 1}, {"age": 1.0, "engine": 0}]}


def test_the_error_names_the_engine_that_refused() -> None:
    mixed = [Answer(0, {}), Answer(1, error=Conflict("no room", field="lora_name", code="full"))]
    assert is_mixed(mixed)
    with pytest.raises(Conflict) as caught:
        outcome("load_lora_adapter", {}, mixed, 2)
    assert (caught.value.message, caught.value.field, caught.value.code) == ("engine 1: no room", "lora_name", "full")
    alike = [Answer(rank, error=Conflict("a weight update is open")) for rank in range(2)]
    assert not is_mixed(alike)
    with pytest.raises(Conflict) as caught:
        outcome("sleep", {}, alike, 2)
    assert caught.value.message == "a weight update is open"


def test_an_engine_that_is_lost_does_not_count() -> None:
    answers = [Answer(0, error=EngineDead()), Answer(1, {"status": "paused"})]
    assert not is_mixed(answers) and outcome("pause", {}, answers, 2) == {"status": "paused"}
    with pytest.raises(EngineDead):
        outcome("pause", {}, answers[:1], 2)


def test_an_adapter_that_one_engine_has_lost_is_unloaded() -> None:
    answers = [Answer(0, {"lora_name": "a"}), Answer(1, error=NotFound("no adapter"))]
    assert outcome("unload_lora_adapter", {}, answers, 2) == {"lora_name": "a"}
    with pytest.raises(NotFound):
        outcome("unload_lora_adapter", {}, answers[1:], 2)
