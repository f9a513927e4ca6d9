"""Refusals: their status and field, before any output; and garbage."""

import asyncio
import gzip
import json
import random
from typing import Any

import httpx
import msgspec
import pytest

from tests.route_table import CONTROL
from tests.server.byte_tokenizer import VOCAB
from tests.server.site import Caller, Site, site
from tokserve.base.errors import Conflict, QueueFull
from tokserve.features.observe.observers import metrics_of
from tokserve.protocol.params import SamplingParams
from tokserve.server.tokens.generate_body import GenerateBody

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
PROMPT = {"token_ids": [5, 6]}
MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
TEXT = {"prompt": "x"}


@pytest.fixture(scope="module")
def server() -> Site:
    return site()


def refused(answer: Any, status: int, param: str | None, message: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert error["param"] == param, error
    assert message in error["message"], error
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "token_ids", "required"),
        ({"token_ids": []}, "token_ids", "empty"),
        ({"token_ids": None}, "token_ids", "required"),
        ({"token_ids": [5, -1]}, "token_ids", "token_ids[1] is"),
        ({"token_ids": [5, VOCAB]}, "token_ids", "token_ids[1] is"),
        ({"token_ids": [5, 10**12]}, "token_ids", "token_ids[1] is"),
        ({"token_ids_b64": "BQAAAP////8="}, "token_ids_b64", "token_ids_b64[1] is -1"),
        ({"token_ids": [1] * 512}, "token_ids", "512 tokens (max_model_len)"),
        ({"token_ids": [5, "6"]}, "token_ids[1]", "int"),
        ({"token_ids": [5, 6.5]}, "token_ids[1]", "int"),
        ({"token_ids": [True]}, "token_ids[0]", "int"),
        ({"token_ids": "BQAAAA=="}, "token_ids", "array"),
        ({"token_ids_b64": "BQAA"}, "token_ids_b64", "int32"),
        ({"token_ids_b64": "%%%"}, "token_ids_b64", ""),
        ({"token_ids_b64": ""}, "token_ids_b64", "empty"),
        (PROMPT | {"token_ids_b64": "BQAAAA=="}, "token_ids_b64", "not both"),
        (PROMPT | {"token_idz": 1}, "token_idz", "did you mean 'token_ids'"),
        ({"prompt": "hello"}, "prompt", "this route takes token_ids; text goes to /v1/completions"),
        ({"messages": []}, "messages", "this route takes token_ids; text goes to /v1/chat/completions"),
        (PROMPT | {"temperature": 1}, "temperature", "did you mean 'sampling_params.temperature'"),
        (PROMPT | {"include_usage": True}, "include_usage", "did you mean 'stream_options.include_usage'"),
        (PROMPT | {"request_id": "a\nb"}, "request_id", "printable"),
        (PROMPT | {"request_id": "ä"}, "request_id", "ASCII"),
        (PROMPT | {"request_id": "x" * 300}, "request_id", ""),
        (PROMPT | {"output_mode": "speech"}, "output_mode", ""),
        (PROMPT | {"logprobs_format": "xml"}, "logprobs_format", ""),
        (PROMPT | {"cache_salt": ""}, "cache_salt", "1 to 1024"),
        (PROMPT | {"cache_salt": "s" * 1025}, "cache_salt", "1 to 1024"),
        (PROMPT | {"deadline_ms": 0}, "deadline_ms", ""),
        (PROMPT | {"deadline_ms": 10**30}, "deadline_ms", ""),
        (PROMPT | {"queue_timeout_ms": -5}, "queue_timeout_ms", ""),
        (PROMPT | {"group_id": ""}, "group_id", ""),
        (PROMPT | {"features": {"mm": []}}, "features", "this model takes no images"),
        (PROMPT | {"content_parts": []}, "content_parts", "this model takes no images"),
        (PROMPT | {"content_parts": [{"type": "image_url", "url": "data:"}]}, "content_parts[0].url", "no images"),
        (PROMPT | {"kv_transfer_params": {}}, "kv_transfer_params", "not supported without --kv-transfer-config"),
    ],
)
def test_generate_refuses(server: Site, body: dict[str, Any], param: str, message: str, stream: bool) -> None:
    answer = server.post(GENERATE, body | {"stream": stream})
    assert answer.headers["content-type"] == "application/json"
    refused(answer, 400, param, message)


@pytest.mark.parametrize(
    ("params", "name", "message"),
    [
        ({"temperature": -1}, "temperature", "sampling_params.temperature must be a finite number of at least 0"),
        ({"stop_token_ids": [5, 9999]}, "stop_token_ids[1]", "0 to"),
        ({"extra_args": {"a": 10**30}}, "extra_args", "64 bits"),
        ({"temperature": "1"}, "temperature", "float"),
        ({"n": 1025}, "n", "at most 1024"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "int"),
        ({"no_such_name": None}, "no_such_name", "unknown"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"top_k": 10**20}, "top_k", "32 bits"),
        ({"min_p": 1.5}, "min_p", ""),
        ({"seed": 2**63}, "seed", "64"),
        ({"presence_penalty": 3}, "presence_penalty", ""),
        ({"frequency_penalty": -3}, "frequency_penalty", ""),
        ({"repetition_penalty": 0}, "repetition_penalty", ""),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 2.0}, "max_tokens", "float"),
        ({"max_tokens": "2"}, "max_tokens", "str"),
        ({"ignore_eos": 1}, "ignore_eos", "int"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "max_tokens"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 10**9}, "n", "at most"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": -2}, "logprobs", "-1"),
        ({"prompt_logprobs": 10**12}, "prompt_logprobs", ""),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids", "128"),
        ({"logprobs_mode": "fancy"}, "logprobs_mode", ""),
        ({"logit_bias": {"a": 1}}, "logit_bias", ""),
        ({"logit_bias": {"5": "x"}}, "logit_bias[...]", ""),
        ({"stop_token_ids": ["x"]}, "stop_token_ids[0]", ""),
        ({"stop": [""]}, "stop", "empty"),
        ({"topp": 0.5}, "topp", "did you mean 'top_p'"),
        ({"output_kind": 2, "topp": 0.5}, "topp", "did you mean 'top_p'"),
        ({"output_kind": 2, "top_p": "x"}, "top_p", "float"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"guided_decoding": {"json": {}}}, "guided_decoding", "not supported"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"best_of": True}, "best_of", "not supported"),
        ({"repetition_detection": 5}, "repetition_detection", "object"),
        ({"repetition_detection": {"max_size": 5}}, "repetition_detection.max_size", "did you mean"),
        ({"repetition_detection": {"max_pattern_size": 5}}, "repetition_detection.min_count", "at least 2"),
        ({"repetition_detection": {"min_count": 2**70}}, "repetition_detection.min_count", "32 bits"),
    ],
)
def test_sampling_params_are_refused_by_their_path(server: Site, params: Any, name: str, message: str) -> None:
    refused(server.post(GENERATE, PROMPT | {"sampling_params": params}), 400, f"sampling_params.{name}", message)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"max_pattern_size": 5}, ".min_count"),
        ({"max_size": 5}, ".max_size"),
        (5, ""),
        ({"min_count": "x"}, ".min_count"),
    ],
)
def test_repetition_detection_of_a_text(server: Site, route: str, value: Any, name: str) -> None:
    refused(server.post(route, MESSAGES | TEXT | {"repetition_detection": value}), 400, f"repetition_detection{name}")


@pytest.mark.parametrize("route", [GENERATE, CHAT, COMPLETIONS, "/tokenize", "/abort_requests"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "x"])
def test_an_encoded_body_is_refused_as_that(server: Site, route: str, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    error = refused(server.post(route, content=gzip.compress(b"{}"), headers=headers), 415, None, encoding)
    assert error["code"] == "content_encoding"


def test_an_encoded_or_unknown_body_is_told_what_is_read(server: Site) -> None:
    """serving-faults F16; RFC 9110, 15.5.16."""
    answer = server.post(CHAT, content=b"{}", headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    answer = server.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.headers["accept"]) == (415, "application/json, application/msgpack")


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_byte_order_mark_before_json_is_skipped(server: Site, size: int) -> None:
    """serving-faults F16."""
    content = b"\xef\xbb\xbf" + json.dumps(PROMPT).encode() + b" " * size
    headers = {"Content-Type": "application/json"}
    assert server.post(GENERATE, content=content, headers=headers).status_code == 200
    error = refused(server.post(GENERATE, content=b"\xef\xbb\xbf{", headers=headers), 400, None, "JSON")
    assert error["code"] == "invalid_body"


def test_the_identity_encoding_is_accepted(server: Site) -> None:
    assert server.post(GENERATE, PROMPT, headers={"Content-Encoding": "Identity"}).status_code == 200


@pytest.mark.parametrize("packed", [False, True])
def test_null_is_the_default_of_every_field(server: Site, packed: bool) -> None:
    params = dict.fromkeys(SamplingParams.__struct_fields__) | {"max_tokens": 2}
    names = set(GenerateBody.__struct_fields__) - {"token_ids"}
    for body in (dict.fromkeys(names), {"sampling_params": params}, {"sampling_params": params | {"output_kind": 2}}):
        if packed:
            raw = msgspec.msgpack.encode(PROMPT | body)
            answer = server.post(GENERATE, content=raw, headers={"Content-Type": "application/msgpack"})
        else:
            answer = server.post(GENERATE, PROMPT | body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("number", ["1e400", "-1e400"])
def test_numbers_that_no_float_holds(server: Site, number: str) -> None:
    raw = '{"token_ids": [5], "sampling_params": {"temperature": ' + number + "}}"
    headers = {"Content-Type": "application/json"}
    refused(server.post(GENERATE, content=raw, headers=headers), 400, "sampling_params.temperature", "out of range")
    raw = '{"messages": [{"role": "user", "content": "x"}], "temperature": ' + number + "}"
    error = refused(server.post(CHAT, content=raw, headers=headers), 400, "temperature", "out of range")
    assert error["code"] == "invalid_body" and "$" not in error["message"]


@pytest.mark.parametrize(("field", "value"), [("best_of", True), ("best_of", 1.0), ("best_of", 2), ("suffix", [])])
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(server: Site, field: str, value: Any) -> None:
    assert refused(server.post(COMPLETIONS, TEXT | {field: value}), 400, field)["code"] == "unsupported"


def test_fields_that_ask_for_nothing(server: Site) -> None:
    nothing = {"best_of": 1, "use_beam_search": False, "suffix": "", "length_penalty": 1.0, "logits_processors": []}
    assert server.post(COMPLETIONS, TEXT | nothing).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", "x", "logprobs: input should be a valid boolean or a valid integer"),
        ("stop", 5, "stop: input should be a valid string or a valid list"),
        ("stream_options", 5, "stream_options: input should be a valid object"),
        ("logit_bias", [1], "logit_bias: input should be a valid object"),
    ],
)
def test_a_wrong_type_is_refused_with_all_accepted_types(server: Site, field: str, value: Any, message: str) -> None:
    assert refused(server.post(COMPLETIONS, TEXT | {field: value}), 400, field)["message"] == message


@pytest.mark.parametrize("key", ["05", "00", "-1", "5.0", " 5", "1e1", "", "x", "\u0665"])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_keys_of_a_bias_are_ids_as_json_writes_numbers(server: Site, route: str, key: str) -> None:
    refused(server.post(route, MESSAGES | TEXT | {"logit_bias": {key: 1}}), 400, "logit_bias", "keys")


@pytest.mark.parametrize("route", [GENERATE, CHAT, COMPLETIONS])
def test_a_refusal_carries_the_id_that_the_body_gave(route: str) -> None:
    server = site(scheduling_policy="fcfs")
    body = {GENERATE: PROMPT, CHAT: MESSAGES, COMPLETIONS: TEXT}[route]
    answer = server.post(route, body | {"request_id": "mine", "priority": 5})
    refused(answer, 400, "priority", "--scheduling-policy fcfs")
    assert answer.headers["x-request-id"] == "mine"
    assert "x-request-id" not in server.post(route, body | {"priority": 5}).headers


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (PROMPT | {"sampling_params": {"stop": "x"}}, "sampling_params.stop", "tokens-only"),
        (PROMPT | {"sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words", "tokens-only"),
        (PROMPT | {"output_mode": "text"}, "output_mode", "tokens-only"),
    ],
)
def test_text_on_a_tokens_only_server(body: Any, param: str, message: str) -> None:
    refused(site(tokens_only=True).post(GENERATE, body), 400, param, message)


TEXT_ROUTES = [CHAT, "/v1/responses", "/tokenize", "/detokenize", "/v1/chat/completions/tokens"]


@pytest.mark.parametrize("route", TEXT_ROUTES)
def test_text_routes_of_a_tokens_only_server_are_404_with_the_reason(route: str) -> None:
    refused(site(tokens_only=True).post(route, {"messages": []}), 404, None, "tokens-only")


@pytest.mark.parametrize("route", [GENERATE, CHAT, "/abort_requests"])
def test_a_web_page_needs_a_content_type_that_browsers_ask_about(server: Site, route: str) -> None:
    refused(server.post(route, content=b"{}", headers={"Origin": "http://evil.example"}), 415, None, "Content-Type")
    headers = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    assert "Content-Type" not in server.post(route, content=b"{}", headers=headers).text


def test_a_stream_in_msgpack(server: Site) -> None:
    for route, body in ((GENERATE, PROMPT), (CHAT, MESSAGES), (COMPLETIONS, TEXT)):
        answer = server.post(route, body | {"stream": True}, headers={"Accept": "application/msgpack"})
        refused(answer, 400, "stream", "msgpack")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b'{"token_ids": [1,', "truncated"),
        (b'{"token_ids": [1,}', "byte 17"),
        (b'{"token_ids": [1]} x', "byte 20"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b'{"extra": ' + b"[" * 100_000, "nested"),
        (b'{"features": ' + b"[" * 100_000, "nested"),
    ],
)
def test_malformed_json_is_refused_with_its_position(server: Site, raw: bytes, message: str) -> None:
    for route in (GENERATE, CHAT):
        if route == GENERATE and b"extra" in raw:
            continue  # the unknown field is told first
        answer = server.post(route, content=raw, headers={"Content-Type": "application/json"})
        assert refused(answer, 400, None, message)["code"] == "invalid_body"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("NaN", "NaN is not valid JSON"),
        ("-Infinity", "-Infinity is not valid JSON"),
        ("-1e999", "-1e999 is out of range"),
        ('"\\ud800"', "half of a surrogate pair"),
        ('{"\\udfff": 1}', "half of a surrogate pair"),
    ],
)
def test_what_json_does_not_have_is_named(server: Site, value: str, message: str) -> None:
    """Values that Python's json module writes, where each route would take any type."""
    bodies = {
        (GENERATE, "sampling_params.extra_args.a[1]"): f'{{"a": [0, {value}]}}',
        (CHAT, "chat_template_kwargs.a[1]"): f'{{"a": [0, {value}]}}',
    }
    for (route, path), part in bodies.items():
        names = path.removesuffix(".a[1]").split(".")
        opened = "".join(f'{{"{name}": ' for name in names)
        content = opened + part + "}" * len(names)
        answer = server.post(route, content=content, headers={"Content-Type": "application/json"})
        assert refused(answer, 400, path, message)["code"] == "invalid_body"


@pytest.mark.parametrize("raw", [b"[]", b"5", b"null", b'"x"'])
def test_a_body_that_is_no_object(server: Site, raw: bytes) -> None:
    for route in (GENERATE, CHAT, COMPLETIONS, "/abort_requests", "/tokenize"):
        refused(server.post(route, content=raw, headers={"Content-Type": "application/json"}), 400, None, "body")


def test_a_large_body_is_refused_by_its_content_length() -> None:
    s = site(max_body_mb=1)
    answer = s.post(GENERATE, content=b"x" * ((1 << 20) + 1), headers={"Content-Type": "application/json"})
    refused(answer, 413, None, "1 MiB")
    content = json.dumps(PROMPT).ljust(1 << 20)
    assert s.post(GENERATE, content=content, headers={"Content-Type": "application/json"}).status_code == 200


def test_large_body_without_a_length_is_not_read_to_its_end() -> None:
    async def scene() -> Caller:
        caller = Caller(site(max_body_mb=1), GENERATE, b"x" * (8 << 20), chunks=64)
        await caller.task
        return caller

    caller = asyncio.run(scene())
    assert caller.status == 413 and caller.read <= (1 << 20) + (8 << 20) // 64


def test_an_unexpected_error_is_500_without_its_text(
    server: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("/secret/path")

    monkeypatch.setattr(server.llm, "prepare", broken)
    answer = server.post(GENERATE, PROMPT)
    assert refused(answer, 500, None)["message"] == "internal error"
    assert "/secret/path" in caplog.text
    assert not metrics_of(server.app.state.serving).inflight


NAMES = [
    "token_ids",
    "sampling_params",
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "stop",
    "logprobs",
    "n",
    "request_ids",
    "group_id",
    "all",
    "tokens",
    "stream",
    "echo",
    "logit_bias",
    "tools",
    "response_format",
    "stream_options",
    "prompt_logprobs",
    "input",
    "include",
    "text",
    "reasoning",
    "system",
    "thinking",
    "tool_choice",
    "output_config",
    "stop_sequences",
    "seed",
    "cache_salt",
    "priority",
    "model",
    "chat_template",
]
ATOMS = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    1.5,
    -1e308,
    "",
    "x",
    "\u0000",
    "ä" * 50,
    [],
    {},
    [None],
    [[]],
    [[[]]],
    {"": {}},
    [1, "a"],
    [-1],
    {"a": [{}]},
    [{"role": 5}],
    [{"role": "user", "content": [{}]}],
]


def garbage(rng: random.Random) -> bytes:
    """A body that is wrong: the atoms are, in every field, or the bytes are cut or changed."""
    body = {name: rng.choice(ATOMS) for name in rng.sample(NAMES, rng.randrange(1, 7))}
    raw = json.dumps(body).encode()
    match rng.randrange(4):
        case 0:
            return raw[: rng.randrange(len(raw))]
        case 1:
            place = rng.randrange(len(raw))
            return raw[:place] + rng.randbytes(rng.randrange(1, 4)) + raw[place + 1 :]
        case _:
            return raw


def test_garbage_is_a_client_error() -> None:
    s = site()
    routes = [r.path for r in s.app.routes if "POST" in r.methods and r.path not in {"/ping"} | CONTROL]
    assert len(routes) >= 8
    rng = random.Random(0)
    named = 0

    async def scene() -> None:
        nonlocal named
        async with s.client() as client:
            for i in range(600):
                route, packed, raw = routes[i % len(routes)], i % 7 == 0, garbage(rng)
                if packed and is_json(raw):
                    raw = msgspec.msgpack.encode(json.loads(raw))
                headers = {"Content-Type": "application/msgpack" if packed else "application/json"}
                answer = await client.post(route, content=raw, headers=headers)
                if answer.status_code == 200 and may_succeed(route, raw, packed):
                    continue
                assert 400 <= answer.status_code < 500, (route, raw, answer.text)
                named += error_of(answer).get("param") is not None

    asyncio.run(scene())
    assert named > 150
    assert not metrics_of(s.app.state.serving).inflight and not s.llm.num_inflight


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error in an answer, which has the shape of its route."""
    body = answer.json()
    fields = {"message", "type"} if is_anthropics(answer.url.path) else {"message", "type", "param", "code"}
    assert set(body) == ({"error", "type"} if is_anthropics(answer.url.path) else {"error"}), answer.text
    assert set(body["error"]) - {"details"} == fields and body["error"]["message"], answer.text
    error: dict[str, Any] = body["error"]
    return error


def is_anthropics(path: str) -> bool:
    return path.startswith("/v1/messages")


def is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def may_succeed(route: str, raw: bytes, packed: bool) -> bool:
    """Garbage that asks for something all the same: not of the strict routes, and with what the route needs."""
    body = msgspec.msgpack.decode(raw) if packed else json.loads(raw)
    ids = ("request_ids", "group_id", "all")
    needed = {
        "/inference/v1/abort_requests": ids,
        "/abort_requests": ids,
        COMPLETIONS: ("prompt",),
        "/tokenize": ("prompt",),
        "/detokenize": ("tokens",),
        "/v1/chat/completions/tokens": ("tokens",),
        "/v1/responses": ("input",),
    }
    return any(name in body for name in needed.get(route, ()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [(GENERATE, PROMPT), (CHAT, MESSAGES), (COMPLETIONS, {"prompt": ["a", "b"], "n": 2})],
)
def test_what_the_engine_does_not_accept_is_refused_before_a_200(path: str, body: dict[str, Any], stream: bool) -> None:
    s = site()
    s.llm.refuse = QueueFull("the queue is full", retry_after=7, code="queue_full")
    answer = s.post(path, body | {"stream": stream}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json() == {
        "error": {"message": "the queue is full", "type": "overloaded_error", "param": None, "code": "queue_full"}
    }
    assert not s.llm.num_inflight and not metrics_of(s.app.state.serving).inflight
    shown = s.get("/metrics").text
    assert 'tokserve:request_refusals_total{engine="0",model_name="tiny",reason="queue_full"} 1.0' in shown
    assert 'tokserve:request_refusals_total{engine="0",model_name="tiny",reason="duplicate_id"} 0.0' in shown
    assert 'tokserve:request_params_n_sum{engine="0",model_name="tiny"} 0.0' in shown
    assert 'tokserve:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 0.0' in shown
    s.llm.refuse = None
    assert s.post(path, body).status_code == 200


def test_an_id_in_use_elsewhere_is_a_409_and_counted() -> None:
    s = site()
    s.llm.refuse = Conflict("request_id 'mine' is in use", field="request_id", code="duplicate_id")
    assert refused(s.post(GENERATE, PROMPT | {"request_id": "mine"}), 409, "request_id")
    s.llm.refuse = None
    s.app.state.draining = True
    assert refused(s.post(GENERATE, PROMPT), 503, None)
    shown = s.get("/metrics").text
    for reason in ("duplicate_id", "draining"):
        assert f'tokserve:request_refusals_total{{engine="0",model_name="tiny",reason="{reason}"}} 1.0' in shown
