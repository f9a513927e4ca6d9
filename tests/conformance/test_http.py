"""HTTP itself: routes and methods, content types, broken bodies, the error shape, observation, security."""

import gzip
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.conformance.api import (
    ABORTS,
    CHAT,
    CHAT_TOKENS,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    JSON,
    MSGPACK,
    PROMPT,
    TOKENIZE,
    Api,
)

TEXT_POSTS = (CHAT, CHAT_TOKENS, COMPLETIONS, TOKENIZE, DETOKENIZE)
POSTS = (GENERATE, *ABORTS, *TEXT_POSTS)
GETS = (
    "/v1/models",
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/load",
    "/server_info",
    "/openapi.json",
    "/inference/v1/requests",
)
BODY = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "temperature": 0}}


@pytest.fixture(params=POSTS)
def post(request: Any, api: Api) -> str:
    """Every POST route the server has."""
    if api.tokens_only and request.param in TEXT_POSTS:
        pytest.skip("a tokens-only server")
    path: str = request.param
    return path


BROKEN = [
    b"",
    b" ",
    b"{",
    b"null",
    b"5",
    b'"x"',
    b"[]",
    b"{]",
    b"{'a':1}",
    b'{"features":}',
    b'{"features":1}}',
    b'{"features":01}',
    b'{"features":+1}',
    b'{"features":' + b"[" * 100_000,
    b'{"model":"\xff"}',
    b"\xef\xbb{}",
    '{"token_ids":[5]}'.encode("utf-16"),
    gzip.compress(b"{}", mtime=0),
]


@pytest.mark.some(36)
@pytest.mark.parametrize("raw", BROKEN, ids=lambda raw: repr(raw[:16]))
def test_a_body_that_is_no_json_object_is_refused_everywhere(api: Api, post: str, raw: bytes) -> None:
    api.refused(api.post(post, content=raw, headers={"Content-Type": JSON}), 400, None)


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b'"\\ud800"'])
def test_a_value_that_json_does_not_have_is_refused_with_its_field(api: Api, post: str, value: bytes) -> None:
    raw = b'{"features":{"a":[1,%s]}}' % value
    api.refused(api.post(post, content=raw, headers={"Content-Type": JSON}), 400, "features.a[1]")


def test_a_number_beyond_all_floats_is_refused(api: Api) -> None:
    for raw in (b'{"token_ids":[1e400]}', b'{"token_ids":[5],"sampling_params":{"temperature":1e400}}', b'{"n":1e400}'):
        assert api.post(GENERATE, content=raw, headers={"Content-Type": JSON}).status_code == 400


@pytest.mark.some(28)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x05",
        b"\x90",
        b"\x81",
        b"\x81\xa1a",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xc0\x01",
        b"\x81\x90\x01",
        b"\x81\xa1\xff\x01",
    ],
    ids=lambda raw: repr(raw[:16]),
)
def test_a_body_that_is_no_msgpack_map_is_refused_everywhere(api: Api, post: str, raw: bytes) -> None:
    answer = api.post(post, content=raw, headers={"Content-Type": MSGPACK})
    assert answer.status_code == 400 and set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", ""])
def test_other_content_types_are_refused_everywhere(api: Api, post: str, kind: str) -> None:
    answer = api.post(post, content=json.dumps(BODY).encode(), headers={"Content-Type": kind})
    assert api.refused(answer, 415, None, "application/msgpack")["code"] == "content_type"


@pytest.mark.parametrize(
    "kind", [JSON, "application/json; charset=utf-8", "Application/JSON", "application/x+json", None]
)
def test_json_by_any_of_its_names(api: Api, kind: str | None) -> None:
    answer = api.post(GENERATE, content=json.dumps(BODY).encode(), headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 200 and answer.headers["content-type"] == JSON


@pytest.mark.parametrize("kind", [MSGPACK, "application/x-msgpack", "application/vnd.msgpack"])
def test_msgpack_by_any_of_its_names_has_the_same_fields(api: Api, kind: str) -> None:
    packed = msgspec.msgpack.encode(BODY)
    answer = api.post(GENERATE, content=packed, headers={"Content-Type": kind})
    expected = api.ok(GENERATE, BODY)
    assert answer.headers["content-type"] == JSON and answer.json()["choices"] == expected["choices"]
    answer = api.post(GENERATE, content=packed, headers={"Content-Type": kind, "Accept": kind})
    assert answer.headers["content-type"] == MSGPACK
    assert set(msgspec.msgpack.decode(answer.content)) == set(expected)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/msgpack;q=0", JSON),
        ("application/msgpack; q=0.000, */*", JSON),
        ("application/msgpack;q=1", MSGPACK),
        ("application/json, application/msgpack;q=0.5", JSON),
        ("application/json;q=0.5, application/MsgPack", MSGPACK),
        ("application/x-msgpack, */*;q=0.1", MSGPACK),
        ("text/html, application/msgpack;q=x", MSGPACK),
        (";,;q=,=", JSON),
    ],
)
def test_accept_is_weighed(api: Api, accept: str, kind: str) -> None:
    answer = api.post(GENERATE, BODY, headers={"Accept": accept})
    assert answer.status_code == 200 and answer.headers["content-type"] == kind


def test_an_error_is_json_also_for_a_msgpack_client(api: Api) -> None:
    body = msgspec.msgpack.encode({"token_ids": []})
    answer = api.post(GENERATE, content=body, headers={"Content-Type": MSGPACK, "Accept": MSGPACK})
    api.refused(answer, 400, "token_ids")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_refused_in_msgpack(api: Api, value: float) -> None:
    for params, param in (({"temperature": value}, "temperature"), ({"logit_bias": {5: value}}, "logit_bias")):
        body = msgspec.msgpack.encode({"token_ids": PROMPT, "sampling_params": params})
        answer = api.post(GENERATE, content=body, headers={"Content-Type": MSGPACK})
        api.refused(answer, 400, f"sampling_params.{param}")


def test_the_last_of_two_equal_keys_counts(api: Api) -> None:
    raw = b'{"token_ids":[5],"token_ids":[6],"return_token_ids":true,"sampling_params":{"max_tokens":1}}'
    assert api.post(GENERATE, content=raw, headers={"Content-Type": JSON}).json()["prompt_token_ids"] == [6]


def test_a_body_over_the_limit_is_413(api: Api) -> None:
    limit = api.config["server"]["max_body_mb"] << 20
    for path in (GENERATE, ABORTS[0]):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
        for length in (limit + 1, 10**17, 10**30):
            status, body = exchange(api, f"{head}Content-Length: {length}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert status == 413 or length > 2**63, (status, body)
            if status == 413:
                assert json.loads(body)["error"]["code"] == "body_too_large"


def exchange(api: Api, raw: bytes, continuation: bytes = b"") -> tuple[int, bytes]:
    """Send bytes and read one answer; `then` follows the server's 100 Continue."""
    address = urlsplit(api.url)
    with socket.create_connection((address.hostname, address.port), timeout=120) as sock:
        sock.sendall(raw)
        file = sock.makefile("rb")
        status = int(file.readline().split()[1])
        if status == 100:
            assert file.readline() == b"\r\n"
            sock.sendall(continuation)
            status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return status, file.read(length)


def test_expect_100_continue(api: Api) -> None:
    body = json.dumps(BODY).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n"
    status, answer = exchange(api, f"{head}Expect: 100-continue\r\n\r\n".encode(), body)
    assert status == 200 and json.loads(answer)["choices"]


def test_pipelined_requests_are_answered_in_order(api: Api) -> None:
    address = urlsplit(api.url)
    with socket.create_connection((address.hostname, address.port), timeout=120) as sock:
        one = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
        sock.sendall(one % b"/version" + one % b"/nowhere" + b"GET /health HTTP/1.0\r\n\r\n")
        answer = b""
        while part := sock.recv(65536):
            answer += part
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_replies_are_not_chunked(api: Api, stream: bool) -> None:
    """A stream ends with the connection; what has a length says it."""
    body = json.dumps(BODY | {"stream": stream}).encode()
    head = f"POST {GENERATE} HTTP/1.0\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    address = urlsplit(api.url)
    with socket.create_connection((address.hostname, address.port), timeout=120) as sock:
        sock.sendall(head.encode() + body)
        headers, _, answer = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b" 200 " in headers and b"connection: close" in headers and b"chunked" not in headers
    if stream:
        assert answer.startswith(b"data: {") and answer.endswith(b"}\n\ndata: [DONE]\n\n") and b"\r\n" not in answer
    else:
        assert f"content-length: {len(answer)}".encode() in headers and json.loads(answer)["choices"]


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def test_an_offer_of_another_protocol_is_declined(api: Api) -> None:
    body = json.dumps(BODY).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nContent-Type: {JSON}\r\n".encode()
    expected = api.ok(GENERATE, BODY)["choices"]
    length = f"Content-Length: {len(body)}\r\n\r\n".encode()
    chunked = f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    expect = b"Expect: 100-continue\r\n"
    for raw, continuation in (
        (head + OFFER + length + body, b""),
        (head + OFFER + chunked, b""),
        (head + expect + OFFER + length, body),
    ):
        status, reply = exchange(api, raw, continuation)
        assert status == 200 and json.loads(reply)["choices"] == expected
    status, _ = exchange(api, b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\x00: 1\r\n\r\n",
        b"POST /ping HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_the_one_shape(api: Api, raw: bytes) -> None:
    status, reply = exchange(api, raw)
    assert status == 400 and json.loads(reply)["error"]["code"] == "invalid_http"


def test_headers_have_a_limit(api: Api) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: a\r\n"
    status, _ = exchange(api, head + b"X: " + b"a" * 60_000 + b"\r\n\r\n")
    assert status == 200
    for raw in (b"X: " + b"a" * 65_600, b"X: a\r\n" * 11_000, b"X" * 65_600):  # hardly more: all of it is taken
        status, reply = exchange(api, head + raw)
        assert status == 431 and json.loads(reply)["error"]["code"] == "head_too_large"


def test_trailers_are_no_headers(api: Api) -> None:
    raw = json.dumps(BODY).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{len(raw):x}\r\n".encode()
    status, reply = exchange(api, head + raw + b"\r\n0\r\nX-Request-Id: late\r\n\r\n")
    assert status == 200 and "late" not in json.loads(reply)["request_id"]


def test_a_chunked_body(api: Api) -> None:
    raw = json.dumps(BODY).encode()
    answer = api.post(GENERATE, content=(raw[i : i + 7] for i in range(0, len(raw), 7)), headers={"Content-Type": JSON})
    assert answer.status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"])
def test_a_wrong_method_is_405_with_the_allowed_ones(api: Api, post: str, method: str) -> None:
    answer = api.http.request(method, post)
    assert answer.headers["allow"] == "POST"
    if method == "HEAD":
        assert answer.status_code == 405 and not answer.content
    else:
        api.refused(answer, 405, None, "POST")


@pytest.mark.parametrize("path", [path for path in GETS if path != "/ping"])
def test_observing_takes_get_and_head(api: Api, path: str) -> None:
    assert api.get(path).status_code == api.http.head(path).status_code == 200
    assert not api.http.head(path).content
    api.refused(api.post(path, {}), 405, None, "GET")


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/nope", "/inference/v1", "/..%2fetc", "/%00", "/x" * 999])
def test_an_unknown_route_is_404(api: Api, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        error = api.refused(api.http.request(method, path), 404, None)
        assert error["code"] == "unknown_route" and len(error["message"]) < 300


def test_a_slash_at_the_end_of_a_route_is_ignored(api: Api) -> None:
    assert api.http.post(GENERATE + "/", json=BODY, follow_redirects=False).status_code == 200


# health and observation


def test_health(api: Api) -> None:
    for path in ("/health", "/health?deep=1", "/ping"):
        assert api.get(path).status_code == 200
    assert api.post("/ping").status_code == 200


def test_version_and_load(api: Api) -> None:
    assert set(api.get("/version").json()) == {"version"}
    assert {"server_load", "running", "waiting"} <= set(api.get("/load").json())


def test_models_have_their_context_length(api: Api) -> None:
    reply = api.get("/v1/models").json()
    assert reply["object"] == "list"
    for model in reply["data"]:
        assert model["object"] == "model" and model["max_model_len"] == api.max_model_len
        assert api.get("/v1/models/" + model["id"]).json() == model
    api.refused(api.get("/v1/models/gpt-9"), 404, "model")


@pytest.mark.parametrize(
    "name",
    [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "request_params_n_bucket",
        "request_params_max_tokens_bucket",
    ],
)
def test_metrics_have_the_known_names(api: Api, name: str) -> None:
    assert api.metric(name) >= 0


def test_metrics_count_tokens(api: Api) -> None:
    before = api.metric("generation_tokens_total")
    used = api.generate({"ignore_eos": True})["usage"]["completion_tokens"]
    assert api.metric("generation_tokens_total") == before + used


def test_openapi_describes_every_route(api: Api) -> None:
    assert {*POSTS, "/health", "/v1/models"} <= set(api.get("/openapi.json").json()["paths"])


# security


def test_no_secret_and_no_path_in_an_error(api: Api) -> None:
    assert not isinstance(api.config["server"]["api_key"], list)
    for body in ({"token_ids": PROMPT, "sampling_params": {"n": 10**9}}, {"token_ids": "../../etc/passwd"}):
        assert "Traceback" not in api.post(GENERATE, body).text and ".py" not in api.post(GENERATE, body).text


def test_cors_is_off(api: Api) -> None:
    answer = api.get("/version", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_template_in_a_request_is_not_run(text: Api) -> None:
    if text.config["server"].get("trust_request_chat_template"):
        pytest.skip("the operator trusts them")
    for template in ("{{ 'x' * 10**10 }}", "{% for i in range(99999) %}{% endfor %}", "{{ messages"):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template": template}
        text.refused(text.post(CHAT, body), 400, "chat_template", "--trust-request-chat-template")
        text.refused(text.post(TOKENIZE, body), 400, "chat_template")
