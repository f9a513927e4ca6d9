"""SGLang's control routes are calls of the engine, guarded like the others; and what routers read."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.scripted_llm import complete
from tests.server.site import Caller, Site, command_site
from tokserve import checkpoint
from tokserve.base.errors import Conflict, RequestError, StartError
from tokserve.client.outputs import StepStats
from tokserve.dialects.sglang.routes import ENDPOINTS
from tokserve.protocol.messages import LoadedAdapter, Status
from tokserve.server.routes import endpoints

GROUP = {"master_address": "h", "master_port": "29500", "rank_offset": 1, "world_size": 2, "backend": "gloo"}
JOINED = {
    "master_address": "h",
    "master_port": 29500,
    "rank_offset": 1,
    "world_size": 2,
    "backend": "gloo",
    "rendezvous": "torch",
    "group_name": "g",
}
DISK = {"weight_dir": "/w", "weight_version": None}
TENSORS = {"names": ["a"], "dtypes": ["torch.bfloat16"], "shapes": [[1]]}
STAGED = {"update": {"names": ["a"], "dtype_names": ["torch.bfloat16"], "shapes": [[1]]}}
ABORTED = {"clear_cache": True, "mode": "abort"}
BOTH = {"tags": ["kv_cache", "weights"], "mode": "abort"}
ROUTES: list[tuple[str, dict[str, Any] | None, list[tuple[str, dict[str, Any]]]]] = [
    ("/pause_generation", None, [("pause", ABORTED)]),
    ("/pause_generation", {}, [("pause", ABORTED)]),
    ("/pause_generation", {"mode": "abort"}, [("pause", ABORTED)]),
    ("/pause_generation", {"mode": "in_place"}, [("pause", {"mode": "keep", "clear_cache": False})]),
    ("/pause_generation", {"mode": "retract"}, [("pause", {"mode": "retract", "clear_cache": False})]),
    ("/continue_generation", {}, [("finish_weight_update", {"weight_version": None}), ("resume", {})]),
    ("/release_memory_occupation", None, [("release_memory", BOTH)]),
    (
        "/release_memory_occupation",
        {"tags": ["kv_cache", "cuda_graph"]},
        [("release_memory", {"tags": ["kv_cache"], "mode": "abort"})],
    ),
    ("/release_memory_occupation", {"tags": ["cuda_graph"]}, []),
    ("/release_memory_occupation", {"tags": ["weights"]}, [("release_memory", {"tags": ["weights"], "mode": "abort"})]),
    ("/resume_memory_occupation", {}, [("wake_up", {"tags": ["kv_cache", "weights", "scheduling"]})]),
    ("/resume_memory_occupation", {"tags": ["weights"]}, [("wake_up", {"tags": ["weights"]})]),
    ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}, [("wake_up", {"tags": ["kv_cache"]})]),
    (
        "/load_lora_adapter",
        {"lora_name": "a", "lora_path": "/p", "pinned": True},
        [("load_lora_adapter", {"lora_name": "a", "lora_path": "/p", "load_inplace": None})],
    ),
    ("/unload_lora_adapter", {"lora_name": "a"}, [("unload_lora_adapter", {"lora_name": "a"})]),
    ("/weights_checker", {}, [("weight_checksums", {})]),
    ("/start_profile", {"num_steps": 5, "output_dir": "/x"}, [("start_profile", {"max_iterations": 5})]),
    ("/stop_profile", None, [("stop_profile", {})]),
    ("/update_weights_from_disk", {"model_path": "/w"}, [("update_weights_from_dir", DISK)]),
    (
        "/update_weights_from_disk",
        {"model_path": "/w", "load_format": "auto", "weight_version": "7"},
        [("update_weights_from_dir", DISK | {"weight_version": "7"})],
    ),
    (
        "/update_weights_from_distributed",
        TENSORS | {"weight_version": "7"},
        [
            ("start_weight_update", {"is_checkpoint_format": True}),
            ("update_weights", STAGED),
            ("finish_weight_update", {"weight_version": "7"}),
        ],
    ),
    (
        "/init_weights_update_group",
        GROUP | {"group_name": "g", "pp_rank": 0},
        [("init_weight_transfer_engine", {"init_info": JOINED})],
    ),
    ("/destroy_weights_update_group", {"group_name": "g"}, [("shutdown_weight_transfer_engine", {})]),
    ("/begin_weight_update", {}, [("start_weight_update", {"is_checkpoint_format": True})]),
    ("/end_weight_update", {"weight_version": "7"}, [("finish_weight_update", {"weight_version": "7"})]),
    ("/update_weight_version", {"new_version": "7"}, [("update_weight_version", {"new_version": "7"})]),
    ("/flush_cache", None, [("reset_prefix_cache", {})]),
]
ADAPTER: dict[str, Any] = {"lora_name": "a", "config_dict": {"r": 1}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/pause_generation", {"mode": "x"}, "mode"),
    ("/start_profile", {"num_steps": 0}, "num_steps"),
    ("/release_memory_occupation", {"tags": ["disk"]}, "tags"),
    ("/load_lora_adapter", {"lora_name": "a"}, "lora_path"),
    ("/load_lora_adapter_from_tensors", {"lora_name": "a"}, "config_dict"),
    ("/load_lora_adapter_from_tensors", ADAPTER, "serialized_tensors is missing"),
    ("/load_lora_adapter_from_tensors", ADAPTER | {"serialized_tensors": "gASVBg=="}, "is a pickle"),
    ("/load_lora_adapter_from_tensors", ADAPTER | {"serialized_named_tensors": ["%"]}, "not base64"),
    ("/load_lora_adapter_from_tensors", ADAPTER | {"load_format": "pickle"}, "load_format"),
    ("/load_lora_adapter_from_tensors", ADAPTER | {"added_tokens_config": {"a": 1}}, "added_tokens_config"),
    ("/weights_checker", {"action": "restore"}, "reset_tensors"),
    ("/weights_checker", {"action": "compare"}, "no snapshot"),
    ("/update_weights_from_disk", {}, "model_path"),
    ("/update_weights_from_disk", {"model_path": "/w", "load_format": "dummy"}, "load_format"),
    ("/update_weights_from_distributed", {"names": ["a"]}, "dtypes"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, "safetensors"),
    ("/update_weights_from_ipc", {"zmq_handles": {}}, "safetensors"),
    ("/init_weights_update_group", GROUP | {"master_port": "x"}, "master_port"),
    ("/update_weight_version", {}, "new_version"),
    ("/abort_request", {}, "rid"),
]


def sglang(**options: Any) -> Site:
    return command_site(sglang_api=True, **options)


def calls(s: Site) -> list[tuple[str, dict[str, Any]]]:
    return [call for call in s.llm.commands if call[0] not in ("ping", "stats")]


@pytest.mark.some(27)
@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(("path", "sent", "commands"), ROUTES, ids=lambda value: str(value)[:40])
def test_each_route_is_calls_of_the_engine(path: str, sent: Any, commands: Any, method: str) -> None:
    s = sglang()
    answer = s.request(method, path, json=sent) if sent is not None else s.request(method, path)
    assert answer.status_code == 200, answer.text
    assert calls(s) == [(name, complete(name, args)) for name, args in commands]
    if path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert answer.json() is None
    elif path.endswith("_generation"):
        assert set(answer.json()) == {"message", "status"} and answer.json()["status"] == "ok"
    elif path != "/flush_cache":
        assert answer.json()["success"] is True and answer.json()["message"]


def test_the_tables_have_every_control_route() -> None:
    tested = {path for path, *_ in ROUTES} | {path for path, *_ in REFUSED}
    assert {endpoint.path for endpoint in ENDPOINTS if endpoint.control} <= tested
    paths = [endpoint.path for endpoint in endpoints(sglang().llm.config)]
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(("path", "sent", "word"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_have_the_dialects_form(path: str, sent: dict[str, Any], word: str) -> None:
    s = sglang()
    answer = s.post(path, sent)
    assert answer.status_code == 400, answer.text
    reply = answer.json()
    assert reply["success"] is False and word in reply["message"] and reply["error"]["message"] == reply["message"]
    assert not {name for name, _ in calls(s)} - {"weight_checksums"}


def test_the_engines_refusals_are_400s() -> None:
    s = sglang()
    s.llm.answers = {
        "update_weights_from_dir": RequestError("no such directory"),
        "release_memory": Conflict("not now"),
    }
    assert s.post("/update_weights_from_disk", {"model_path": "/w"}).status_code == 400
    answer = s.post("/release_memory_occupation")
    assert answer.status_code == 400 and answer.json()["message"] == "not now"
    s.llm.answers = {"update_weights_from_dir": RequestError("weight_dir is no path", field="weight_dir")}
    error = s.post("/update_weights_from_disk", {"model_path": "\0"}).json()["error"]
    assert (error["param"], error["message"]) == ("model_path", "model_path is no path")


def test_parts_of_an_update_are_committed_when_generation_continues() -> None:
    s = sglang()
    s.llm.status = Status("paused", paused=True)
    assert "takes effect" in s.post("/update_weights_from_distributed", TENSORS).json()["message"]
    s.llm.answers = {"start_weight_update": Conflict("open already", code="update_open")}
    s.post("/update_weights_from_distributed", TENSORS | {"weight_version": "7"})
    assert [name for name, _ in calls(s)] == ["start_weight_update", "update_weights"] * 2
    s.llm.commands.clear()
    assert s.post("/continue_generation", {}).status_code == 200
    assert calls(s) == [
        ("finish_weight_update", complete("finish_weight_update", {"weight_version": "7"})),
        ("resume", {}),
    ]
    s.llm.commands.clear()
    s.llm.answers = {"finish_weight_update": Conflict("none is open", code="no_update")}
    assert s.post("/continue_generation", {}).status_code == 200
    assert calls(s) == [("finish_weight_update", complete("finish_weight_update", {})), ("resume", {})]
    assert s.post("/end_weight_update", {}).status_code == 400


def test_the_version_of_a_rolled_back_update_is_not_reused() -> None:
    s = sglang()
    s.post("/begin_weight_update", {"weight_version": "7"})
    s.llm.answers = {"update_weights": RequestError("the trainer left")}  # which rolls the update back
    assert s.post("/update_weights_from_distributed", TENSORS).status_code == 400
    s.llm.answers = {}
    s.post("/update_weights_from_distributed", TENSORS)
    assert calls(s)[-1] == ("finish_weight_update", complete("finish_weight_update", {}))

    s.post("/begin_weight_update", {"weight_version": "8"})
    s.post("/destroy_weights_update_group", {})
    s.post("/begin_weight_update", {})
    s.post("/end_weight_update", {})
    assert calls(s)[-1] == ("finish_weight_update", complete("finish_weight_update", {}))


def test_a_beginning_that_is_refused_does_not_rename_the_open_update() -> None:
    s = sglang()
    s.post("/begin_weight_update", {"weight_version": "7"})
    s.llm.answers = {"start_weight_update": Conflict("open already", code="update_open")}
    assert s.post("/begin_weight_update", {"weight_version": "8"}).status_code == 400
    s.post("/end_weight_update", {})
    assert calls(s)[-1] == ("finish_weight_update", complete("finish_weight_update", {"weight_version": "7"}))


def test_a_failed_commit_does_not_go_on() -> None:
    s = sglang()
    s.llm.answers = {"finish_weight_update": RequestError("missing tensors: b")}
    answer = s.post("/continue_generation", {})
    assert answer.status_code == 400 and answer.json()["success"] is False
    assert [name for name, _ in calls(s)] == ["finish_weight_update"]


def test_parts_between_begin_and_end_wait_for_the_end() -> None:
    s = sglang()
    s.post("/begin_weight_update", {})
    s.llm.answers = {"start_weight_update": Conflict("open already", code="update_open")}
    s.post("/update_weights_from_distributed", TENSORS)
    assert "finish_weight_update" not in s.llm.verbs
    assert s.post("/end_weight_update", {}).json()["success"] is True and "finish_weight_update" in s.llm.verbs


def test_the_cache_is_not_flushed_while_requests_run() -> None:
    s = sglang()
    s.llm.stats = StepStats(running=1)
    answer = s.get("/flush_cache?timeout=0.1")
    assert answer.status_code == 400 and "1 requests" in answer.text and "reset_prefix_cache" not in s.llm.verbs
    s.llm.stats = StepStats(waiting=1)
    assert s.get("/flush_cache").status_code == 400
    s.llm.status = Status(paused=True)  # what waits holds no KV, and does not run before the pause ends
    assert s.get("/flush_cache").status_code == 200 and "reset_prefix_cache" in s.llm.verbs
    s.llm.stats = StepStats(running=1)  # paused in place
    assert s.get("/flush_cache").status_code == 400


def test_adapters_and_snapshots() -> None:
    s = sglang()
    s.llm.status = Status(adapters=[LoadedAdapter("a", "/p", 1)])
    assert s.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/p"}).json()["loaded_adapters"] == {"a": "/p"}
    s.llm.answers = {"weight_checksums": {"x": "1", "y": "2"}}
    assert s.post("/weights_checker", {}).json()["checksums"] == {"x": "1", "y": "2"}
    assert s.post("/weights_checker", {"action": "snapshot"}).json()["success"] is True
    assert s.post("/weights_checker", {"action": "compare"}).json()["success"] is True
    s.llm.answers = {"weight_checksums": {"x": "1", "y": "3"}}
    answer = s.post("/weights_checker", {"action": "compare"})
    assert answer.status_code == 400 and "y" in answer.json()["message"]


def test_requests_with_a_prefix_are_aborted() -> None:
    s = sglang()
    s.llm.hold = True

    async def scene() -> None:
        callers = [Caller(s, "/generate", {"text": "a", "rid": name}) for name in ("p-1", "q")]
        await callers[1].wait_for(lambda _: s.llm.num_inflight == 2)
        async with s.client() as client:
            assert (await client.post("/abort_request", json={"rid": "p", "prefix": True})).status_code == 200
        await callers[0].task
        assert b"abort" in callers[0].writes[0] and not callers[1].done
        callers[1].hang_up()
        await callers[1].task

    asyncio.run(scene())


def test_control_routes_need_the_admin_key() -> None:
    s = sglang(api_key=["k"], admin_api_key=["admin"])
    control = [endpoint for endpoint in ENDPOINTS if endpoint.control]
    for endpoint in control:
        for method in endpoint.methods:
            answer = s.request(method, endpoint.path, headers={"Authorization": "Bearer k"})
            assert answer.status_code == 401, (method, endpoint.path)
    assert s.llm.commands == []
    assert s.get("/model_info").status_code == 401 and s.post("/generate", {"text": "a"}).status_code == 401
    assert s.get("/health_generate").status_code == 200
    assert s.post("/pause_generation", headers={"Authorization": "Bearer admin"}).status_code == 200


def test_server_info_has_the_fields_that_routers_read() -> None:
    s = sglang()
    s.llm.status = Status(weight_version="v3")
    s.llm.stats = StepStats(running=2, waiting=1, blocks_held=3, prefix_queries=10, prefix_hits=5)
    for path in ("/server_info", "/get_server_info"):
        info = s.get(path).json()
        assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (1, 1, 1) and info["weight_version"] == "v3"
        assert info["internal_states"][0]["num_running_reqs"] == 2 and info["disaggregation_mode"] == "null"
        assert info["config"] and info["facts"]  # what the route says without the dialect
    for path in ("/model_info", "/get_model_info"):
        info = s.get(path).json()
        assert info["is_generation"] is True and info["weight_version"] == "v3" and info["architectures"]
        assert info["has_image_understanding"] is False and info["load_format"] == "auto"
    load = s.get("/v1/loads?include=core").json()["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["cache_hit_rate"]) == (2, 1, 0.5)
    assert load["num_used_tokens"] == 48 and load["max_total_num_tokens"] == 16 * 1024
    assert s.get("/get_load").json()[0]["num_reqs"] == 3
    assert s.get("/get_weight_version").json() == {"weight_version": "v3"}


def test_health_needs_a_token() -> None:
    s = sglang()
    assert s.get("/health_generate").status_code == 200 and s.llm.calls[-1].params.max_tokens == 1
    s.llm.status = Status("paused", paused=True)
    assert s.get("/health_generate").status_code == 503 and len(s.llm.calls) == 1
    s.llm.status = Status()
    s.llm.fails = lambda index: True
    assert s.get("/health_generate").status_code == 503
    s.llm.die()
    assert s.get("/health_generate").status_code == 503


def test_a_version_that_is_refused_aborts_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    s = sglang()
    aborted: list[str] = []

    async def refuse(*_: Any) -> None:
        raise RequestError("no such version", field="new_version")

    async def abort_all(*_: Any) -> None:
        aborted.append("all")

    monkeypatch.setattr(s.llm, "abort_all", abort_all, raising=False)
    assert s.post("/update_weight_version", {"new_version": "7"}).status_code == 200 and aborted == ["all"]
    monkeypatch.setattr(s.llm, "update_weight_version", refuse, raising=False)
    assert s.post("/update_weight_version", {"new_version": "8"}).status_code == 400 and aborted == ["all"]


def test_the_model_path_is_that_of_the_last_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """peer-suites-3 A13."""
    s = sglang()
    before = s.get("/get_model_info").json()["model_path"]
    monkeypatch.setattr(checkpoint, "locate", lambda name: tmp_path)
    status = s.llm.status
    for sent, source in (("/w", "/w"), ("owner/name", str(tmp_path))):
        assert s.post("/update_weights_from_disk", {"model_path": sent}).status_code == 200
        assert calls(s)[-1][1]["weight_dir"] == source
        s.llm.status = msgspec.structs.replace(status, source=source)
        assert s.get("/get_model_info").json()["model_path"] == s.get("/server_info").json()["model_path"] == sent
    s.llm.status = msgspec.structs.replace(status, source=None, pushed=True)
    assert s.get("/get_model_info").json()["model_path"] == before


def test_a_hub_name_that_cannot_be_fetched_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    def locate(name: str) -> Path:
        raise StartError(f"model {name!r} could not be fetched")

    monkeypatch.setattr(checkpoint, "locate", locate)
    s = sglang()
    answer = s.post("/update_weights_from_disk", {"model_path": "owner/name"})
    assert answer.status_code == 400 and "could not be fetched" in answer.json()["message"] and not calls(s)
