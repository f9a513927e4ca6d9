"""Control routes: their engine calls, the format of refusals, and authorization."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.replies import good
from tests.route_table import CONTROL
from tests.server.scripted_llm import complete
from tests.server.site import Site, command_site
from tokserve.base.errors import BY_STATUS, Conflict, RequestError
from tokserve.dialects.trainers import routes as trainers
from tokserve.features.weights.weight_routes import PIECE
from tokserve.protocol.messages import Status
from tokserve.protocol.prompt import pack_ids

UPDATE = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
ROUTES: list[tuple[str, dict[str, Any] | None, str, dict[str, Any]]] = [
    ("/pause", None, "pause", {"mode": "abort", "clear_cache": True}),
    ("/pause?mode=keep&clear_cache=false", None, "pause", {"mode": "keep", "clear_cache": False}),
    ("/pause?wait_for_inflight_requests=true", None, "pause", {"mode": "wait", "clear_cache": True}),
    ("/pause", {"mode": "wait"}, "pause", {"mode": "wait", "clear_cache": True}),
    (
        "/pause?lease=5",
        {"take_over": True},
        "pause",
        {"mode": "abort", "clear_cache": True, "lease": 5.0, "take_over": True},
    ),
    ("/extend_pause", None, "extend_pause", {}),
    ("/resume", None, "resume", {}),
    ("/sleep?level=2&mode=wait", None, "sleep", {"level": 2, "mode": "wait"}),
    ("/sleep", {"level": 0}, "sleep", {"level": 0, "mode": "abort"}),
    ("/sleep", {"level": 2, "tags": ["weights"]}, "sleep", {"level": 2, "mode": "abort"}),  # SkyRL
    ("/wake_up", None, "wake_up", {"tags": None}),
    ("/wake_up?tags=weights&tags=kv_cache", None, "wake_up", {"tags": ["weights", "kv_cache"]}),
    ("/wake_up", {"tags": ["weights"]}, "wake_up", {"tags": ["weights"]}),
    ("/release_kv_cache_memory", None, "release_kv_cache_memory", {}),
    ("/reset_prefix_cache", {"reset_running_requests": False}, "reset_prefix_cache", {}),
    ("/reset_prefix_cache?reset_external=true", None, "reset_prefix_cache", {"reset_external": True}),
    (
        "/add_draft_corpus",
        {"draft_group": "g", "token_ids": [[5, 6]]},
        "add_draft_corpus",
        {"draft_group": "g", "token_ids": [pack_ids([5, 6])], "lora_name": "", "cache_salt": ""},
    ),
    ("/remove_draft_corpus", {"draft_group": "g"}, "remove_draft_corpus", {"draft_group": "g"}),
    ("/init_weight_transfer_engine", {"init_info": {"x": 1}}, "init_weight_transfer_engine", {"init_info": {"x": 1}}),
    ("/shutdown_weight_transfer_engine", {}, "shutdown_weight_transfer_engine", {}),
    ("/start_weight_update", None, "start_weight_update", {"is_checkpoint_format": True}),
    ("/start_weight_update", {}, "start_weight_update", {"is_checkpoint_format": True}),
    (
        "/start_weight_update",
        {"lease": 30, "take_over": True},
        "start_weight_update",
        {"is_checkpoint_format": True, "lease": 30.0, "take_over": True},
    ),
    (
        "/init_weight_transfer_engine",
        {"init_info": {}, "take_over": True},
        "init_weight_transfer_engine",
        {"init_info": {}, "take_over": True},
    ),
    (
        "/update_weights",
        {"weight_dir": "/w", "recompute_kv": True, "take_over": True},
        "update_weights_from_dir",
        {"weight_dir": "/w", "weight_version": None, "recompute_kv": True, "take_over": True},
    ),
    (
        "/finish_weight_update",
        {"recompute_kv": True},
        "finish_weight_update",
        {"weight_version": None, "recompute_kv": True},
    ),
    ("/update_weights", {"update_info": UPDATE}, "update_weights", {"update": UPDATE}),
    ("/update_weights", {"update_info": [UPDATE]}, "update_weights", {"update": UPDATE}),
    ("/update_weights", {"weight_dir": "/w"}, "update_weights_from_dir", {"weight_dir": "/w", "weight_version": None}),
    (
        "/update_weights",
        {"weight_dir": "/w", "skip_prefix_cache_reset": True},
        "update_weights_from_dir",
        {"weight_dir": "/w", "weight_version": None},
    ),
    ("/areal_pause_generation", {}, "pause", {"mode": "abort", "clear_cache": True}),
    ("/areal_continue_generation", {}, "resume", {}),
    (
        "/areal_update_weights",
        {"model_path": "/w"},
        "update_weights_from_dir",
        {"weight_dir": "/w", "weight_version": None},
    ),
    ("/finish_weight_update", None, "finish_weight_update", {"weight_version": None}),
    ("/finish_weight_update", {"weight_version": "7"}, "finish_weight_update", {"weight_version": "7"}),
    ("/abort_weight_update", None, "abort_weight_update", {}),
    ("/start_profile", None, "start_profile", {"max_iterations": None, "max_seconds": 60.0, "op_by_op": False}),
    (
        "/start_profile",
        {"profile_prefix": "a", "delay_iterations": 2, "profiler_kwargs": {"with_stack": True}},
        "start_profile",
        {"profile_prefix": "a", "delay_iterations": 2, "profiler_kwargs": {"with_stack": True}},
    ),
    ("/stop_profile", {}, "stop_profile", {}),
    ("/update_weight_version", {"new_version": "v"}, "update_weight_version", {"new_version": "v"}),
    (
        "/v1/load_lora_adapter",
        {"lora_name": "a", "lora_path": "/p"},
        "load_lora_adapter",
        {"lora_name": "a", "lora_path": "/p", "load_inplace": None},
    ),
    (
        "/load_lora_adapter?lora_name=a",
        {"lora_path": "/p", "load_inplace": True},
        "load_lora_adapter",
        {"lora_name": "a", "lora_path": "/p", "load_inplace": True},
    ),
    ("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 3}, "unload_lora_adapter", {"lora_name": "a"}),
    ("/unload_lora_adapter", {"lora_name": "a"}, "unload_lora_adapter", {"lora_name": "a"}),
    ("/weight_checker", {"action": "checksum", "names": "memory"}, "weight_checksums", {}),
    ("/weight_checker", {"action": "checksum", "names": "checkpoint"}, "checkpoint_checksums", {}),
    (
        "/collective_rpc",
        {"method": "f", "args": [1], "kwargs": {"a": 2}},
        "collective_rpc",
        {"method": "f", "args": [1], "kwargs": {"a": 2}},
    ),
]


@pytest.mark.parametrize(("path", "sent", "verb", "args"), ROUTES, ids=lambda value: str(value)[:40])
def test_each_route_is_one_call_of_the_engine(path: str, sent: Any, verb: str, args: dict[str, Any]) -> None:
    s = command_site()
    answer = s.post(path, sent)
    assert answer.status_code == 200, answer.text
    assert s.llm.commands == [(verb, complete(verb, args))]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/pause", "lease", "5"),
        ("/pause", "clear_cache", "true"),
        ("/pause", "clear_cache", 1),
        ("/sleep", "level", "1"),
        ("/sleep", "level", 1.0),
        ("/add_draft_corpus", "token_ids", [[5.0]]),
    ],
)
def test_values_of_a_body_are_not_converted(path: str, name: str, value: Any) -> None:
    s = command_site()
    answer = s.post(path, {"draft_group": "g", name: value} if name == "token_ids" else {name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(name) and not s.llm.commands
    if not isinstance(value, list):  # in the query they are texts
        assert s.post(f"{path}?{name}={value}").status_code == 200


def test_the_table_has_every_control_route() -> None:
    reading = {"/inference/v1/requests"}  # changes nothing, and is guarded like those that do
    of_trainers = {endpoint.path for endpoint in trainers.ENDPOINTS if endpoint.control}  # test_trainers.py
    assert {path.partition("?")[0] for path, *_ in ROUTES} | reading | of_trainers == CONTROL


def test_replies_of_the_control_routes() -> None:
    s = command_site()
    s.llm.answers = {
        "reset_prefix_cache": True,
        "weight_checksums": {"a": "1", "b": "2"},
        "collective_rpc": [3],
        "pause": {"status": "paused"},
    }
    s.llm.status = Status("paused", "v7", 7, True)
    assert s.get("/is_paused").json() == {"is_paused": True} and s.get("/is_sleeping").json() == {"is_sleeping": False}
    assert s.post("/reset_prefix_cache", {}).json() == {"success": True}
    info = {"weight_version": "v7", "epoch": 7, "checksum": None, "last_failure": None, "adapters": []}
    assert s.get("/weight_info").json() == info
    assert s.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    compared = s.post("/weight_checker", {"action": "compare", "baseline": {"a": "1", "c": "3"}}).json()
    assert compared == {"match": False, "mismatches": ["b", "c"]}
    assert s.post("/collective_rpc", {"method": "f"}).json() == {"results": [3]}
    assert s.post("/pause").json() == {"status": "paused"}  # what the engine replies
    assert s.get("/liveness").status_code == 200
    assert s.get("/server_info?config_format=json").json()["vllm_config"]["model_config"]["max_model_len"] == 512


def test_checksums_in_memory_and_of_the_checkpoint() -> None:
    s = command_site()
    known = {"checkpoint": {"a": "1", "head": "2", "embed": "2"}, "tied": {"head": "embed"}}
    s.llm.answers = {"weight_checksums": {"place": "0"}, "checkpoint_checksums": known}

    def check(**body: Any) -> dict[str, Any]:
        return good(s.post("/weight_checker", body))

    assert check(action="checksum") == {"checksums": {"place": "0"}, **known}
    assert check(action="checksum", names="memory") == {"checksums": {"place": "0"}}
    assert check(action="checksum", names="checkpoint") == known
    assert check(action="compare", baseline={"place": "0"})["match"] is True
    for baseline, mismatches in (
        ({"a": "1", "head": "2", "embed": "2"}, []),
        ({"a": "1", "embed": "2"}, []),
        ({"a": "1", "head": "2"}, []),
        ({"a": "1"}, ["embed", "head"]),
        ({"a": "3", "embed": "2"}, ["a"]),
        ({"a": "1", "embed": "2", "x": "1"}, ["x"]),
        ({"a": "1", "embed": "2", "head": "5"}, ["head"]),
    ):
        actual = check(action="compare", names="checkpoint", baseline=baseline)
        assert actual == {"match": not mismatches, "mismatches": mismatches}, baseline
    answer = s.post("/weight_checker", {"action": "checksum", "names": "files"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "names"


BAD = [
    ("/pause?clear_cache=perhaps", None, "clear_cache"),
    ("/pause", {"node": "keep"}, "node"),
    ("/sleep?level=two", None, "level"),
    ("/sleep", {"level": 2**63}, "level"),
    ("/sleep", {"level": -1}, "level"),
    ("/sleep?level=36893488147419103232", None, "level"),
    ("/sleep", {"tags": ["disk"]}, "tags[0]"),
    ("/wake_up", {"tags": "weights"}, "tags"),
    ("/init_weight_transfer_engine", {}, "init_info"),
    ("/update_weights", {}, "update_info"),
    ("/update_weights", {"weight_dir": None}, "update_info"),
    ("/update_weights", {"update_info": []}, "update_info"),
    ("/update_weights", {"update_info": {}, "weight_dir": "w"}, "update_info"),
    ("/update_weights", {"update_info": UPDATE, "recompute_kv": True}, "recompute_kv"),
    ("/update_weights", {"update_info": UPDATE, "take_over": True}, "take_over"),
    ("/update_weight_version", {}, "new_version"),
    ("/weight_checker", {"action": "restore"}, "action"),
    ("/weight_checker", {"action": "compare"}, "baseline"),
    ("/collective_rpc", {}, "method"),
    ("/pause", [1], None),
    ("/areal_update_weights", {"weight_dir": "/w"}, "weight_dir"),
    ("/collective_rpc", {"method": "f", "timeout": 0}, "timeout"),
    ("/collective_rpc", {"method": "f", "timeout": 1e300}, "timeout"),
    ("/start_profile", {"profile_prefix": "../x"}, "profile_prefix"),
    ("/start_profile", {"max_seconds": 0}, "max_seconds"),
    ("/start_profile", {"max_iterations": -1}, "max_iterations"),
    ("/start_profile", {"num_steps": 1}, "num_steps"),
    ("/start_profile", {"profiler_kwargs": {"with_stack": 5}}, "profiler_kwargs[...]"),
]


@pytest.mark.parametrize(("path", "sent", "param"), BAD, ids=str)
def test_bad_bodies_name_the_field(path: str, sent: Any, param: str | None) -> None:
    s = command_site()
    answer = s.post(path, sent)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert not s.llm.commands


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/collective_rpc", {"method": "f", "timeout": 0.5}),
        ("GET", "/liveness", None),
        ("GET", "/health?deep=1", None),
    ],
)
def test_an_engine_that_does_not_answer_in_time_is_not_called_dead(
    method: str, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = command_site()

    async def call(method: str, /, **args: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(s.llm, "call", call)
    answer = s.request(method, path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_hung")


@pytest.mark.parametrize("path", ["/liveness", "/health?deep=1"])
def test_an_engine_that_never_answers_is_given_up_after_the_option(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = command_site(liveness_timeout=0.05)

    async def call(method: str, /, **args: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(s.llm, "call", call)
    answer = s.get(path)
    assert answer.status_code == 503 and answer.json()["error"]["message"].endswith("not answered for 0.05 s")


def test_trainers_find_the_configuration_where_vllm_has_it() -> None:
    shown = command_site().get("/server_info?config_format=json").json()["vllm_config"]
    assert shown["model_config"]["logprobs_mode"] == "raw_logprobs" and shown["lora_config"] is None
    with_adapters = (
        command_site(enable_lora=True, max_loras=3).get("/server_info?config_format=json").json()["vllm_config"]
    )
    assert with_adapters["lora_config"] == {"max_loras": 3, "max_lora_rank": 16}
    assert shown["model_config"]["dtype"].startswith("torch.")
    assert shown["parallel_config"]["tensor_parallel_size"] == 1 and shown["parallel_config"]["data_parallel_size"] == 1
    assert shown["cache_config"]["num_gpu_blocks"] > 0 and "max_num_seqs" in shown["scheduler_config"]
    assert isinstance(command_site().get("/server_info?config_format=text").json()["vllm_config"], str)
    assert command_site().get("/server_info?config_format=yaml").json()["error"]["param"] == "config_format"


def test_refusals_of_the_engine_keep_their_status() -> None:
    s = command_site()
    s.llm.answers["start_weight_update"] = Conflict("one is open")
    answer = s.post("/start_weight_update")
    assert answer.status_code == 409 and answer.json()["error"]["type"] == "conflict_error"
    assert all(kind("m", field="f").status == status for status, kind in BY_STATUS.items())


def test_a_weight_body_is_forwarded_in_pieces() -> None:
    s = command_site()
    content = bytes(range(256)) * 40_000
    answer = s.post("/update_weights", content=content, headers={"Content-Type": "application/octet-stream"})
    assert answer.status_code == 200
    pieces = [args for verb, args in s.llm.commands if verb == "feed_weights"]
    assert s.llm.commands[0] == ("begin_weight_stream", {"stream": pieces[0]["stream"], "update_id": None})
    assert b"".join(piece["chunk"] for piece in pieces) == content and len({p["stream"] for p in pieces}) == 1
    assert [piece["last"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_weight_body_is_refused_for_its_first_piece_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    s, behind = command_site(), asyncio.Event()

    async def call(method: str, /, **args: Any) -> Any:
        if method == "begin_weight_stream":
            return {}
        if args["chunk"][:1] == b"1":
            await behind.wait()
            raise RequestError("1 misshapen: a.weight")
        if args["last"]:
            behind.set()
        raise Conflict("no weight update is open: start one first; the last one failed: 1 misshapen: a.weight")

    monkeypatch.setattr(s.llm, "call", call)
    content = b"1" + bytes(3 * PIECE)
    answer = s.post("/update_weights", content=content, headers={"Content-Type": "application/octet-stream"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "1 misshapen: a.weight")


def test_a_disconnected_sender_ends_the_update() -> None:
    s = command_site()

    messages = [{"type": "http.request", "body": b"x" * 100, "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        """Discard the reply."""

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/update_weights",
        "raw_path": b"/update_weights",
        "root_path": "",
        "headers": [(b"content-type", b"application/octet-stream")],
        "query_string": b"",
        "scheme": "http",
        "server": ("a", 1),
        "client": ("127.0.0.1", 1),
        "http_version": "1.1",
    }
    asyncio.run(s.app(scope, receive, send))
    assert s.llm.commands[-1][1]["broken"] is True


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/generate", "/inference/v1/generate"),
        ("/v1", None),
        ("/v1/moderations", None),
        ("/v1/completion", "/v1/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
    ],
)
def test_an_unknown_route_is_refused_with_the_nearest_one(path: str, nearest: str | None) -> None:
    message = command_site().post(path, {}).json()["error"]["message"]
    assert message == f"there is no route {path}" + (f"; did you mean {nearest}?" if nearest else "")


def test_a_route_of_sglang_is_refused_with_its_option() -> None:
    message = command_site().post("/generate", {}).json()["error"]["message"]
    assert message == "there is no route /generate; it needs --sglang-api"


# --- who may call ---


def status(s: Site, client: tuple[str, int] | None, path: str = "/resume", **headers: str) -> int:
    return asked_by(s, client, path, **headers).status_code


def asked_by(s: Site, client: tuple[str, int] | None, path: str = "/resume", **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(s.app, client=client)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post(path, headers=headers)

    return asyncio.run(ask())


HERE, MAPPED, SIX, AWAY = ("127.0.0.1", 1), ("::ffff:127.0.0.1", 1), ("::1", 1), ("10.0.0.9", 1)


@pytest.mark.parametrize("state", ["paused", "sleeping", "updating", "running"])
def test_a_reply_reports_a_pause(state: str) -> None:
    bodies = {
        "/inference/v1/generate": {"token_ids": [5]},
        "/v1/completions": {"prompt": "x", "stream": True, "max_tokens": 5},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
        "/generate": {"input_ids": [5]},
        "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    }
    s = command_site(sglang_api=True)
    s.llm.status = Status(state=state)
    for path, body in bodies.items():
        answer = s.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-waited-for") == (state if state in ("paused", "sleeping") else None)
    assert "x-waited-for" not in s.get("/v1/models").headers


def test_without_keys_control_is_for_this_machine() -> None:
    s = command_site()
    assert [status(s, address) for address in (HERE, MAPPED, SIX, None, ("", 0))] == [200] * 5
    assert [status(s, address) for address in (AWAY, ("fe80::1%eth0", 1), ("somewhere", 1))] == [403] * 3
    assert status(s, HERE, Origin="http://evil.example") == 403
    for answer in (asked_by(s, AWAY), asked_by(s, HERE, Origin="http://evil.example")):
        assert answer.json()["error"]["code"] == "remote_control"
    assert status(s, AWAY, "/resume/") == 403
    assert status(s, AWAY, "/inference/v1/abort_requests") == 400  # not a control route
    assert status(command_site(allow_remote_control=True), AWAY) == 200


HOSTS = ["localhost", "127.0.0.1", "[::1]", "box.lan"]


@pytest.mark.parametrize("path", ["/resume", "/sleep", "/inference/v1/requests", "/server_info", "/metrics"])
def test_only_allowed_hosts_may_control_or_look_inside(path: str) -> None:
    """A page whose name leads to this machine sends its own name, and no Origin with a GET."""
    s = command_site(allowed_hosts=HOSTS)

    def code(host: str) -> Any:
        answer = asked_by(s, HERE, path, Host=host)
        return answer.json()["error"]["code"] if answer.status_code == 403 else None

    assert [code(host) for host in ("evil.example", "evil.example:8000", "[::2]:80", "localhost.evil.example")] == [
        "host_not_allowed"
    ] * 4
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:8000", "[::1]:8000", "[::1]", "box.lan.", "localhost:"):
        assert code(host) is None, host
    s = command_site(allowed_hosts=["*"])
    assert code("evil.example") is None
    assert asked_by(command_site(allowed_hosts=HOSTS), HERE, "/v1/completions", Host="evil.example").status_code == 400


def test_an_api_key_opens_control_too_if_there_is_no_admin_key() -> None:
    s = command_site(api_key=["k"])
    assert status(s, HERE) == 401 and status(s, AWAY, Authorization="Bearer k") == 200


def test_an_admin_key_guards_control_and_opens_the_rest() -> None:
    s = command_site(api_key=["k"], admin_api_key=["a", "b"])
    assert [status(s, HERE, **headers) for headers in ({}, {"Authorization": "Bearer k"})] == [401, 401]
    assert "needs the admin key" in s.post("/resume", {}).json()["error"]["message"]
    assert status(s, AWAY, Authorization="Bearer b") == 200
    assert status(s, HERE, "/inference/v1/abort_requests", Authorization="Bearer a") == 400
    assert status(s, HERE, "/inference/v1/abort_requests") == 401
    alone = command_site(admin_api_key=["a"])
    assert status(alone, HERE) == 401 and status(alone, AWAY, "/inference/v1/abort_requests") == 400


def test_a_draft_corpus_is_bounded() -> None:
    most = {"draft_group": "g", "token_ids": [[5, 6]] * 4097}
    answer = command_site().post("/add_draft_corpus", most)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "token_ids", answer.text
    answer = command_site().post("/add_draft_corpus", {"draft_group": "g", "token_ids": [[5], [6, -1]]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "token_ids[1]", answer.text
