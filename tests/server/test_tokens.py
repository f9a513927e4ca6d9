"""/inference/v1/generate: the reply clause by clause, in all formats."""

import asyncio
import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.replies import good
from tests.server.byte_tokenizer import TOKENIZER, ids
from tests.server.scripted_llm import NOWHERE, endless, says
from tests.server.site import Caller, Site, site
from tokserve.client.outputs import ChoiceOutput
from tokserve.server.replies.reply_fields import last_version

GENERATE = "/inference/v1/generate"
PROMPT = [5, 6, 8]
MSGPACK = "application/msgpack"


def body(prompt: list[int] | None = None, **params: Any) -> dict[str, Any]:
    return {"token_ids": prompt or PROMPT, "sampling_params": {"max_tokens": 4} | params}


def generate(s: Site, prompt: list[int] | None = None, fields: dict[str, Any] | None = None, **params: Any) -> Any:
    return good(s.post(GENERATE, body(prompt, **params) | (fields or {})))


def test_reply_has_the_whole_shape() -> None:
    s = site()
    reply = generate(s, seed=9)
    assert reply["request_id"] == reply["id"] and reply["id"].startswith("generate-tokens-")
    assert reply["object"] == "inference.generate" and reply["model"] == "tiny" and reply["created"] > 1_700_000_000
    assert reply["seed"] == 9 and reply["exact"] is True
    assert reply["prompt_logprobs"] is None and reply["kv_transfer_params"] is None
    assert "prompt_token_ids" not in reply
    assert reply["choices"] == [
        {
            "index": 0,
            "token_ids": endless(PROMPT, 0)[:4],
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
            "weight_versions": [{"version": "0", "start": 0, "end": 4}],
            "stop_detail": {"kind": "max_tokens"},
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_nothing_but_token_ids_is_required() -> None:
    s = site(says("ab"))
    assert s.post(GENERATE, {"token_ids": PROMPT}).status_code == 200
    assert s.llm.calls[0].params.max_tokens is None and s.llm.calls[0].params.temperature == 1.0


def test_generation_config_is_not_applied_here(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    s = site(generation_config=str(tmp_path))
    generate(s)
    assert s.llm.calls[0].params.temperature == 1.0 and s.llm.calls[0].params.top_k == 0


def test_choices_are_ordered_and_counted() -> None:
    reply = generate(site(), n=3)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert [c["token_ids"] for c in reply["choices"]] == [endless(PROMPT, i)[:4] for i in range(3)]
    assert reply["usage"]["prompt_tokens"] == 3 and reply["usage"]["completion_tokens"] == 12


def test_output_mode_text_adds_text() -> None:
    s, fields = site(says("hello")), {"output_mode": "text"}
    choice = generate(s, fields=fields, max_tokens=9, logprobs=1)["choices"][0]
    assert choice["text"] == "hello" and choice["token_ids"] == [*ids("hello"), 0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]][:5] == list("hello")


def test_cached_tokens_are_reported() -> None:
    s = site(enable_prefix_caching=True, block_size=1)
    assert generate(s, n=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}  # what the first choice computes
    assert generate(s)["usage"]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT) - 1}


def test_scheduling_fields_reach_the_engine() -> None:
    s = site()
    fields = {"cache_salt": "3", "priority": -(2**63), "deadline_ms": 500, "queue_timeout_ms": 100}
    generate(s, fields=fields)
    options = s.llm.calls[0].options
    assert {name: options[name] for name in fields} == fields


@pytest.mark.parametrize("stream", [False, True])
def test_without_stream_the_output_is_one_delta(stream: bool) -> None:
    s = site()
    s.post(GENERATE, body() | {"stream": stream})
    assert s.llm.calls[0].options["stream"] is stream and s.llm.calls[0].options["text"] is False


# logprobs


def test_logprobs_objects_have_an_entry_per_token_with_both_key_sets() -> None:
    reply = generate(site(), logprobs=2)
    tokens, content = reply["choices"][0]["token_ids"], reply["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == tokens
    for entry in content:
        assert list(entry) == ["token", "token_id", "logprob", "rank", "bytes", "top_logprobs"]
        assert entry["token"] == f"token_id:{entry['token_id']}" and entry["bytes"] is None
        first, *others = entry["top_logprobs"]
        assert (first["token_id"], first["logprob"], first["rank"]) == (
            entry["token_id"],
            entry["logprob"],
            entry["rank"],
        )
        assert len({other["token_id"] for other in entry["top_logprobs"]}) == len(entry["top_logprobs"])
        assert [other["rank"] for other in others] == ([2] if entry["rank"] == 1 else [1, 2])


def test_logprob_token_ids_alone() -> None:
    for entry in generate(site(), logprob_token_ids=[200, 201])["choices"][0]["logprobs"]["content"]:
        assert [(t["token_id"], t["rank"]) for t in entry["top_logprobs"][1:]] == [(200, None), (201, None)]


def test_minus_infinity_is_minus_9999_in_json() -> None:
    s = site(lambda prompt, index: [NOWHERE, 8, 8, 8])
    for form in ("objects", "arrays"):
        actual = generate(s, fields={"logprobs_format": form}, logprobs=0)["choices"][0]["logprobs"]
        first = actual["content"][0]["logprob"] if form == "objects" else actual["token_logprobs"][0]
        assert first == -9999.0


def test_logprobs_arrays() -> None:
    actual = generate(site(), fields={"logprobs_format": "arrays"}, logprobs=2)["choices"][0]
    columns = actual["logprobs"]
    assert list(columns) == ["token_logprobs", "ranks", "top_token_ids", "top_logprobs", "mode"]
    assert columns["mode"] == "raw" and len(columns["token_logprobs"]) == len(columns["ranks"]) == 4
    assert np.array(columns["top_token_ids"]).shape == np.array(columns["top_logprobs"]).shape == (4, 2)
    assert columns["ranks"] == [1 if token % 2 == 0 else 3 for token in actual["token_ids"]]


def test_logprobs_base64_are_the_same_arrays() -> None:
    s = site(lambda prompt, index: [NOWHERE, *endless(prompt, index)])
    lists, packed = (
        generate(s, fields={"logprobs_format": form}, logprobs=2)["choices"][0]["logprobs"]
        for form in ("arrays", "base64")
    )
    assert packed["shape"] == [4, 2] and packed["mode"] == "raw"
    logprobs = np.frombuffer(base64.b64decode(packed["token_logprobs"]), "<f4")
    assert logprobs[0] == -np.inf and logprobs[1:].tolist() == lists["token_logprobs"][1:]
    assert np.frombuffer(base64.b64decode(packed["ranks"]), "<i4").tolist() == lists["ranks"]
    for name, kind in (("top_token_ids", "<i4"), ("top_logprobs", "<f4")):
        assert np.frombuffer(base64.b64decode(packed[name]), kind).reshape(4, 2).tolist() == lists[name]


def test_prompt_logprobs_objects() -> None:
    scores = generate(site(), [5, 6, 9], prompt_logprobs=2)["prompt_logprobs"]
    assert scores[0] is None and len(scores) == 3
    assert list(scores[1]) == ["6", "18"] and list(scores[2]) == ["9", "20", "21"]
    assert scores[2]["9"] == {"logprob": -0.375, "rank": 3, "decoded_token": None}
    assert scores[2]["21"] == {"logprob": -0.25, "rank": 2, "decoded_token": None}


def test_prompt_logprobs_decode_tokens_in_text_mode() -> None:
    scores = generate(site(), ids("ab"), {"output_mode": "text"}, prompt_logprobs=0)["prompt_logprobs"]
    assert scores[1][str(ids("b")[0])]["decoded_token"] == "b"


@pytest.mark.parametrize(("body", "mode"), [({}, "raw"), ({"logprobs_mode": "processed_logprobs"}, "processed")])
def test_columns_without_rows_name_their_mode(body: dict[str, Any], mode: str) -> None:
    fields = {"logprobs_format": "arrays"}
    assert generate(site(), [5], fields, prompt_logprobs=1, **body)["prompt_logprobs"]["mode"] == mode


# packed ids and msgpack


@pytest.mark.parametrize("prompt", [PROMPT, np.array(PROMPT, "<i4").tobytes()])
def test_msgpack_request(prompt: Any) -> None:
    s = site()
    raw = msgspec.msgpack.encode({"token_ids": prompt, "sampling_params": {"max_tokens": 2, "logit_bias": {5: 1.0}}})
    answer = s.post(GENERATE, content=raw, headers={"Content-Type": MSGPACK})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert s.llm.calls[0].prompt == PROMPT and s.llm.calls[0].params.logit_bias == {5: 1.0}


def test_base64_is_base64_in_msgpack_too() -> None:
    s = site()
    good = base64.b64encode(np.array(PROMPT, "<i4").tobytes()).decode()
    for text, status in ((good, 200), (good[:4] + "%" + good[4:], 400), ("%%%", 400)):
        raw = msgspec.msgpack.encode({"token_ids_b64": text, "sampling_params": {"max_tokens": 2}})
        answer = s.post(GENERATE, content=raw, headers={"Content-Type": MSGPACK})
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "token_ids_b64" and s.llm.calls[0].prompt == PROMPT


def test_msgpack_reply_has_byte_strings_for_ids_and_arrays() -> None:
    fields = {"logprobs_format": "arrays", "return_token_ids": True}
    answer = site().post(GENERATE, body(logprobs=1, prompt_logprobs=1) | fields, headers={"Accept": MSGPACK})
    assert answer.headers["content-type"] == MSGPACK
    reply = msgspec.msgpack.decode(answer.content)
    choice = reply["choices"][0]
    assert np.frombuffer(choice["token_ids"], "<i4").tolist() == endless(PROMPT, 0)[:4]
    assert np.frombuffer(reply["prompt_token_ids"], "<i4").tolist() == PROMPT
    assert np.frombuffer(choice["logprobs"]["token_logprobs"], "<f4").shape == (4,)
    assert choice["logprobs"]["shape"] == [4, 1] and reply["prompt_logprobs"]["shape"] == [2, 1]


@pytest.mark.parametrize(
    ("accept", "packed"),
    [
        (MSGPACK, True),
        ("application/x-msgpack", True),
        (f"application/json, {MSGPACK}", True),
        (f"text/html;q=0.9, {MSGPACK};q=0.8", True),
        (f"application/json;q=0.9, {MSGPACK};q=0.8", False),
        (f"application/json;q=0.8;x=1, {MSGPACK}; q=0.9", True),
        (f"{MSGPACK};q=0", False),
        ("application/json", False),
        ("*/*", False),
        (f"{MSGPACK};q=much", True),
    ],
)
def test_accept_selects_json_or_msgpack(accept: str, packed: bool) -> None:
    answer = site().post(GENERATE, body(), headers={"Accept": accept})
    assert answer.headers["content-type"] == (MSGPACK if packed else "application/json")


def test_msgpack_reply_with_objects_equals_json() -> None:
    s = site()
    request = body(logprobs=2, prompt_logprobs=1, seed=1)
    plain = s.post(GENERATE, request).json()
    packed = msgspec.msgpack.decode(s.post(GENERATE, request, headers={"Accept": MSGPACK}).content)
    assert packed["choices"][0]["logprobs"] == plain["choices"][0]["logprobs"]
    assert packed["prompt_logprobs"] == plain["prompt_logprobs"]


# ids of requests


def test_made_up_ids_differ() -> None:
    s = site()
    answers = [s.post(GENERATE, body()) for _ in range(2)]
    assert answers[0].headers["x-request-id"] != answers[1].headers["x-request-id"]
    assert all(a.json()["id"] == "generate-tokens-" + a.headers["x-request-id"] for a in answers)


# what clients send out of habit


@pytest.mark.parametrize(
    "habit",
    [
        {"output_kind": 2},
        {"flat_logprobs": True},
        {"skip_clone": True},
        {"skip_reading_prefix_cache": True},
        {"routed_experts_prompt_start": 0},
        {"structured_outputs": None},
        {"repetition_detection": None},
        {"guided_decoding": None, "truncate_prompt_tokens": None, "best_of": None, "early_stopping": None},
        {"truncate_prompt_tokens": -1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0},
        {"repetition_detection": {}},
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
        {"stop": None},
        {"stop_token_ids": None},
        {"bad_words": None},
        {"logit_bias": None},
        {"seed": None},
        {"max_tokens": None, "ignore_eos": False},
        {"prompt_logprobs": False},
        {"prompt_logprobs": True},
        {"extra_args": {"anything": [1]}},
        {"top_k": -1},
        {"top_k": 0},
    ],
)
def test_harmless_sampling_params_are_taken(habit: dict[str, Any]) -> None:
    s = site(says("ab"))
    generate(s, **habit, top_p=0.5, logit_bias={"5": 1}) if "logit_bias" not in habit else generate(
        s, **habit, top_p=0.5
    )
    assert s.llm.calls[0].params.top_p == 0.5


@pytest.mark.parametrize(
    "field",
    [
        "features",
        "content_parts",
        "kv_transfer_params",
        "ec_transfer_params",
        "token_offsets",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "model",
        "stream",
        "cache_salt",
    ],
)
def test_harmless_nulls_are_taken(field: str) -> None:
    generate(site(), fields={field: None})


@pytest.mark.parametrize(
    "field", [{"output_kind": 2}, {"flat_logprobs": True}, {"skip_clone": True}, {"routed_experts_prompt_start": 0}]
)
def test_internal_names_are_ignored_next_to_sampling_params(field: dict[str, Any]) -> None:
    generate(site(), fields=field)


@pytest.mark.parametrize("name", ["tiny", "alias", None])
def test_the_served_names(name: str | None) -> None:
    assert generate(site(), fields={"model": name})["model"] == "tiny"


def test_headers_of_routers_are_accepted() -> None:
    headers = {"x-session-id": "traj-1", "X-data-parallel-rank": "0", "traceparent": "00-0-0-00"}
    assert site().post(GENERATE, body(), headers=headers).status_code == 200


# ends that are no ends


def test_a_failed_choice_is_reported_with_the_others() -> None:
    s = site()
    s.llm.fails = lambda index: index == 1
    reply = generate(s, n=2)
    assert [c["finish_reason"] for c in reply["choices"]] == ["length", "error"]
    assert reply["choices"][1]["stop_detail"] == {"kind": "nan", "message": "the model's logits are not finite"}


def test_a_request_that_failed_is_500() -> None:
    s = site()
    s.llm.fails = lambda index: True
    answer = s.post(GENERATE, body())
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "the model's logits are not finite"


def test_the_engines_death_is_503() -> None:
    async def scene() -> None:
        s = site()
        s.llm.hold = True
        waiting = Caller(s, GENERATE, body())
        await waiting.wait_for(lambda _: s.llm.num_inflight == 1)
        s.llm.die()
        await waiting.task
        assert waiting.status == 503 and b'"code":"engine_dead"' in waiting.writes[0]
        assert b"signal" not in waiting.writes[0]
        async with s.client() as client:
            assert (await client.post(GENERATE, json=body())).status_code == 503

    asyncio.run(scene())


def test_draining_refuses_new_requests_only() -> None:
    async def scene() -> None:
        s = site()
        s.llm.hold = True
        old = Caller(s, GENERATE, body())
        await old.wait_for(lambda _: s.llm.num_inflight == 1)
        s.app.state.draining = True
        async with s.client() as client:
            answer = await client.post(GENERATE, json=body())
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["type"] == "overloaded_error"
            assert (await client.get("/health")).status_code == 200
        s.llm.wake()
        await old.task
        assert old.status == 200

    asyncio.run(scene())


def test_tokens_only_serves_tokens() -> None:
    s = site(tokens_only=True)
    assert s.llm.tokenizer is None and generate(s, logprobs=1, prompt_logprobs=1)["choices"][0]["token_ids"]
    assert TOKENIZER is not None


def test_the_last_version_is_that_of_the_last_choice_that_has_tokens() -> None:
    generated = ChoiceOutput(0, [5, 6], weight_versions=[("1", 0, 1), ("2", 1, 2)])
    assert last_version([generated, ChoiceOutput(1, [])]) == "2" and last_version([ChoiceOutput(0, [])]) is None


def test_prompts_are_counted_without_unpacking_them() -> None:
    s = site(says("ab"))
    body = {"token_ids": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    events = s.events(GENERATE, body)
    assert events[-1]["usage"]["prompt_tokens"] == len(PROMPT)
    [stream] = s.llm.streams
    assert stream._prompt_ids is None and stream.prompt_len == len(PROMPT)
    s.events(GENERATE, body | {"return_token_ids": True})
    assert s.llm.streams[-1]._prompt_ids == PROMPT
