"""Streaming derender: the joined chunks are the reply of chat, wherever a stream is cut, and whoever has its state."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from tests.replies import good
from tests.server.byte_tokenizer import ids
from tests.server.scripted_llm import says
from tests.server.site import Site, chat_site, site
from tests.text.checkpoints import sentence_piece_json
from tests.text.tool_templates import HERMES, OPENED
from tokserve.text.tokenizer import Tokenizer

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
EMPTY: dict[str, Any] = {"choices": []}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("a\u00fc\U0001f600", HERMES, {"logprobs": True, "top_logprobs": 2}),
    (CALL, HERMES, {"tools": [FUNCTION]}),
    ("why</think>\n\nyes", OPENED, {"logprobs": True}),
    ("why</think>\n\nyes", OPENED, {"include_reasoning": False}),
    ("ab stop cd", HERMES, {"stop": ["stop"], "return_token_ids": True}),
    ("abcdefgh", HERMES, {"max_tokens": 4}),
]


class Stream:
    """One choice's stream, derendered; `forgets`: the server does not have the state any more."""

    def __init__(self, s: Site, body: dict[str, Any], prompt: list[int], *, forgets: bool = False) -> None:
        self._site, self._forgets = s, forgets
        self._sent = {"stream": True, "chat_request": body, "prompt_token_ids": prompt}
        self.state: Any = None
        self.message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
        self.end: dict[str, Any] = {}
        self.rows: list[Any] = []
        self.roles: list[bool] = []

    def send(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {"request_id": "generate-tokens-r", "choices": [choice]}
        reply = good(
            self._site.post(CHAT + "/derender", self._sent | {"generate_chunk": chunk, "stream_state": self.state})
        )
        self.state = {k: v for k, v in reply["stream_state"].items() if not (self._forgets and k == "stream_id")}
        if self.end and not reply["chunk"]["choices"]:  # a stop string was complete in an earlier chunk
            return reply
        [part] = reply["chunk"]["choices"]
        self.roles.append("role" in part["delta"])
        for name in ("content", "reasoning"):
            self.message[name] += part["delta"].get(name, "")
        for call in part["delta"].get("tool_calls", []):
            if "id" in call:
                self.message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            self.message["calls"][-1]["arguments"] += call["function"].get("arguments", "")
        self.rows += (part["logprobs"] or {}).get("content", [])
        if part["finish_reason"] is not None:
            self.end = part
        return reply


def parts_of(choice: dict[str, Any], cuts: list[int]) -> list[dict[str, Any]]:
    """A choice of generate as the chunks of its stream."""
    tokens, rows = choice["token_ids"], (choice["logprobs"] or {}).get("content")
    places = [0, *cuts, len(tokens)]
    parts = []
    for first, last in pairwise(places):
        scores = None if rows is None else {"content": rows[first:last]}
        parts.append({"index": 0, "token_ids": tokens[first:last], "logprobs": scores, "finish_reason": None})
    names = ("finish_reason", "stop_reason", "stop_detail")
    return [*parts[:-1], parts[-1] | {name: choice[name] for name in names}]


@pytest.mark.some(3)
@pytest.mark.parametrize(("text", "template", "fields"), CASES, ids=range(len(CASES)))
def test_joined_chunks_are_the_chat_reply_at_every_cut(text: str, template: str, fields: dict[str, Any]) -> None:
    s = chat_site(text, template)
    body = {"messages": MESSAGES, "request_id": "r"} | fields
    expected = good(s.post(CHAT, body))["choices"][0]
    sent = good(s.post(CHAT + "/render", body))
    [choice] = good(s.post(GENERATE, sent))["choices"]
    count = len(choice["token_ids"])
    cuts = [[cut] for cut in range(count + 1)] + [list(range(1, count))]
    for number, places in enumerate(cuts):
        stream = Stream(s, body, sent["token_ids"], forgets=bool(number % 2))
        for part in parts_of(choice, places):
            stream.send(part)
        message = expected["message"]
        calls = [{"id": call["id"]} | call["function"] for call in message.get("tool_calls", [])]
        assert stream.message == {
            "content": message["content"] or "",
            "reasoning": message["reasoning"] or "",
            "calls": calls,
        }
        assert stream.end["finish_reason"] == expected["finish_reason"]
        assert stream.end["stop_reason"] == expected["stop_reason"]
        assert stream.rows == (expected["logprobs"] or {"content": []})["content"]
        assert stream.roles == [True] + [False] * (len(stream.roles) - 1)


def test_a_chunk_that_is_sent_twice_gives_the_same_reply() -> None:
    s = site(says("x"))
    stream = Stream(s, {}, ids("p"))
    stream.send({"token_ids": ids("ab")})
    before = stream.state
    first = stream.send({"token_ids": ids("cd")})
    stream.state = before
    assert stream.send({"token_ids": ids("cd")})["chunk"]["choices"] == first["chunk"]["choices"]


def test_the_state_of_vllm_is_taken() -> None:
    stream = Stream(site(says("x")), {}, ids("p"))
    stream.state = {
        "prev_tokens": ["a", "b"],
        "prefix_offset": 0,
        "read_offset": 2,
        "role_sent": True,
        "logprob_context_token_ids": [],
        "output_token_ids": ids("ab"),
        "output_chunk_lens": [1, 1],
        "tools_streamed": [False],
    }
    reply = stream.send({"token_ids": ids("c"), "finish_reason": "length"})
    choice = reply["chunk"]["choices"][0]
    assert choice["delta"] == {"content": "c"} and choice["finish_reason"] == "length"
    assert reply["stream_state"]["output_token_ids"] == ids("abc")


def test_usage_and_what_comes_after_the_end() -> None:
    s = site(says("x"))
    stream = Stream(s, {}, ids("p"))
    stream.send({"token_ids": ids("a"), "finish_reason": "length"})
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    sent = {"stream": True, "generate_chunk": {"choices": [], "usage": usage}, "stream_state": stream.state}
    chunk = good(s.post(CHAT + "/derender", sent))["chunk"]
    assert chunk["choices"] == [] and chunk["usage"] | usage == chunk["usage"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "generate_chunk"),
        ({"generate_response": {}}, "generate_response"),
        ({"generate_chunk": {"choices": [{"token_ids": [5]}] * 2}}, "generate_chunk.choices"),
        ({"generate_chunk": {"choices": [{"token_ids": [1 << 30]}]}}, "generate_chunk.choices[0].token_ids[0]"),
        ({"generate_chunk": {"choices": [{"token_ids": [5] * 3000}]}}, "generate_chunk.choices[0].token_ids"),
        ({"generate_chunk": {"choices": [{"token_ids": [5], "index": 5000}]}}, "generate_chunk.choices[0].index"),
        ({"generate_chunk": {"choices": []}, "stream_state": {"output_token_ids": [5]}}, "stream_state"),
        ({"generate_chunk": {"choices": []}, "stream_state": {"prev_tokens": ["a"]}}, "stream_state"),
        (
            {
                "generate_chunk": {"choices": []},
                "stream_state": {"output_token_ids": [1 << 30], "output_chunk_lens": [1]},
            },
            "stream_state.output_token_ids[0]",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    answer = site(says("x")).post(CHAT + "/derender", {"stream": True} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


COMPLETIONS = "/v1/completions"
COMPLETION_CASES: list[tuple[str, dict[str, Any]]] = [
    ("a\u00fc\U0001f600b", {"logprobs": 2}),
    ("a\u00fc\U0001f600", {"logprobs": 2, "max_tokens": 5, "return_token_ids": True}),
    ("ab stop cd", {"stop": ["stop"], "logprobs": 0}),
    ("ab stop cd", {"stop": [" stop"], "include_stop_str_in_output": True}),
    ("abcdefgh", {"max_tokens": 4, "return_token_ids": True}),
    ("abcd", {"logprobs": 2, "packed_top_logprobs": True, "return_tokens_as_token_ids": True}),
]
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def derendered(s: Site, body: dict[str, Any], prompt: list[int], parts: list[Any], *, forgets: bool) -> dict[str, Any]:
    """The chunks of a completion's stream, joined."""
    sent = {"stream": True, "completion_request": body, "prompt_token_ids": [prompt]}
    state: Any = None
    joined: dict[str, Any] = {"text": "", "token_ids": [], "prompt_token_ids": None, "finish_reason": None}
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for part in parts:
        chunk = {"request_id": "generate-tokens-r", "choices": [part]}
        reply = good(s.post(COMPLETIONS + "/derender", sent | {"generate_chunk": chunk, "stream_state": state}))
        state = {name: value for name, value in reply["stream_state"].items() if not (forgets and name == "stream_id")}
        for choice in reply["chunk"]["choices"]:
            joined["text"] += choice["text"]
            joined["token_ids"] += choice.get("token_ids") or []
            joined["prompt_token_ids"] = joined["prompt_token_ids"] or choice.get("prompt_token_ids")
            joined |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice["finish_reason"]}
            for name in COLUMNS:
                columns[name] += (choice["logprobs"] or {}).get(name, [])
    return joined | {"logprobs": columns}


@pytest.mark.parametrize(("text", "fields"), COMPLETION_CASES, ids=range(len(COMPLETION_CASES)))
def test_joined_chunks_are_the_completion_at_every_cut(text: str, fields: dict[str, Any]) -> None:
    s = site(says(text))
    body = {"prompt": "p", "request_id": "r"} | fields
    expected = good(s.post(COMPLETIONS, body))["choices"][0]
    [sent] = good(s.post(COMPLETIONS + "/render", body))
    [choice] = good(s.post(GENERATE, sent))["choices"]
    count = len(choice["token_ids"])
    is_cut = expected["text"].endswith("\ufffd")  # within a character, which is known with the last token at best
    cuts = [[cut] for cut in range(count + (not is_cut))] + [list(range(1, count))]
    for number, places in enumerate(cuts):
        actual = derendered(s, body, sent["token_ids"], parts_of(choice, places), forgets=bool(number % 2))
        for name in ("text", "finish_reason", "stop_reason"):
            assert actual[name] == expected[name], (places, name)
        assert actual["token_ids"] == (expected["token_ids"] or [])
        assert actual["prompt_token_ids"] == expected["prompt_token_ids"]
        scores = expected["logprobs"] or {}
        assert actual["logprobs"] == {name: scores.get(name, []) for name in COLUMNS}, places


def test_an_outputs_first_space_is_kept_whole_and_in_a_stream() -> None:
    """Llama 2's tokenizer drops the first space of a text, and the output continues the prompt's."""
    tokenizer = Tokenizer(Backend.from_str(sentence_piece_json()))
    prompt = tokenizer.encode("the win", False)
    s = site(lambda p, i: [*prompt, 0], tokenizer=tokenizer)
    body = {"prompt": prompt, "logprobs": 0, "max_tokens": len(prompt)}
    expected = good(s.post(COMPLETIONS, body))["choices"][0]
    assert expected["text"] == " the win"
    [sent] = good(s.post(COMPLETIONS + "/render", body))
    reply = good(s.post(GENERATE, sent))
    both = {"completion_request": body, "prompt_token_ids": [prompt], "generate_responses": [reply]}
    assert good(s.post(COMPLETIONS + "/derender", both))["choices"][0]["text"] == expected["text"]
    for cut in range(len(prompt) + 1):
        actual = derendered(s, body, prompt, parts_of(reply["choices"][0], [cut]), forgets=bool(cut % 2))
        assert actual["text"] == expected["text"]
        assert actual["logprobs"]["text_offset"] == expected["logprobs"]["text_offset"]
        assert actual["logprobs"]["tokens"] == expected["logprobs"]["tokens"]


def test_usage_of_a_completion_is_passed_on() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    body = {"stream": True, "generate_chunk": {"choices": [], "usage": usage}}
    reply = good(site(says("x")).post(COMPLETIONS + "/derender", body))
    assert reply["chunk"]["choices"] == [] and reply["chunk"]["usage"] | usage == reply["chunk"]["usage"]
    assert reply["chunk"]["object"] == "text_completion" and set(reply) == {"chunk", "stream_state"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"generate_chunk": None}, "generate_chunk"),
        ({"generate_responses": [{}]}, "generate_responses"),
        ({"generate_chunk": {"choices": [{"token_ids": [5]}, {"token_ids": [6]}]}}, "generate_chunk.choices"),
        ({"prompt_token_ids": [[5], [6]]}, "prompt_token_ids"),
        ({"prompt_token_ids": [[9999]]}, "prompt_token_ids[0][0]"),
        ({"completion_request": {"prompt": ["a", "b"]}}, "generate_responses"),
        ({"completion_request": {"echo": True}}, "completion_request.echo"),
        ({"completion_request": {"prompt_logprobs": 1}}, "completion_request.prompt_logprobs"),
        ({"completion_request": {"return_token_ids": True}}, "prompt_token_ids"),
        ({"completion_request": {"logprobs": 1}}, "generate_chunk.choices[0].logprobs"),
        ({"stream_state": {"output_token_ids": [5], "output_chunk_lens": [2]}}, "stream_state"),
    ],
)
def test_a_completion_that_cannot_be_derendered_names_the_field(changes: dict[str, Any], param: str) -> None:
    body = {"stream": True, "generate_chunk": {"choices": [{"token_ids": [5]}]}} | changes
    answer = site(says("x")).post(COMPLETIONS + "/derender", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
