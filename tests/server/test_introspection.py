"""Routes that observe, keys, redirects, and the description of the API."""

import asyncio
import threading
from typing import Any

import pytest

import tokserve
from tests.server.site import Site, site
from tokserve.base.errors import EngineDead
from tokserve.client.outputs import StepStats
from tokserve.protocol.messages import Status
from tokserve.server.serving import Serving

PUBLIC = {"/", "/health", "/ping", "/ready", "/version"}


def test_health() -> None:
    s = site()
    answer = s.get("/health")
    assert answer.status_code == 200 and answer.json() == {} and not s.llm.verbs
    assert s.get("/ping").status_code == s.post("/ping").status_code == 200
    assert s.get("/health?deep=1").status_code == 200 and s.llm.verbs == ["check"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/health?deep=1"])
def test_health_of_a_dead_engine(path: str) -> None:
    s = site()
    s.llm.die()
    answer = s.get(path)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
    assert "signal 9" not in answer.text


@pytest.mark.parametrize("path", ["/health", "/ping", "/health?deep=1"])
def test_health_of_an_engine_that_hangs(path: str) -> None:
    s = site()
    s.llm.hung, s.llm.silence = True, 601.0
    answer = s.get(path)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_hung" and "601 s" in answer.text
    assert "retry-after" not in answer.headers and not s.llm.verbs, "nothing waits for it"


def test_while_another_engine_starts_requests_are_told_when_to_come_back() -> None:
    s = site()
    s.llm.down = EngineDead("it has crashed", private="signal 9", code="engine_restarting", retry_after=7)
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
    for answer in (
        s.get("/health"),
        *(s.post("/inference/v1/generate", body | {"stream": on}) for on in (False, True)),
    ):
        assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
        assert answer.json()["error"] == {
            "message": "it has crashed",
            "type": "engine_dead_error",
            "param": None,
            "code": "engine_restarting",
        }
    s.llm.down = None
    assert s.post("/inference/v1/generate", body).status_code == 200


def test_ready_reports_the_state_that_blocks_requests() -> None:
    s = site()

    def status() -> tuple[int, str]:
        answer = s.get("/ready")
        assert list(answer.json()) == ["status"]
        return answer.status_code, answer.json()["status"]

    assert status() == (200, "ready")
    s.llm.status = Status("updating")
    assert status() == (200, "updating")  # the old weights serve: a push must not drain a server
    for state in ("paused", "sleeping", "quarantined"):
        s.llm.status = Status(state)
        assert status() == (503, state)
    s.llm.status = Status("updating", quarantine="there are no weights")
    assert status() == (503, "quarantined")  # until the update is there
    s.app.state.draining = True  # each that follows hides those before
    assert status() == (503, "draining")
    s.llm.hung = True
    assert status() == (503, "hung")
    s.llm.hung, s.llm.down = False, EngineDead()
    assert status() == (503, "restarting")
    s.llm.die()
    assert status() == (503, "dead")
    assert s.get("/version").status_code == 200 and not s.llm.verbs


def test_version() -> None:
    assert site().get("/version").json() == {"version": tokserve.__version__}


def test_models() -> None:
    s = site()
    listed = s.get("/v1/models").json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["tiny", "alias"]
    for model in listed["data"]:
        assert model["max_model_len"] == 512 and model["object"] == "model" and model["created"]
        assert s.get(f"/v1/models/{model['id']}").json() == model
    answer = s.get("/v1/models/nope/x")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_a_model_name_may_hold_a_slash() -> None:
    assert site(served_model_name=["org/name"]).get("/v1/models/org/name").json()["id"] == "org/name"


def test_server_info_shows_the_configuration_without_keys() -> None:
    s = site(api_key=["sesame"])
    answer = s.get("/server_info", headers={"Authorization": "Bearer sesame"})
    shown = answer.json()
    assert shown["config"]["server"]["api_key"] == 1 and "sesame" not in answer.text
    assert shown["config"]["model"]["max_model_len"] == 512 and shown["facts"] == {"scripted": True}
    assert shown["engine"]["vocab_size"] and shown["versions"]["tokserve"] == tokserve.__version__


def test_load() -> None:
    s = site()
    s.llm.stats = StepStats(running=3, waiting=2)
    assert s.get("/load").json() == {"server_load": 0, "running": 3, "waiting": 2}


def test_tokenize_text() -> None:
    answer = site().post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert answer["count"] == 3 and answer["max_model_len"] == 512 and len(answer["tokens"]) == 3
    assert answer["token_strs"] == ["a", "Ã", "©"]  # as the vocabulary writes them: a part of a character is no text
    assert site().post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_tokenize_messages() -> None:
    s = site()
    body = {"messages": [{"role": "user", "content": "x"}]}
    tokens = s.post("/tokenize", body).json()["tokens"]
    assert s.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "user:x;assistant:"}
    shorter = s.post("/tokenize", body | {"add_generation_prompt": False}).json()["tokens"]
    assert s.post("/detokenize", {"tokens": shorter}).json() == {"prompt": "user:x;"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": [5]}, "messages[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**20]}, "tokens[0]"),
    ],
)
def test_tokenize_refusals(path: str, body: Any, param: str) -> None:
    answer = site().post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_many_ids_are_checked_and_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    check = Serving.check_ids

    def recorded(*args: Any) -> None:
        threads.add(threading.get_ident())
        check(*args)

    monkeypatch.setattr(Serving, "check_ids", recorded)
    assert site().post("/detokenize", {"tokens": [70] * 50_000}).json() == {"prompt": "d" * 50_000}
    assert threads and threading.get_ident() not in threads


def test_detokenize_keeps_special_tokens_by_default() -> None:
    s = site()
    assert s.post("/detokenize", {"tokens": [1]}).json() == {"prompt": "<bos>"}
    assert s.post("/detokenize", {"tokens": [1], "skip_special_tokens": True}).json() == {"prompt": ""}


# keys


def locked(**options: Any) -> Site:
    return site(api_key=["k1", "k2"], ui=True, **options)


def paths(s: Site) -> list[tuple[str, str]]:
    """Every route of the app with each of its methods."""
    return [(route.path.replace("{id:path}", "tiny"), method) for route in s.app.routes for method in route.methods]


@pytest.mark.some(1)
@pytest.mark.parametrize("dialect", [False, True])
def test_every_route_but_the_public_ones_needs_a_key(dialect: bool) -> None:
    s = locked(sglang_api=dialect)
    assert len(paths(s)) > 20
    for path, method in paths(s):
        status = s.request(method, path).status_code
        assert (status == 401) is (path not in {*PUBLIC, "/health_generate"}), (method, path, status)
        with_key = s.request(method, path, headers={"Authorization": "Bearer k2"}).status_code
        stored = path.startswith("/v1/responses/")  # of which there is nothing
        assert with_key not in (401, None if stored else 404), (method, path, with_key)


OTHERS = ["/nowhere", "/metrics/", "/openapi.json", "/docs", "/health/x", "/HEALTH"]
WRONG = ["", "k1", "Bearer", "Bearer ", "Bearer k", "Bearer k11", "Basic k1", "Bearer k1 k2", "Bearer ä"]


@pytest.mark.parametrize("path", OTHERS)
def test_unknown_routes_need_a_key(path: str) -> None:
    assert locked().get(path).status_code == 401


@pytest.mark.parametrize("value", WRONG)
def test_wrong_keys(value: str) -> None:
    answer = locked().get("/v1/models", headers=[(b"Authorization", value.encode())])
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"
    assert ("an API key is required" if not value else "the API key is wrong") in error["message"]


@pytest.mark.parametrize("value", ["Bearer k1", "bearer k2", "Bearer  k1 "])
def test_right_keys(value: str) -> None:
    assert locked().get("/v1/models", headers={"Authorization": value}).status_code == 200


async def answer_behind(root: str, path: str, s: Site, method: str = "GET") -> int:
    """The status of a request whose path, root path included, is this."""
    seen: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": root,
        "headers": [],
        "query_string": b"",
        "scheme": "http",
        "server": ("a", 1),
        "client": ("192.0.2.7", 1),
        "http_version": "1.1",
    }
    await s.app(scope, receive, send)
    return seen[0]


def test_keys_behind_a_root_path() -> None:
    def status(path: str) -> int:
        return asyncio.run(answer_behind("/api", path, locked()))

    assert [status(path) for path in ("/api/health", "/api/v1/models", "/api")] == [200, 401, 307]
    assert [status(path) for path in ("//health", "//", "/api//health")] == [401, 404, 401]


@pytest.mark.parametrize("root", ["", "/", "/api", "/api/", "api"])
@pytest.mark.parametrize(("options", "refusal"), [({}, 403), ({"api_key": ["k"]}, 401)])
def test_no_root_path_opens_control_routes(root: str, options: dict[str, Any], refusal: int) -> None:
    for slash in ("", "/"):
        status = asyncio.run(answer_behind(root, f"{root}/pause{slash}", site(**options), "POST"))
        assert status == refusal
    for path in (f"{root}{root}/pause", f"{root}/{root}/pause", f"{root}{root}{root}/pause"):
        assert asyncio.run(answer_behind(root, path, site(**options), "POST")) in (refusal, 401, 404)


# the rest


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "/v1/models/tiny/"])
def test_trailing_slashes(path: str) -> None:
    assert site().get(path, follow_redirects=False).status_code == 200
    assert site().post("/v1/completions/", {"prompt": "a"}, follow_redirects=False).status_code == 200


def test_the_model_answers_to_its_directory_and_short_name() -> None:
    s = site(served_model_name=["org/tiny"])
    directory = s.app.state.serving.config.model.model
    for name in ("org/tiny", "tiny", directory):
        assert s.post("/v1/completions", {"model": name, "prompt": "a"}).json()["model"] == "org/tiny"
    assert s.post("/v1/completions", {"model": "other/tiny", "prompt": "a"}).status_code == 404


def test_openapi_describes_bodies() -> None:
    described = site().get("/openapi.json").json()
    body = described["paths"]["/inference/v1/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schemas = described["components"]["schemas"]
    assert "cache_salt" in schemas[body["$ref"].rpartition("/")[2]]["properties"]
    assert "top_p" in schemas["SamplingParams"]["properties"] and "messages" in schemas["ChatBody"]["properties"]


def test_cors_is_off() -> None:
    answer = site().get("/health", headers={"Origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
