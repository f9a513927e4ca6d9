"""Routes of training frameworks: the bodies that their clients send, and the calls of the engine that they become.

AReaL 1.0.4: `VLLMBackend.build_*_request` of areal/engine/vllm_remote.py.  SkyRL 0.3.0: `RemoteInferenceClient` of
skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py.  prime-rl: `AdminPlane.initialize_nccl`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.site import command_site
from tests.server.test_control import complete
from tokserve.base.errors import Conflict, RequestError
from tokserve.protocol.messages import Status
from tokserve.server.tokens.generate_body import decode_request

AREAL_GROUP = {
    "master_address": "10.0.0.1",
    "master_port": "29500",
    "rank_offset": 1,
    "world_size": 2,
    "backend": "gloo",
    "group_name": "update_weight_group",
}
AREAL_META = {
    "names": ["a", "b"],
    "dtypes": ["torch.bfloat16", "float32"],
    "shapes": [[2, 3], [4]],
    "group_name": "update_weight_group",
}
STAGED = {"names": ["a", "b"], "dtype_names": ["torch.bfloat16", "float32"], "shapes": [[2, 3], [4]]}
JOINED = AREAL_GROUP | {"master_port": 29500, "rendezvous": "torch"}
PRIME_RL = {
    "host": "trainer",
    "port": 29501,
    "rank_offset": 0,
    "inference_world_size": 1,
    "timeout": 1200,
    "quantize_in_weight_transfer": False,
}


def verbs(s: Any) -> list[str]:
    return [verb for verb, _ in s.llm.commands if verb != "ping"]


def test_areal_joins_a_group_of_torch() -> None:
    s = command_site()
    answer = s.post("/areal_init_weights_update_group", AREAL_GROUP)
    assert answer.json()["success"] is True
    verb = "init_weight_transfer_engine"
    assert s.llm.commands == [(verb, complete(verb, {"init_info": JOINED}))]


def test_errors_name_areals_fields() -> None:
    s = command_site()
    s.llm.answers = {
        "update_weights_from_dir": RequestError("weight_dir must not be empty", field="weight_dir"),
        "load_lora_adapter": RequestError("no directory x", field="lora_path"),
    }
    error = s.post("/areal_update_weights", {"model_path": ""}).json()["error"]
    assert (error["param"], error["message"]) == ("model_path", "model_path must not be empty")
    error = s.post("/areal_update_weights_lora", {"lora_name": "a", "lora_model_path": "x"}).json()["error"]
    assert (error["param"], error["message"]) == ("lora_model_path", "no directory x")


def test_areals_pieces_are_one_update_that_the_end_of_the_pause_commits() -> None:
    s = command_site()
    s.llm.status = Status("paused", "0", 0, True)
    for _ in range(2):
        assert s.post("/areal_set_update_weight_meta", AREAL_META).status_code == 200
        assert s.post("/areal_update_weights_xccl", {}).status_code == 200
        s.llm.answers["start_weight_update"] = Conflict("a weight update is open already", code="update_open")
    assert [verb for verb in verbs(s) if verb != "start_weight_update"] == ["update_weights"] * 2
    assert ("update_weights", complete("update_weights", {"update": STAGED})) in s.llm.commands
    s.llm.commands.clear()
    assert s.post("/areal_continue_generation", {}).json()["success"] is True
    assert verbs(s) == ["finish_weight_update", "resume"]
    s.llm.commands.clear()
    s.post("/areal_continue_generation", {})
    assert verbs(s) == ["resume"], "an update of others is not AReaL's to commit"


def test_areals_update_is_over_when_a_piece_fails() -> None:
    s = command_site()
    s.llm.status = Status("paused", "0", 0, True)
    for opened_here in (True, False):
        if not opened_here:
            s.llm.answers["start_weight_update"] = Conflict("a weight update is open already", code="update_open")
        s.llm.answers["update_weights"] = Conflict("the group is broken")
        s.post("/areal_set_update_weight_meta", AREAL_META)
        s.llm.commands.clear()
        assert s.post("/areal_update_weights_xccl", {}).status_code == 409
        assert verbs(s)[1:] == ["update_weights"] + ["abort_weight_update"] * opened_here, "an update of others stays"
        s.llm.commands.clear()
        s.post("/areal_continue_generation", {})
        assert verbs(s) == ["resume"]


def test_areals_pieces_without_a_pause_are_committed_at_once() -> None:
    s = command_site()
    s.post("/areal_set_update_weight_meta", AREAL_META)
    s.post("/areal_update_weights_xccl", {})
    assert verbs(s) == ["start_weight_update", "update_weights", "finish_weight_update"]


def test_areal_receives_nothing_that_was_not_announced() -> None:
    s = command_site()
    answer = s.post("/areal_update_weights_xccl", {})
    assert answer.status_code == 409 and "areal_set_update_weight_meta" in answer.text


def test_areals_adapters() -> None:
    s = command_site()
    sent = {"lora_model_path": "/p", "lora_name": "a-v1", "lora_int_id": 1, "base_model_name": "m"}
    assert s.post("/areal_update_weights_lora", sent).json()["success"] is True
    assert verbs(s) == ["load_lora_adapter"]


def test_draft_models_are_not_updated() -> None:
    s = command_site()
    error = s.post("/start_draft_weight_update", {}).json()["error"]
    assert error["code"] == "unsupported" and "self-int8" in error["message"] and s.llm.commands == []


def test_areals_adapters_over_a_group() -> None:
    s = command_site()
    s.llm.answers["start_weight_update"] = {"update_id": "u"}
    adapter = AREAL_META | {"lora_name": "a-v1", "lora_int_id": 1, "base_model_name": "m", "lora_bias": "none"}
    adapter |= {"lora_rank": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj"]}
    assert s.post("/areal_set_update_weight_meta_lora", adapter).json()["success"] is True
    assert s.llm.commands == []
    assert s.post("/areal_update_weights_lora_xccl", adapter).json()["success"] is True
    assert verbs(s) == ["start_weight_update", "update_weights", "finish_weight_update"]
    started, staged = s.llm.commands[0][1], s.llm.commands[1][1]
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16.0, "bias": "none", "target_modules": ["q_proj"]}
    assert (started["lora_name"], started["lora_config"]) == ("a-v1", config)
    assert staged["update"]["names"] == AREAL_META["names"] and staged["update_id"] == "u"
    s.llm.commands.clear()
    s.llm.answers["update_weights"] = Conflict("the group is broken")
    assert s.post("/areal_update_weights_lora_xccl", adapter | {"lora_name": "a-v2"}).status_code == 409
    assert verbs(s) == ["start_weight_update", "update_weights", "abort_weight_update"]


def test_skyrls_start_and_finish_make_an_update() -> None:
    s = command_site()
    start = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}
    assert s.post("/collective_rpc", start).json() == {"results": [None]}
    assert s.post("/collective_rpc", {"method": "skyrl_finish_weight_update"}).json() == {"results": [None]}
    assert verbs(s) == ["start_weight_update", "finish_weight_update"]
    wrong = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": "x"}}
    assert s.post("/collective_rpc", wrong).json()["error"]["param"] == "kwargs.is_checkpoint_format"


@pytest.mark.parametrize(
    ("call", "command", "arguments"),
    [
        ({"method": "reload_weights"}, "update_weights_from_dir", {"weight_dir": "DIRECTORY", "weight_version": None}),
        (
            {"method": "reload_weights", "kwargs": {"weights_path": "/w", "is_checkpoint_format": True}, "args": []},
            "update_weights_from_dir",
            {"weight_dir": "/w"},
        ),
        ({"method": "reload_weights", "args": ["/w"], "timeout": 60}, "update_weights_from_dir", {"weight_dir": "/w"}),
        (
            {"method": "pull_weights", "kwargs": {"source_dir": "/d", "target_version": 7, "local_dir": "/l"}},
            "update_weights_from_dir",
            {"weight_dir": "/d", "weight_version": "7"},
        ),
        (
            {"method": "update_weights", "kwargs": {"update_info": {"names": []}}},
            "update_weights",
            {"update": {"names": []}, "update_id": None},
        ),
        ({"method": "update_weights_nccl", "args": [{"names": []}]}, "update_weights", {"update": {"names": []}}),
        (
            {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"offload_kv": True}},
            "sleep",
            {"level": 1, "mode": "keep"},
        ),
        ({"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["weights"]}}, "wake_up", {"tags": ["weights"]}),
    ],
)
def test_methods_of_workers_are_commands(call: dict[str, Any], command: str, arguments: dict[str, Any]) -> None:
    s = command_site()
    assert s.post("/collective_rpc", call).json() == {"results": [None]}
    ((name, received),) = s.llm.commands
    directory = s.app.state.serving.config.model.model
    expected = {key: directory if value == "DIRECTORY" else value for key, value in arguments.items()}
    assert name == command and received | expected == received


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"method": "reload_weights", "kwargs": {"path": "/w"}}, "kwargs.path"),
        ({"method": "reload_weights", "kwargs": {"weights_path": 5}}, "kwargs.weights_path"),
        ({"method": "reload_weights", "args": ["/w"], "kwargs": {"weights_path": "/w"}}, "kwargs.weights_path"),
        ({"method": "reload_weights", "args": ["/w", True, 3]}, "args"),
        ({"method": "pull_weights", "kwargs": {}}, "kwargs"),
        ({"method": "pull_weights", "kwargs": {"source_dir": "/d", "pre_read_hook": "m:f"}}, "kwargs.pre_read_hook"),
        ({"method": "reload_weights", "timeout": 0}, "timeout"),
    ],
)
def test_wrong_arguments_of_workers_methods_are_named(call: dict[str, Any], param: str) -> None:
    s = command_site()
    answer = s.post("/collective_rpc", call)
    assert answer.status_code == 400 and s.llm.commands == []
    assert answer.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    ("method", "why"),
    [("update_weights_ipc", "CUDA IPC"), ("update_weights_rdt", "RDMA"), ("load_weights", "unpickles")],
)
def test_skyrls_methods_that_need_cuda_or_pickles_are_refused(method: str, why: str) -> None:
    s = command_site()
    answer = s.post("/collective_rpc", {"method": method, "kwargs": {"update_info": {}}})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "unsupported" and error["param"] == "method"
    assert why in error["message"] and "/update_weights" in error["message"] and s.llm.commands == []


def test_methods_of_a_worker_extension_are_called() -> None:
    s = command_site(worker_extension_cls="m:C")
    s.llm.answers["collective_rpc"] = [3]
    assert s.post("/collective_rpc", {"method": "load_weights"}).json() == {"results": [3]}
    assert verbs(s) == ["collective_rpc"]


def test_skyrls_paths() -> None:
    s = command_site()
    sent = {
        "sampling_params": {"max_tokens": 2, "logprobs": 1, "seed": 1},
        "model": None,
        "token_ids": [5, 6],
        "cache_salt": "x",
    }
    one, other = (s.post(path, sent).json() for path in ("/skyrl/v1/generate", "/inference/v1/generate"))
    assert one["choices"] == other["choices"]
    assert s.post("/skyrl/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/p"}).status_code == 200
    assert verbs(s) == ["load_lora_adapter"]


@pytest.mark.parametrize(
    ("body", "sampling", "form"),
    [({}, {}, "compact"), ({}, {"routed_experts_format": "npy"}, "npy"), ({"routed_experts_format": "npy"}, {}, "npy")],
)
def test_a_format_of_routed_experts_that_is_sent_wins_over_the_routes(
    body: dict[str, Any], sampling: dict[str, Any], form: str
) -> None:
    raw = json.dumps({"token_ids": [5], "sampling_params": sampling, **body}).encode()
    _, params = decode_request(raw, packed=False, routed_format="compact")
    assert params.routed_experts_format == form


def test_prime_rls_broadcaster_is_refused_with_the_option_to_use() -> None:
    answer = command_site().post("/init_broadcaster", PRIME_RL)
    assert answer.status_code == 400 and "filesystem" in answer.json()["error"]["message"]
