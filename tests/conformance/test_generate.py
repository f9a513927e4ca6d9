"""POST /inference/v1/generate: its fields, what it refuses and how it says so, the shape of its reply."""

import base64
import struct
import uuid
from typing import Any

import pytest

from tests.conformance.api import ABORTS, GENERATE, PROMPT, Api, Long


def test_token_ids_as_a_list_and_packed_are_the_same(api: Api) -> None:
    packed = struct.pack(f"<{len(PROMPT)}i", *PROMPT)
    params = {"max_tokens": 6, "temperature": 0}
    in_base64 = api.ok(GENERATE, {"token_ids_b64": base64.b64encode(packed).decode(), "sampling_params": params})
    in_msgpack = api.packed({"token_ids": packed, "sampling_params": params})
    ids = api.choice(params)["token_ids"]
    assert in_base64["choices"][0]["token_ids"] == ids
    assert in_msgpack["choices"][0]["token_ids"] == struct.pack(f"<{len(ids)}i", *ids)


REFUSED = [
    ({"token_ids": None}, "token_ids"),
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [-1]}, "token_ids"),
    ({"token_ids": [5, 10**7]}, "token_ids"),
    ({"token_ids": [2**63]}, "token_ids"),
    ({"token_ids": [2**64]}, "token_ids"),
    ({"token_ids": [5.0]}, "token_ids[0]"),
    ({"token_ids": ["5"]}, "token_ids[0]"),
    ({"token_ids": [True]}, "token_ids[0]"),
    ({"token_ids": [None]}, "token_ids[0]"),
    ({"token_ids": 5}, "token_ids"),
    ({"token_ids": "BQAAAA=="}, "token_ids"),
    ({"token_ids_b64": "BQAAAA=="}, "token_ids_b64"),
    ({"token_ids": None, "token_ids_b64": "BQAA"}, "token_ids_b64"),
    ({"token_ids": None, "token_ids_b64": "!"}, "token_ids_b64"),
    ({"request_id": 5}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"request_id": "\u00e4"}, "request_id"),
    ({"model": 5}, "model"),
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"output_mode": "speech"}, "output_mode"),
    ({"logprobs_format": "xml"}, "logprobs_format"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "s" * 1025}, "cache_salt"),
    ({"cache_salt": 3}, "cache_salt"),
    ({"priority": 1.0}, "priority"),
    ({"priority": 2**63}, "priority"),
    ({"priority": False}, "priority"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"ec_transfer_params": {}}, "ec_transfer_params"),
    ({"features": []}, "features"),
    ({"content_parts": {}}, "content_parts"),
    ({"content_parts": [{"type": "audio_url"}]}, "content_parts[0].type"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"deadline_ms": -1}, "deadline_ms"),
    ({"deadline_ms": 1.5}, "deadline_ms"),
    ({"queue_timeout_ms": 0}, "queue_timeout_ms"),
    ({"queue_timeout_ms": 10**12}, "queue_timeout_ms"),
    ({"group_id": ""}, "group_id"),
    ({"group_id": "g" * 257}, "group_id"),
    ({"sampling_params": []}, "sampling_params"),
    ({"stream_options": []}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_refused_by_name_also_before_a_stream(api: Api, fields: Any, param: str) -> None:
    body = {"token_ids": PROMPT} | fields
    api.refused(api.post(GENERATE, body), 400, param)
    if "stream" not in fields:
        api.refused(api.post(GENERATE, body | {"stream": True}), 400, param)


def test_an_error_repeats_only_a_little_of_what_was_sent(api: Api) -> None:
    for fields in ({"output_mode": "x" * 9999}, {"x" * 9999: 1}, {"model": "x" * 9999}):
        answer = api.post(GENERATE, {"token_ids": PROMPT} | fields)
        assert 400 <= answer.status_code < 500 and len(answer.content) < 1500


def test_the_prompt_may_take_all_of_the_context_but_one_token(api: Api) -> None:
    longest = [5] * (api.max_model_len - 1)
    [choice] = api.generate({"max_tokens": None, "ignore_eos": True}, token_ids=longest)["choices"]
    assert len(choice["token_ids"]) == 1
    assert choice["finish_reason"] == "length" and choice["stop_detail"] == {"kind": "context"}
    error = api.refused(api.post(GENERATE, {"token_ids": [*longest, 5]}), 400, "token_ids", str(api.max_model_len))
    assert error["code"] == "context_length_exceeded" and "maximum context length is" in error["message"]


def test_max_tokens_beyond_the_context_is_the_rest_of_the_context(api: Api) -> None:
    prompt = [5] * (api.max_model_len - 3)
    for limit in (None, 4, 2**31 - 1):
        choice = api.choice({"max_tokens": limit, "ignore_eos": True}, token_ids=prompt)
        assert len(choice["token_ids"]) == 3 and choice["finish_reason"] == "length"
    api.refused(
        api.post(GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 10**12}}),
        400,
        "sampling_params.max_tokens",
    )


def test_an_unknown_field_is_refused_with_the_nearest_known_name(api: Api) -> None:
    api.refused(api.post(GENERATE, {"token_idz": PROMPT}), 400, "token_idz", "'token_ids'")
    body = {"token_ids": PROMPT, "sampling_params": {"top_pp": 1}}
    api.refused(api.post(GENERATE, body), 400, "sampling_params.top_pp", "'top_p'")
    body = {"token_ids": PROMPT, "stream": True, "stream_options": {"include_usages": True}}
    api.refused(api.post(GENERATE, body), 400, "stream_options.include_usages", "'include_usage'")


def test_internal_names_of_other_servers_are_harmless(api: Api) -> None:
    harmless = {
        "output_kind": 2,
        "flat_logprobs": True,
        "skip_clone": None,
        "routed_experts_prompt_start": 1,
        "skip_reading_prefix_cache": False,
        "stream_interval": 2,
        "watermarking": None,
    }
    expected = api.choice({"temperature": 0})
    assert api.choice({"temperature": 0} | harmless)["token_ids"] == expected["token_ids"]


RENDERED_BY_VLLM: dict[str, Any] = {
    "token_ids": PROMPT,
    "token_offsets": None,
    "features": None,
    "content_parts": None,
    "reasoning_ended": None,
    "reasoning_parser_kwargs": None,
    "return_token_ids": None,
    "output_mode": "tokens",
    "stream": False,
    "stream_options": None,
    "cache_salt": None,
    "priority": 0,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "sampling_params": {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 0.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": [],
        "stop_token_ids": [],
        "max_tokens": 8,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    },
}


def test_what_vllm_rendered_is_generated(api: Api) -> None:
    choice = api.ok(GENERATE, RENDERED_BY_VLLM | {"model": api.model})["choices"][0]
    assert choice["token_ids"] == api.choice({"temperature": 0})["token_ids"]
    offsets = [[0, 1]] * len(PROMPT)
    assert api.ok(GENERATE, RENDERED_BY_VLLM | {"token_offsets": offsets, "reasoning_ended": False})["choices"]


@pytest.mark.parametrize("name", ["guided_decoding", "logits_processors"])
def test_what_is_not_implemented_is_refused_by_name(api: Api, name: str) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {name: {}}}
    assert api.refused(api.post(GENERATE, body), 400, f"sampling_params.{name}")["code"] == "unsupported"


def test_structured_outputs_need_a_tokenizer_and_keep_to_their_form(api: Api) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "structured_outputs": {"regex": "[0-9]{3}"}}}
    if api.config["server"]["tokens_only"]:
        api.refused(api.post(GENERATE, body), 400, "sampling_params.structured_outputs")
    else:
        [choice] = api.ok(GENERATE, body | {"output_mode": "text"})["choices"]
        assert len(choice["text"]) == 3 and choice["text"].isdigit() and choice["finish_reason"] == "stop"


def test_null_is_absent_where_a_field_is_optional(api: Api) -> None:
    names = (
        "request_id",
        "model",
        "stream",
        "stream_options",
        "return_token_ids",
        "cache_salt",
        "kv_transfer_params",
        "features",
        "content_parts",
        "deadline_ms",
        "queue_timeout_ms",
        "group_id",
        "token_ids_b64",
    )
    params = (
        "seed",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "stop_token_sequences",
        "bad_token_sequences",
        "structured_outputs",
        "repetition_detection",
        "logprobs_mode",
        "extra_args",
    )
    prompt = [5] * (api.max_model_len - 4)
    reply = api.generate(dict.fromkeys(params) | {"temperature": 0}, token_ids=prompt, **dict.fromkeys(names))
    assert reply["choices"][0]["token_ids"]


def test_null_is_absent_also_where_it_is_no_value(api: Api) -> None:
    names = ("output_mode", "logprobs_format", "priority")
    expected = api.choice({"temperature": 0})
    assert api.choice({"temperature": 0}, **dict.fromkeys(names))["token_ids"] == expected["token_ids"]
    assert api.ok(GENERATE, {"token_ids": PROMPT, "sampling_params": None, "deadline_ms": 2000})["choices"]


def test_no_model_is_the_served_model_and_an_unknown_one_is_404(api: Api) -> None:
    assert api.generate()["model"] == api.generate(model=api.model)["model"] == api.model
    assert api.generate(model="")["model"] == api.model
    for name in ("gpt-9", api.model + "x"):
        error = api.refused(api.post(GENERATE, {"token_ids": PROMPT, "model": name}), 404, "model")
        assert error["code"] == "model_not_found"


def test_the_shape_of_the_reply(api: Api) -> None:
    reply = api.generate({"seed": 3}, return_token_ids=True)
    assert set(reply) == {
        "request_id",
        "id",
        "object",
        "output_mode",
        "created",
        "model",
        "choices",
        "usage",
        "prompt_logprobs",
        "prompt_token_ids",
        "kv_transfer_params",
        "seed",
        "exact",
    }
    assert reply["object"] == "inference.generate" and reply["id"] == reply["request_id"]
    assert reply["request_id"].startswith("generate-tokens-") and isinstance(reply["created"], int)
    assert reply["prompt_token_ids"] == PROMPT and reply["prompt_logprobs"] is None
    assert reply["kv_transfer_params"] is None and reply["seed"] == 3 and reply["exact"] is True
    [choice] = reply["choices"]
    assert set(choice) == {
        "index",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "logprobs",
        "weight_versions",
        "stop_detail",
    }
    count = len(choice["token_ids"])
    assert choice["index"] == 0 and choice["logprobs"] is None and 1 <= count <= 8
    [span] = choice["weight_versions"]
    assert set(span) == {"version", "start", "end"} and (span["start"], span["end"]) == (0, count)
    usage = reply["usage"]
    assert usage["prompt_tokens"] == 5 and usage["completion_tokens"] == count and usage["total_tokens"] == 5 + count
    assert set(usage["prompt_tokens_details"]) == {"cached_tokens"}


def test_prompt_token_ids_are_echoed_only_if_asked(api: Api) -> None:
    assert "prompt_token_ids" not in api.generate()


def test_json_is_compact(api: Api) -> None:
    answer = api.post(GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}})
    assert b", " not in answer.content and b": " not in answer.content and answer.json()


def test_text_mode_adds_the_text(text: Api) -> None:
    choice = text.choice({"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}, output_mode="text")
    assert choice["text"] == text.ok("/detokenize", {"tokens": choice["token_ids"]})["prompt"]
    assert "text" not in text.choice()


def test_text_on_a_tokens_only_server_is_refused(api: Api) -> None:
    if not api.tokens_only:
        pytest.skip("the server has a tokenizer")
    api.refused(api.post(GENERATE, {"token_ids": PROMPT, "output_mode": "text"}), 400, "output_mode")
    for name in ("stop", "bad_words"):
        body = {"token_ids": PROMPT, "sampling_params": {name: ["x"]}}
        api.refused(api.post(GENERATE, body), 400, f"sampling_params.{name}")
    api.refused(api.post("/v1/completions", {"prompt": "x"}), 404, None, "tokens-only")


# ids and headers


def test_the_request_id_is_the_clients(api: Api) -> None:
    answer = api.post(GENERATE, {"token_ids": PROMPT, "request_id": "mine-1", "sampling_params": {"max_tokens": 1}})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "generate-tokens-mine-1"
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    answer = api.post(GENERATE, body, headers={"X-Request-Id": "mine-2"})
    assert answer.headers["x-request-id"] == "mine-2" and answer.json()["id"] == "generate-tokens-mine-2"
    answer = api.post(GENERATE, body | {"request_id": "same"}, headers={"X-Request-Id": "same"})
    assert answer.json()["id"] == "generate-tokens-same"
    answer = api.post(GENERATE, body)
    assert answer.json()["id"] == "generate-tokens-" + answer.headers["x-request-id"]


def test_an_id_that_is_a_replys_id_gets_no_second_prefix(api: Api) -> None:
    assert api.generate(request_id="generate-tokens-x")["id"] == "generate-tokens-x"


def test_two_different_ids_are_refused(api: Api) -> None:
    answer = api.post(GENERATE, {"token_ids": PROMPT, "request_id": "a"}, headers={"X-Request-Id": "b"})
    api.refused(answer, 400, "request_id", "X-Request-Id")


def test_a_duplicate_of_an_id_in_flight_is_409(api: Api) -> None:
    with Long(api, "twin"):
        for request_id in ("twin", "generate-tokens-twin", "chatcmpl-twin"):
            error = api.refused(api.post(GENERATE, {"token_ids": PROMPT, "request_id": request_id}), 409, "request_id")
            assert error["type"] == "conflict_error"
        api.ok(ABORTS[0], {"request_ids": ["twin"]})
    assert api.generate(request_id="twin")["choices"]


def test_a_refused_request_leaves_its_id_free(api: Api) -> None:
    for _ in range(2):
        body = {"token_ids": [5, -1], "request_id": "again"}
        api.refused(api.post(GENERATE, body), 400, "token_ids")
    assert api.generate(request_id="again")["choices"]


@pytest.mark.parametrize("name", ["X-Session-ID", "traceparent"])
def test_headers_of_routers_are_understood(api: Api, name: str) -> None:
    for value in ("0", "junk", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"):
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
        assert api.post(GENERATE, body, headers={name: value}).status_code == 200


def test_the_header_of_a_rank_names_an_engine(api: Api) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert api.post(GENERATE, body, headers={"X-data-parallel-rank": "0"}).status_code == 200
    for value in ("junk", "1.5", "-1", "4096"):
        answer = api.post(GENERATE, body, headers={"X-data-parallel-rank": value})
        assert answer.status_code == 400 and "rank" in answer.json()["error"]["message"], answer.text


# terms


def test_cache_salt_separates_the_prefix_cache_and_changes_nothing_else(api: Api) -> None:
    prompt = [5, 6, 7, 8] * 24
    run = uuid.uuid4().hex  # a server that is asked twice remembers the first time
    seen = []
    for salt in (run + "red", run + "red", run + "blue", run + "\U0001f534" * 96):
        reply = api.generate({"temperature": 0, "logprobs": 1}, token_ids=prompt, cache_salt=salt)
        seen.append((reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"]))
    assert seen[0][0] == seen[2][0] == seen[3][0] == 0 and seen[1][0] > 0
    assert all(choices == seen[0][1] for _, choices in seen)


def test_priority_is_taken_unless_the_policy_is_fcfs(api: Api) -> None:
    assert api.generate(priority=0)["choices"] and api.generate(priority=-0)["choices"]
    answer = api.post(GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "priority": 3})
    if api.config["scheduler"]["scheduling_policy"] == "priority":
        assert answer.status_code == 200
    else:
        api.refused(answer, 400, "priority", "--scheduling-policy")


def test_past_its_deadline_a_request_ends_with_what_it_has(api: Api) -> None:
    choice = api.choice({"max_tokens": None, "ignore_eos": True, "seed": 5}, deadline_ms=10)
    assert choice["finish_reason"] == "deadline" and choice["stop_detail"] == {"kind": "deadline"}
    ids = choice["token_ids"]
    assert ids == api.choice({"max_tokens": len(ids) or 1, "ignore_eos": True, "seed": 5})["token_ids"][: len(ids)]


def test_past_its_time_in_the_queue_a_request_ends_without_tokens(api: Api) -> None:
    slots = api.config["scheduler"]["max_num_seqs"]
    if slots > 1000:
        pytest.skip("nothing would wait")
    params = {"max_tokens": 8, "ignore_eos": True, "n": slots + 4, "logprobs": 0}
    choices = api.generate(params, queue_timeout_ms=1)["choices"]
    waited = [choice for choice in choices if choice["stop_detail"] == {"kind": "queue_timeout"}]
    assert len(waited) >= 4
    for choice in waited:
        assert choice["finish_reason"] == "deadline"
        assert choice["token_ids"] == [] and choice["logprobs"] == {"content": []}
    assert all(len(choice["token_ids"]) == 8 for choice in choices if choice not in waited)
