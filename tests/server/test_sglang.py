"""/generate in SGLang's dialect: the request it makes, the reply, and refusals."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from tests.replies import good
from tests.server.byte_tokenizer import EOS, VOCAB, ids
from tests.server.scripted_llm import NOWHERE, TOKEN_SECONDS, endless, says
from tests.server.site import Caller, Site, parse_events, site
from tests.waiting import PATIENCE
from tokserve.checkpoint import DEMO_DIR
from tokserve.dialects.sglang.generate import SglangGenerateBody
from tokserve.dialects.sglang.sampling import SglangSamplingParams
from tokserve.features.observe.observers import metrics_of
from tokserve.protocol.params import SamplingParams, StructuredOutputs
from tokserve.server.compat import SGLANG

PROMPT = {"input_ids": [70, 71, 72]}


def sglang(*args: Any, **options: Any) -> Site:
    return site(*args, sglang_api=True, **options)


@pytest.fixture(scope="module")
def server() -> Site:
    return sglang()


def generate(s: Site, body: dict[str, Any], **params: Any) -> Any:
    return good(s.post("/generate", body | ({"sampling_params": params} if params else {})))


def test_the_routes_are_there_with_the_option_only() -> None:
    answer = site().post("/generate", PROMPT)
    assert answer.status_code == 404 and "--sglang-api" in answer.json()["error"]["message"]
    assert "/generate" not in site().get("/openapi.json").json()["paths"]
    assert "/generate" in sglang().get("/openapi.json").json()["paths"]
    assert sglang().get("/v1/models").json()["data"][0]["owned_by"] == "sglang"
    assert site().get("/v1/models").json()["data"][0]["owned_by"] == "tokserve"


def test_chat_with_meta_info() -> None:
    """miles' session server sends such requests: it sends prompt ids and gets prompt and output tokens back."""
    s = sglang(enable_lora=True)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "no_stop_trim": False}
    request = body | {"input_ids": [70, 71, 72], "return_meta_info": True, "return_prompt_token_ids": True}
    answer = s.post("/v1/chat/completions", request)
    (choice,) = answer.json()["choices"]
    same = generate(s, PROMPT | {"return_logprob": True}, max_new_tokens=3)["meta_info"]
    names = set(same) - {"id", "input_token_logprobs"}
    assert {name: choice["meta_info"][name] for name in names} == {name: same[name] for name in names}
    assert choice["prompt_token_ids"] == [70, 71, 72] and choice["message"]["content"] == "fgj"
    assert "x-ignored-fields" not in answer.headers
    assert s.llm.calls[0].params.logprobs_mode == "temperature"
    plain = s.post("/v1/chat/completions", body).json()["choices"][0]
    assert "meta_info" not in plain and "prompt_token_ids" not in plain
    for wrong, field in (
        ({"stream": True}, "return_meta_info"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
    ):
        refused = s.post("/v1/chat/completions", request | wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text
    assert s.post("/v1/chat/completions", request | {"lora_path": "b"}).status_code == 404
    s.llm.load_adapter("b", "/p")
    assert s.post("/v1/chat/completions", request | {"lora_path": "b"}).json()["model"] == "b"


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_texts_and_ids_one_or_a_list(prefix: str) -> None:
    """peer-suites-3 A20."""
    s = sglang()
    one = good(s.post(f"{prefix}/tokenize", {"prompt": "ab"}))
    assert one["tokens"] == ids("ab") and one["count"] == 2 and one["max_model_len"] == 512
    several = good(s.post(f"{prefix}/tokenize", {"prompt": ["ab", "", "é"]}))
    assert several["tokens"] == [ids("ab"), [], ids("é")] and several["count"] == [2, 0, 2]
    assert good(s.post(f"{prefix}/tokenize", {"prompt": []}))["tokens"] == []
    text = f"{prefix}/detokenize"
    assert good(s.post(text, {"tokens": ids("ab")}))["text"] == "ab"
    assert good(s.post(text, {"tokens": [[*ids("ab"), EOS], [], ids("é")]}))["text"] == ["ab", "", "é"]
    assert good(s.post(text, {"tokens": []}))["text"] == ""
    shown = good(s.post(text, {"tokens": [*ids("ab"), EOS], "skip_special_tokens": False}))
    assert shown["text"] == shown["prompt"] == "ab<eos>"


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/tokenize", {"prompt": ["a", 5]}, "prompt[1]"),
        ("/tokenize", {"prompt": ["a"] * 4097}, "prompt"),
        ("/tokenize", {"prompt": ["a"], "messages": []}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"], "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": [[5], [VOCAB]]}, "tokens[1][0]"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens[0]"),
        ("/detokenize", {"tokens": [[5], 5]}, "tokens[1]"),
        ("/detokenize", {"tokens": [[]] * 4097}, "tokens"),
    ],
)
def test_lists_that_cannot_be_read_name_the_entry(path: str, fields: dict[str, Any], field: str) -> None:
    refused = sglang().post(path, fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


STOPS: list[tuple[dict[str, Any], Any]] = [
    ({}, EOS),
    ({"stop": ["b"]}, "b"),
    ({"stop_token_ids": ids("b")}, ids("b")[0]),
    ({"max_tokens": 2}, None),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "matched"), STOPS)
def test_choices_say_what_they_ended_with(path: str, fields: dict[str, Any], matched: Any) -> None:
    """peer-suites-3 A19."""
    s = sglang(says("abc"))
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "n": 2, **fields}
    del body["prompt" if "chat" in path else "messages"]
    assert [choice["matched_stop"] for choice in good(s.post(path, body))["choices"]] == [matched] * 2
    ends = [c for event in s.events(path, body) for c in event["choices"] if c.get("finish_reason")]
    assert [choice["matched_stop"] for choice in ends] == [matched] * 2
    assert "matched_stop" not in site(says("abc")).post(path, body).text


def test_a_reply_and_its_meta_info() -> None:
    s = sglang(enable_prefix_caching=True, block_size=1)
    generate(s, PROMPT, max_new_tokens=1)
    reply = generate(s, PROMPT | {"rid": "r1", "return_logprob": True}, max_new_tokens=3)
    assert reply["text"] == "fgj" and reply["output_ids"] == [72, 73, 76]
    info = reply["meta_info"]
    assert info["id"] == "r1" and info["finish_reason"] == {"type": "length", "length": 3}
    assert (info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == (3, 3, 2)
    assert info["weight_version"] == "0" and info["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert info["output_token_logprobs"] == [[-0.125, 72, None], [-0.375, 73, None], [-0.125, 76, None]]
    assert info["output_token_logprobs_length"] == 3 and info["input_token_logprobs"] == []
    assert info["e2e_latency"] == 3 * TOKEN_SECONDS and "output_top_logprobs" not in info
    assert "prompt_token_ids" not in reply and "index" not in reply
    plain = generate(s, PROMPT | {"return_prompt_token_ids": True}, max_new_tokens=1)
    assert "output_token_logprobs" not in plain["meta_info"] and plain["prompt_token_ids"] == [70, 71, 72]


@pytest.mark.parametrize("depth", [400, 500, 900, 100_000])
@pytest.mark.parametrize("name", ["input_embeds", "session_params", "sampling_params", "unknown"])
def test_nesting_is_never_an_internal_error(server: Site, name: str, depth: int) -> None:
    raw = b'{"input_ids":[70],"%b":' % name.encode() + b"[" * depth + b"]" * depth + b"}"
    answer = server.post("/generate", content=raw, headers={"Content-Type": "application/json"})
    blank = name in ("input_embeds", "session_params") and depth <= 900
    assert answer.status_code == (200 if blank or (name == "unknown" and depth <= 900) else 400), answer.text


def test_a_recursion_error_while_a_body_is_read_is_a_400(server: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr("tokserve.dialects.sglang.generate.read_generate", read)
    answer = server.post("/generate", PROMPT)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == 400, answer.text


def test_put_is_the_same_as_post() -> None:
    s = sglang()
    answer = s.request("PUT", "/generate", json=PROMPT | {"sampling_params": {"max_new_tokens": 2}})
    assert answer.status_code == 200 and answer.json()["output_ids"] == [72, 73]


def test_defaults_are_sglangs() -> None:
    s = sglang()
    generate(s, PROMPT)
    params = s.llm.calls[-1].params
    assert params == SamplingParams(max_tokens=128, logprobs_mode="temperature", return_sampling_mask=False)
    generate(s, PROMPT, max_new_tokens=None)
    assert s.llm.calls[-1].params.max_tokens is None


PARAMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1e-7}, {"temperature": 0.0}),
    ({"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1}, {"top_p": 0.9, "top_k": -1, "min_p": 0.1}),
    ({"min_new_tokens": 2, "ignore_eos": True}, {"min_tokens": 2, "ignore_eos": True}),
    ({"stop": ["z"], "no_stop_trim": True}, {"stop": ["z"], "include_stop_str_in_output": True}),
    ({"stop_token_ids": [5], "sampling_seed": 7}, {"stop_token_ids": [5], "seed": 7}),
    ({"logit_bias": {"5": 1.5}}, {"logit_bias": {5: 1.5}}),
    ({"json_schema": '{"type": "object"}'}, {"structured_outputs": StructuredOutputs(json='{"type": "object"}')}),
    ({"json_schema": "$$ANY$$"}, {"structured_outputs": StructuredOutputs(json_object=True)}),
    ({"regex": "a+"}, {"structured_outputs": StructuredOutputs(regex="a+")}),
    ({"stop": None, "regex": None, "stop_regex": None, "custom_params": {"a": 1}}, {}),
    ({"logprobs_mode": "raw"}, {"logprobs_mode": "raw"}),
]


@pytest.mark.parametrize(("fields", "expected"), PARAMS, ids=lambda value: str(value)[:30])
def test_sampling_parameters_are_translated(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    s = sglang()
    generate(s, PROMPT, max_new_tokens=4, **fields)
    params = msgspec.structs.asdict(s.llm.calls[-1].params)
    assert {name: params[name] for name in expected} == expected and params["max_tokens"] == 4


def test_logprobs_of_the_prompt_begin_with_a_null() -> None:
    s = sglang()
    body = PROMPT | {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    info = generate(s, body, max_new_tokens=1)["meta_info"]
    assert info["input_token_logprobs"] == [[None, 71, None], [-0.125, 72, None]]
    assert info["input_top_logprobs"][0] is None and len(info["input_top_logprobs"][1]) == 2
    assert info["output_top_logprobs"] == [[[-0.125, 72, None], [-0.25, 84, None]]]
    assert s.llm.calls[-1].params.prompt_logprobs_start == 2
    last = generate(s, body | {"logprob_start_len": 2}, max_new_tokens=1)["meta_info"]
    assert last["input_token_logprobs"] == [[None, 72, None]]
    assert generate(s, body | {"logprob_start_len": 3}, max_new_tokens=1)["meta_info"]["input_token_logprobs"] == []


def test_no_new_tokens_scores_the_prompt() -> None:
    s = sglang()
    reply = generate(s, PROMPT | {"return_logprob": True, "logprob_start_len": 0}, max_new_tokens=0, temperature=0.5)
    info = reply["meta_info"]
    assert reply["output_ids"] == [] and reply["text"] == "" and info["completion_tokens"] == 0
    assert info["finish_reason"] == {"type": "length", "length": 0} and info["output_token_logprobs"] == []
    assert [entry[1] for entry in info["input_token_logprobs"]] == [70, 71, 72]
    assert s.llm.calls[-1].params.prompt_logprobs_mode == "raw"  # they are not divided by the temperature


def test_a_prompt_is_scored_while_the_output_is_sampled_at_a_temperature() -> None:
    """peer-suites-3 (c): the output's logits are divided by the temperature, and the prompt's are not."""
    s = sglang()
    reply = generate(s, PROMPT | {"return_logprob": True, "logprob_start_len": 0}, max_new_tokens=4, temperature=0.7)
    assert len(reply["meta_info"]["input_token_logprobs"]) == 3 and len(reply["output_ids"]) == 4
    params = s.llm.calls[-1].params
    assert (params.logprobs_mode, params.prompt_logprobs_mode) == ("temperature", "raw")
    body = PROMPT | {"return_logprob": True, "logprob_start_len": 0}
    generate(s, body, max_new_tokens=4, temperature=0.7, logprobs_mode="processed")
    assert s.llm.calls[-1].params.prompt_logprobs_mode is None  # both, as they were named


def test_a_temperature_that_counts_as_zero_divides_no_logprobs() -> None:
    s = sglang()
    generate(s, PROMPT | {"return_logprob": True, "logprob_start_len": 0}, max_new_tokens=4, temperature=1e-7)
    assert (s.llm.calls[-1].params.temperature, s.llm.calls[-1].params.logprobs_mode) == (0.0, "temperature")


def test_named_ids_and_text_of_tokens() -> None:
    s = sglang()
    body = PROMPT | {"return_logprob": True, "token_ids_logprob": [5, 6], "return_text_in_logprobs": True}
    info = generate(s, body, max_new_tokens=1)["meta_info"]
    assert info["output_token_logprobs"] == [[-0.125, 72, "f"]]
    assert info["output_token_ids_logprobs"] == [[[-5.0, 5, "#"], [-5.5, 6, "$"]]]


def test_an_impossible_token_is_a_number() -> None:
    s = sglang(lambda prompt, index: [NOWHERE, EOS])
    info = generate(s, PROMPT | {"return_logprob": True})["meta_info"]
    assert info["output_token_logprobs"][0][0] == -9999.0
    assert info["finish_reason"] == {"type": "stop", "matched": EOS}


def test_finish_reason_names_what_matched() -> None:
    s = sglang(says("hello world"))
    assert generate(s, PROMPT, stop="wor")["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wor"}
    reply = generate(s, PROMPT, stop_token_ids=ids("o"))
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids("o")[0]}
    assert reply["text"] == "hell" and len(reply["output_ids"]) == 5


def test_a_batch_is_a_list_in_the_order_of_its_prompts() -> None:
    s = sglang()
    both = generate(
        s,
        {"text": ["ab", "c"], "return_logprob": [True, False]}
        | {"sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2, "temperature": 0}]},
    )
    assert [len(one["output_ids"]) for one in both] == [1, 2]
    assert ["output_token_logprobs" in one["meta_info"] for one in both] == [True, False]
    assert [call.prompt for call in s.llm.calls] == [ids("ab"), ids("c")]
    assert [call.params.temperature for call in s.llm.calls] == [1.0, 0.0]
    one = generate(s, {"input_ids": [[70, 71]]}, max_new_tokens=1)
    assert isinstance(one, list) and len(one) == 1
    four = generate(s, {"input_ids": [[70], [71]]}, max_new_tokens=1, n=2)
    assert [reply["output_ids"] for reply in four] == [endless([70 + i // 2], i)[:1] for i in range(4)]


def test_a_stream_repeats_what_came_before() -> None:
    s = sglang()
    body = PROMPT | {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 4}}
    events = s.events("/generate", body)
    full_reply = s.post("/generate", body).json()
    assert [event["output_ids"] for event in events] == [full_reply["output_ids"][: k + 1] for k in range(4)]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 3
    assert all(len(event["meta_info"]["input_token_logprobs"]) == 3 for event in events)
    last = events[-1]
    for reply in (last, full_reply):
        del reply["meta_info"]["id"]
    assert last == full_reply


def test_a_stream_of_a_batch_has_indexes() -> None:
    events = sglang().events("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2, "n": 2}})
    assert {event["index"] for event in events} == {0, 1, 2, 3}


def test_options_of_a_request() -> None:
    s = sglang(enable_lora=True)
    s.llm.load_adapter("sql", "/adapters/sql")
    generate(s, PROMPT | {"lora_path": "sql", "priority": 3, "extra_key": "a", "cache_salt": None}, max_new_tokens=1)
    options = s.llm.calls[-1].options
    assert (options["adapter"], options["priority"], options["cache_salt"]) == ("sql", -3, "a")
    generate(s, PROMPT | {"extra_key": "a", "cache_salt": "b"}, max_new_tokens=1)
    both = s.llm.calls[-1].options["cache_salt"]
    generate(s, PROMPT | {"extra_key": "b", "cache_salt": "a"}, max_new_tokens=1)
    assert len({both, s.llm.calls[-1].options["cache_salt"], "a", "b"}) == 4
    answer = s.post("/generate", PROMPT | {"lora_path": "nobody"})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "lora_path"


def test_an_abort_is_a_200_with_what_there_is() -> None:
    async def run(path: str, body: dict[str, Any]) -> Any:
        s = sglang()
        s.llm.hold = True
        caller = Caller(s, "/generate", PROMPT | {"rid": "mine"})
        await caller.wait_for(lambda _: s.llm.num_inflight == 1)
        async with s.client() as client:
            aborted = await client.post(path, json=body)
        assert aborted.status_code == 200 and aborted.content == b""
        await asyncio.wait_for(caller.task, PATIENCE)
        return caller.status, msgspec.json.decode(b"".join(caller.writes))

    for body in ({"rid": "mine"}, {"abort_all": True}, {"rid": "", "abort_all": True}):
        status, reply = asyncio.run(run("/abort_request", body))
        assert status == 200 and reply["output_ids"] == [] and reply["text"] == ""
        reason = reply["meta_info"]["finish_reason"]
        assert reason["type"] == "abort" and reason["status_code"] is None and reason["message"]


def test_unknown_fields_are_ignored_and_named() -> None:
    s = sglang()
    body = PROMPT | {"new_field": 1, "image_data": [None, []], "session_id": "x", "bootstrap_room": None}
    answer = s.post("/generate", body | {"sampling_params": {"max_new_tokens": 1}})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "new_field" and s.llm.calls[-1].prompt == [70, 71, 72]


@pytest.mark.parametrize("path", ["/generate", "/encode"])
def test_a_prompt_is_text_or_ids_and_not_both(path: str) -> None:
    """serving-faults F16: one of them would have no effect."""
    s = sglang() if path == "/generate" else sglang(runner="pooling", model=str(DEMO_DIR))
    s.llm.ready.facts["hidden_size"] = 64
    refused = s.post(path, {"text": "a", "input_ids": [5]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"text": ""}, "text"),
        ({"text": [""]}, "text[0]"),
        ({"text": [1]}, "text[0]"),
        ({"input_ids": [70, "a"]}, "input_ids[1]"),
        ({"input_ids": [True]}, "input_ids[0]"),
        ({"input_ids": [[70], 5]}, "input_ids[1]"),
        ({"input_ids": [[70], []]}, "input_ids[1]"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": [[5], [VOCAB]]}, "input_ids[1]"),
        ({"input_ids": [5] * 512}, "input_ids"),
        (PROMPT | {"image_data": ["http://x/y.png"]}, "image_data"),
        (PROMPT | {"input_embeds": [[0.5]]}, "input_embeds"),
        (PROMPT | {"return_hidden_states": True}, "return_hidden_states"),
        (PROMPT | {"return_routed_experts": True}, "return_routed_experts"),
        (PROMPT | {"routed_dp_rank": 1}, "routed_dp_rank"),
        (PROMPT | {"rid": "ä"}, "rid"),
        ({"text": ["a", "b"], "rid": ["1", "2"]}, "rid"),
        (PROMPT | {"return_logprob": True, "logprob_start_len": 4}, "logprob_start_len"),
        (PROMPT | {"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        (PROMPT | {"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        (PROMPT | {"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        (PROMPT | {"return_logprob": True, "token_ids_logprob": [VOCAB]}, "token_ids_logprob[0]"),
        (PROMPT | {"return_logprob": True, "token_ids_logprob": ["a"]}, "token_ids_logprob"),
        (PROMPT | {"return_logprob": True, "token_ids_logprob": [5], "logprob_start_len": 0}, "token_ids_logprob"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"text": ["a", "b"], "lora_path": ["a", None]}, "lora_path"),
        (PROMPT | {"lora_path": "x"}, "lora_path"),
    ],
)
def test_bodies_are_refused_by_field(server: Site, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = server.post("/generate", body | {"stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["param"] == param and error["code"] == 400, error


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": "x"}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 4}, "min_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"sampling_seed": 2**70}, "sampling_seed"),
        ({"stop_regex": "a"}, "stop_regex"),
        ({"ebnf": "root ::= a"}, "ebnf"),
        ({"ebnf": 'root ::= "a"', "regex": "a"}, "ebnf"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"beam_width": 4}, "beam_width"),
        ({"regex": "a", "json_schema": "{}"}, "regex"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_sampling_parameters_are_refused_by_their_name(server: Site, params: dict[str, Any], name: str) -> None:
    answer = server.post("/generate", PROMPT | {"sampling_params": params})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"sampling_params.{name}", answer.text


def test_without_a_tokenizer_there_is_no_text() -> None:
    s = sglang(tokens_only=True)
    reply = generate(s, PROMPT, max_new_tokens=2)
    assert "text" not in reply and reply["output_ids"] == [72, 73]
    assert s.post("/generate", {"text": "a"}).json()["error"]["param"] == "text"


def test_a_stream_that_fails_ends_with_an_error() -> None:
    s = sglang()
    s.llm.fails = lambda index: True
    answer = s.post("/generate", PROMPT | {"stream": True})
    *_, last = parse_events(answer.text)
    assert set(last["error"]) == {"message", "type", "code", "retryable"} and last["error"]["code"] == 500
    assert s.post("/generate", PROMPT).status_code == 500
    s.llm.fails = lambda index: index == 1
    good, bad = generate(s, PROMPT, n=2, max_new_tokens=2)
    assert good["meta_info"]["finish_reason"]["type"] == "length"
    assert bad["meta_info"]["finish_reason"]["status_code"] == 500


def test_garbage_is_a_client_error() -> None:
    s = sglang()
    rng = random.Random(0)
    values = (None, True, -1, 2**70, 0.5, "", "a", [], [1], [[1]], [None], ["a"], {}, {"a": 1}, [{}], [True, 2])
    fields = [*SglangGenerateBody.__struct_encode_fields__, *SGLANG, "other"]
    params = SglangSamplingParams.__struct_fields__

    async def scene() -> None:
        async with s.client() as client:
            for i in range(250):
                body: dict[str, Any] = dict(PROMPT) if i % 2 else {"text": "a"}
                body |= {rng.choice(fields): rng.choice(values) for _ in range(rng.randrange(1, 3))}
                if i % 3 == 0:
                    body["sampling_params"] = {rng.choice(params): rng.choice(values) for _ in range(2)}
                answer = await client.post("/generate", json=body)
                assert answer.status_code < 500, (body, answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["message"] and answer.json()["error"]["param"], (body, answer.text)
            for raw in (b"", b"{", b"[]", b"5", b"\xff", b'{"input_ids": [1'):
                answer = await client.post("/generate", content=raw)
                assert answer.status_code == 400 and answer.json()["error"]["message"]

    asyncio.run(scene())
    assert not metrics_of(s.app.state.serving).inflight and not s.llm.num_inflight


def test_a_grammar_in_ebnf_is_followed() -> None:
    """SGLang's ebnf (serving-faults F6, peer suites)."""
    s = sglang()
    generate(s, PROMPT, ebnf='root ::= "yes" | "no"')
    assert s.llm.calls[-1].params.structured_outputs == StructuredOutputs(grammar='root ::= "yes" | "no"')


def test_logprobs_of_the_support_are_refused() -> None:
    answer = sglang().post("/generate", PROMPT | {"sampling_logprobs_mode": "support"})
    assert answer.status_code == 400 and "return_sampling_mask" in answer.json()["error"]["message"]


def test_chat_says_which_weights_made_the_first_choice() -> None:
    """peer-suites-3 A13."""
    sent = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "n": 2}
    reply = good(sglang().post("/v1/chat/completions", sent))
    assert reply["metadata"] == {"weight_version": "0", "weight_versions": [{"version": "0", "start": 0, "end": 3}]}
