"""Requests of sessions over the three text routes, and what trainers read of them."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.server.byte_tokenizer import EOS, TOKENIZER, ids
from tests.server.scripted_llm import endless
from tests.server.site import Caller, Site, site
from tests.text.tool_templates import HERMES
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.features.sessions.access import LocalService

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"b": 1.0, "a": "x"}}\n</tool_call>'
ANSWERS = [f"Let me see. {CALL}", "Half way.", "The end."]


def replies(*texts: str) -> Any:
    """A script that answers with these texts, by the number of answers that the prompt has."""

    def script(prompt: Sequence[int], index: int) -> list[int]:
        turn = TOKENIZER.decode(prompt, False).count("<|im_start|>assistant") - 1
        return [*ids(texts[min(turn, len(texts) - 1)] + ("" if index == 0 else f" ({index})")), EOS]

    return script


def agents_site(*texts: str, **options: Any) -> Site:
    values = {"chat_template": HERMES, "max_model_len": 4096, "sessions": True} | options
    return site(replies(*(texts or ANSWERS)), **values)


def tree(server: Site, session: str, query: str = "", **kwargs: Any) -> list[dict[str, Any]]:
    answer = server.get(f"/sessions/{session}/tree{query}", **kwargs)
    assert answer.status_code == 200, answer.text
    turns: list[dict[str, Any]] = answer.json()["turns"]
    return turns


def prompts(turns: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The whole prompt of each turn."""
    by_id: dict[str, list[int]] = {}
    for turn in turns:
        parent = next((one for one in turns if one["turn_id"] == turn["parent"]), None)
        before = [] if parent is None else by_id[parent["turn_id"]] + parent["token_ids"]
        by_id[turn["turn_id"]] = before + turn["new_prompt_ids"]
    return by_id


def chat(server: Site, messages: list[Any], session: str | None = "s", **fields: Any) -> dict[str, Any]:
    headers = {} if session is None else {"X-Session-ID": session}
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 400} | fields
    answer = server.post("/v1/chat/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def run_chat(server: Site, **fields: Any) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """An agent that repeats arguments in another form; returns the messages and the prompts as the server had them."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Where?"}]
    seen = []
    for _ in ANSWERS:
        reply = chat(server, messages, return_token_ids=True, **fields)
        seen.append(reply["prompt_token_ids"])
        message = reply["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        for call in calls:
            call["function"]["arguments"] = json.dumps({"a": "x", "b": 1})
        messages.append({name: value for name, value in message.items() if value is not None})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "here"} for call in calls]
        messages += results or [{"role": "user", "content": "Go on."}]
    return messages, seen


def test_a_chat_is_a_chain_of_turns() -> None:
    server = agents_site()
    _, seen = run_chat(server)
    turns = tree(server, "s")
    assert [turn["parent"] for turn in turns] == [None, "t0", "t1"]
    assert [turn["continues"] for turn in turns] == ["it is the first turn of the session", None, None]
    assert list(prompts(turns).values()) == seen
    for turn, text in zip(turns, ANSWERS, strict=True):
        assert TOKENIZER.decode(turn["token_ids"][:-1], False) == text
        assert turn["token_ids"][-1] == EOS
        assert len(turn["token_logprobs"]) == len(turn["token_ids"])
        assert (turn["finish_reason"], turn["stop_detail"]) == ("stop", "eos")
    assert TOKENIZER.decode(turns[1]["new_prompt_ids"], False) == (
        "<|im_end|>\n<|im_start|>tool\nhere<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_the_reply_is_the_same_without_a_session(stream: bool) -> None:
    server = agents_site()
    body = {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS, "request_id": "r", "stream": stream}
    answers = [server.post("/v1/chat/completions", body, headers=named) for named in ({}, {"X-Session-ID": "s"})]
    texts = [json.dumps(answer.text) for answer in answers]
    created = [text[text.index("created") + 11 :][:10] for text in texts]
    assert texts[0].replace(created[0], "") == texts[1].replace(created[1], "")
    assert len(tree(server, "s")) == 1


def test_logprobs_of_the_tree_are_those_of_the_reply() -> None:
    server = agents_site()
    reply = chat(server, [{"role": "user", "content": "q"}], logprobs=True)
    (turn,) = tree(server, "s")
    assert turn["token_logprobs"] == [one["logprob"] for one in reply["choices"][0]["logprobs"]["content"]]
    assert turn["logprobs_mode"] == "raw"
    chat(server, [{"role": "user", "content": "q"}], "other")
    assert tree(server, "other")[0]["token_logprobs"] == turn["token_logprobs"]


def test_choices_are_children() -> None:
    server = agents_site("One", "Two")
    reply = chat(server, [{"role": "user", "content": "q"}], n=3, seed=5)
    second = reply["choices"][1]["message"]["content"]
    chat(
        server,
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": second}, {"role": "user", "content": "x"}],
    )
    turns = tree(server, "s")
    assert [turn["seed"] for turn in turns[:3]] == [5, 6, 7]
    assert [turn["parent"] for turn in turns] == [None, None, None, "t1"]


def test_a_stream_is_recorded_with_its_end() -> None:
    server = agents_site()
    events = server.events(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS},
        headers={"X-Session-ID": "s"},
    )
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    (turn,) = tree(server, "s", "?messages=1")
    assert turn["message"]["content"] == text
    assert turn["messages"] == [{"role": "user", "content": "q"}]
    (call,) = turn["message"]["tool_calls"]
    streamed = [one for event in events for one in event["choices"][0]["delta"].get("tool_calls") or ()]
    assert call["id"] == streamed[0]["id"]


def test_responses_continue() -> None:
    server = agents_site()
    items: list[Any] = [{"role": "user", "content": "Where?"}]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    for _ in ANSWERS:
        body = {"input": items, "instructions": "Be.", "tools": [tool]}
        reply = server.post("/sessions/s/v1/responses", body).json()
        items += reply["output"]
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "here"} for call in calls]
        items += results or [{"role": "user", "content": "Go on."}]
    assert [turn["parent"] for turn in tree(server, "s")] == [None, "t0", "t1"]


def test_calls_of_custom_tools_and_namespaces_continue() -> None:
    patch = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    look = '<tool_call>\n{"name": "eyes__look", "arguments": {"a": 1}}\n</tool_call>'
    server = agents_site(patch + "\n" + look, "Done.")
    function = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    tools = [{"type": "custom", "name": "patch"}, {"type": "namespace", "name": "eyes", "tools": [function]}]
    items: list[Any] = [{"role": "user", "content": "Where?"}]
    for _ in range(2):
        answer = server.post("/sessions/s/v1/responses", {"input": items, "tools": tools})
        assert answer.status_code == 200, answer.text
        items += answer.json()["output"]
        for call in [item for item in answer.json()["output"] if item["type"].endswith("_call")]:
            items.append({"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "here"})
    assert {"custom_tool_call", "function_call"} < {item.get("type") for item in items}
    assert [turn["parent"] for turn in tree(server, "s")] == [None, "t0"]


def test_messages_continue() -> None:
    server = agents_site()
    messages: list[Any] = [{"role": "user", "content": "Where?"}]
    tool = {"name": "look", "input_schema": {"type": "object"}}
    for _ in ANSWERS:
        body = {"model": "tiny", "messages": messages, "system": "Be.", "tools": [tool], "max_tokens": 400}
        answer = server.post("/v1/messages", body, headers={"X-Claude-Code-Session-Id": "s"})
        assert answer.status_code == 200, answer.text
        content = answer.json()["content"]
        messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "here"} for call in calls]
        messages.append({"role": "user", "content": results or "Go on."})
    assert [turn["parent"] for turn in tree(server, "s")] == [None, "t0", "t1"]


def test_an_answer_that_was_cut_is_ended_outside_of_the_loss() -> None:
    server = agents_site("A long answer", "Yes")
    first = chat(server, [{"role": "user", "content": "q"}], max_tokens=5)["choices"][0]["message"]
    chat(server, [{"role": "user", "content": "q"}, first, {"role": "user", "content": "x"}])
    turns = tree(server, "s")
    assert turns[0]["finish_reason"] == "length"
    assert turns[1]["parent"] == "t0"
    assert TOKENIZER.decode(turns[1]["new_prompt_ids"], False).startswith("<|im_end|>\n<|im_start|>user\nx")


def test_a_prefilled_answer_is_one_message() -> None:
    server = agents_site(" fox", "Yes")
    question = {"role": "user", "content": "q"}
    begun = {"role": "assistant", "content": "The quick"}
    reply = chat(server, [question, begun], continue_final_message=True, add_generation_prompt=False)
    text = reply["choices"][0]["message"]["content"]
    joined = {"role": "assistant", "content": "The quick" + text}
    chat(server, [question, joined, {"role": "user", "content": "x"}])
    turns = tree(server, "s")
    assert [turn["parent"] for turn in turns] == [None, "t0"]


def test_what_does_not_continue_says_why() -> None:
    server = agents_site("A")
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "A"}
    system = {"role": "system", "content": "z"}
    chat(server, [question])
    chat(server, [question])
    chat(server, [{"role": "user", "content": "p"}])
    chat(server, [question, {"role": "assistant", "content": "B"}, question])
    chat(server, [question, answer, question], tools=None)
    chat(server, [question, answer, question], chat_template_kwargs={"x": 1})
    chat(server, [question, answer, system, question])
    reasons = [turn["continues"] for turn in tree(server, "s")]
    assert reasons == [
        "it is the first turn of the session",
        "no message is an answer of the session",
        "message 0 differs",
        "message 1 differs",
        "the tools differ",
        "the template or its variables differ",
        None,
    ]


def test_history_of_the_template() -> None:
    drops = "{% for m in messages %}{{ m.role }}:{{ m.content | upper }};{% endfor %}assistant:"
    server = agents_site("a", chat_template=drops, session_history="template")
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    chat(server, [question], tools=None)
    chat(server, [question, answer, question], tools=None)
    turns = tree(server, "s")
    assert turns[1]["continues"] == "the chat template rewrites earlier turns"
    assert TOKENIZER.decode(turns[1]["new_prompt_ids"], False) == "user:Q;assistant:A;user:Q;assistant:"


def test_sequences_count_each_token_once_or_in_each_leaf() -> None:
    server = agents_site("A", "B")
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "A"}
    chat(server, [question])
    for text in ("x", "y"):
        chat(server, [question, answer, {"role": "user", "content": text}])
    turns = tree(server, "s")
    rendered = prompts(turns)
    for shared, counts in (("once", [4, 2]), ("all", [4, 4])):
        rows = server.get(f"/sessions/s/sequences?shared={shared}").json()["sequences"]
        assert [row["turns"] for row in rows] == [["t0", "t1"], ["t0", "t2"]]
        assert [sum(row["loss_mask"]) for row in rows] == counts
        for row, turn in zip(rows, turns[1:], strict=True):
            assert row["token_ids"] == rendered[turn["turn_id"]] + turn["token_ids"]
            sampled = [logprob for logprob, counted in zip(row["logprobs"], row["loss_mask"], strict=True) if counted]
            assert set(sampled) <= set(turns[0]["token_logprobs"] + turn["token_logprobs"])
            assert len(row["loss_mask"]) == len(row["token_ids"])


def test_base64_and_msgpack() -> None:
    server = agents_site("A")
    chat(server, [{"role": "user", "content": "q"}])
    (plain,), (packed,) = tree(server, "s"), tree(server, "s", "?format=base64")
    for name, kind in (("token_ids", "<i4"), ("new_prompt_ids", "<i4"), ("token_logprobs", "<f4")):
        assert np.frombuffer(base64.b64decode(packed[name]), kind).tolist() == plain[name]


def test_a_trainer_takes_closed_sessions() -> None:
    server = agents_site("A")
    for name in ("a", "b"):
        chat(server, [{"role": "user", "content": "q"}], name)
    assert server.get("/sessions/next").json() == {
        "session_id": None,
        "lease_end": None,
        "metadata": None,
        "tree": None,
    }
    assert server.post("/sessions/a/metadata", {"metadata": {"reward": 1.5}}).status_code == 200
    assert server.post("/sessions/a/metadata", {"metadata": {"step": 2}, "turn_id": "t0"}).status_code == 200
    assert server.post("/sessions/a/metadata", {"score": [1, 2]}).status_code == 200  # the object itself
    refused = server.post("/sessions/a/metadata", {"turn_id": "t0", "step": 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] in ("metadata", "step")
    assert server.post("/sessions/a/close").json()["state"] == "closed"
    states = {one["session_id"]: one["state"] for one in server.get("/sessions").json()["sessions"]}
    assert states == {"a": "closed", "b": "idle"}
    taken = server.get("/sessions/next?lease=1000").json()
    assert (taken["session_id"], taken["metadata"]) == ("a", {"reward": 1.5, "score": [1, 2]})
    assert taken["tree"]["turns"][0]["metadata"] == {"step": 2}
    assert server.get("/sessions/next").json()["session_id"] is None
    assert server.request("DELETE", "/sessions/a").json() == {"session_id": "a", "deleted": True}
    assert server.get("/sessions/a/tree").status_code == 404


def test_a_lease_that_ends_gives_the_session_to_another_trainer() -> None:
    server = agents_site("A")
    chat(server, [{"role": "user", "content": "q"}])
    server.post("/sessions/s/close")
    assert server.get("/sessions/next?lease=0").json()["session_id"] == "s"
    assert server.get("/sessions/next?lease=1000").json()["session_id"] == "s"
    assert server.get("/sessions/next").json()["session_id"] is None


def test_a_clock_that_is_set_ends_no_lease_and_drops_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    server = agents_site("A", max_sessions=1)
    chat(server, [{"role": "user", "content": "q"}])
    server.post("/sessions/s/close")
    assert server.get("/sessions/next?lease=1000").json()["session_id"] == "s"
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert server.get("/sessions/next?wait=0").json()["session_id"] is None
    assert server.post("/sessions", {}).json()["error"]["code"] == "too_many_sessions"


def test_a_session_that_is_made() -> None:
    server = agents_site("A")
    created = server.post("/sessions", {"metadata": {"task": 1}}).json()
    assert created["base_path"] == f"/sessions/{created['session_id']}"
    assert server.get(created["base_path"]).json()["metadata"] == {"task": 1}
    assert server.get("/sessions?state=open").json()["sessions"][0]["session_id"] == created["session_id"]
    answer = server.post("/sessions", {"session_id": created["session_id"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_exists")


def test_sessions_belong_to_their_key() -> None:
    server = agents_site("A", api_key=["one", "two"])
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"messages": [{"role": "user", "content": "q"}]}
    assert server.post("/v1/chat/completions", body, headers=one | {"X-Session-ID": "s"}).status_code == 200
    assert len(tree(server, "s", headers=one)) == 1
    for method, path in (("GET", "/sessions/s"), ("GET", "/sessions/s/tree"), ("GET", "/sessions/s/sequences"),
                         ("POST", "/sessions/s/close"), ("DELETE", "/sessions/s")):  # fmt: skip
        answer = server.request(method, path, headers=two)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert server.get("/sessions", headers=two).json() == {"sessions": []}
    assert server.get("/sessions").status_code == 401


@pytest.mark.slow
def test_bounds_are_named() -> None:
    server = agents_site("A", max_sessions=2)
    body = {"messages": [{"role": "user", "content": "q"}]}
    for name in ("a", "b"):
        chat(server, body["messages"], name)
    for answer in (
        server.post("/v1/chat/completions", body, headers={"X-Session-ID": "c"}),
        server.post("/sessions"),
        server.post("/sessions/c/v1/messages", {"model": "tiny", "max_tokens": 5} | body),
    ):
        assert answer.status_code == 429
        assert "--max-sessions" in answer.text
    chat(server, body["messages"], None)
    chat(server, body["messages"], "a")
    small = agents_site("A" * 3000, max_session_bytes=1 << 16)
    for _ in range(30):
        answer = small.post("/v1/chat/completions", body, headers={"X-Session-ID": "s"})
        if answer.status_code != 200:
            break
    assert answer.status_code == 429
    assert "--max-session-bytes" in answer.text


def test_ids_that_no_path_can_have_are_refused() -> None:
    server = agents_site("A")
    messages = [{"role": "user", "content": "q"}]
    for name in ("x" * 257, "next", "..", ".", "a/b", "é", "a\n", 5, [], True):
        answer = server.post("/v1/chat/completions", {"messages": messages, "session_id": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id"), name
        answer = server.post("/sessions", {"session_id": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id"), name
    assert server.get("/sessions").json() == {"sessions": []}


def test_the_path_of_an_id_with_odd_characters() -> None:
    server = agents_site("A")
    for name in ("a b", "a?b", "a#b", "a%2Fb", "a;b", "..."):
        base_path = server.post("/sessions", {"session_id": name}).json()["base_path"]
        chat(server, [{"role": "user", "content": "q"}], name)
        assert len(server.get(f"{base_path}/tree").json()["turns"]) == 1


def test_metadata_that_a_reply_cannot_have_is_refused() -> None:
    server = agents_site("A")
    server.post("/sessions", {"session_id": "s"})
    for depth, statuses in ((100, {200}), *((depth, {200, 400}) for depth in range(700, 1000, 20)), (2000, {400})):
        nested = b'{"x":' + b"[" * depth + b"]" * depth + b"}"
        assert server.request("POST", "/sessions/s/metadata", content=nested).status_code in statuses
        for form in ("application/json", "application/msgpack"):
            assert server.get("/sessions/s", headers={"Accept": form}).status_code == 200
            assert server.get("/sessions/s/tree", headers={"Accept": form}).status_code == 200
    for path, body in (("/sessions", {"metadata": {"x": [1 << 64]}}), ("/sessions/s/metadata", {"x": -(1 << 65)})):
        answer = server.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_messages_that_are_nested_too_deeply_for_their_reply() -> None:
    """Large bodies are read in a thread, where nesting may be deeper than in the event loop."""
    server = agents_site("A", max_model_len=1 << 16)
    for depth in range(880, 1000, 20):
        nested = f'"extra": {"[" * depth}{"]" * depth}, "padding": "{"x" * (1 << 15)}"'
        content = f'{{"messages": [{{"role": "user", "content": "q", {nested}}}]}}'
        answer = server.request("POST", "/sessions/s/v1/chat/completions", content=content)
        assert answer.status_code in (200, 400), depth
        for form in ("application/json", "application/msgpack"):
            assert server.get("/sessions/s/tree?messages=1", headers={"Accept": form}).status_code == 200


def test_messages_that_msgpack_cannot_have_are_json_text() -> None:
    server = agents_site("A")
    messages = [{"role": "user", "content": "q", "extra": 10**30}]
    chat(server, messages)
    assert tree(server, "s", "?messages=1")[0]["messages"] == messages
    answer = server.get("/sessions/s/tree?messages=1", headers={"Accept": "application/msgpack"})
    assert json.loads(msgspec.msgpack.decode(answer.content)["turns"][0]["messages"]) == messages


def test_a_session_is_given_to_no_trainer_that_has_hung_up() -> None:
    server = agents_site("A")
    server.post("/sessions", {"session_id": "s"})

    async def scene() -> None:
        trainer = Caller(server, "/sessions/next", b"")
        trainer.scope |= {"method": "GET", "query_string": b"wait=300"}
        await trainer.wait_for(lambda _: trainer.is_read)
        trainer.hang_up()
        await trainer.task
        async with server.client() as client:
            assert (await client.post("/sessions/s/close")).status_code == 200
            assert (await client.get("/sessions/next")).json()["session_id"] == "s"

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sessions?state=x", "state"),
        ("/sessions?wait=x", "wait"),
        ("/sessions?limit=0", "limit"),
        ("/sessions/next?lease=-1", "lease"),
        ("/sessions/s/tree?format=x", "format"),
        ("/sessions/s/sequences?shared=x", "shared"),
    ],
)
def test_bad_queries_are_named(path: str, field: str) -> None:
    answer = agents_site().get(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_without_the_option_nothing_is_kept() -> None:
    server = agents_site("A", sessions=False)
    chat(server, [{"role": "user", "content": "q"}])
    answer = server.get("/sessions/s/tree")
    assert answer.status_code == 404
    assert "--sessions" in server.get("/sessions").json()["error"]["message"]


def test_a_server_without_text_keeps_no_sessions() -> None:
    from tokserve.config.resolve import resolve

    with pytest.raises(StartError, match="option sessions: needs a tokenizer"):
        resolve(Config.make(model="demo", sessions=True, tokens_only=True))


def test_a_session_in_the_path_of_a_server_with_a_root_path() -> None:
    """uvicorn puts the root path before the path of every request."""
    server = agents_site("A", root_path="/llm")

    async def send() -> int:
        transport = httpx.ASGITransport(server.app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}
            return (await client.post("/llm/sessions/a/v1/chat/completions", json=body)).status_code

    assert asyncio.run(send()) == 200
    assert [turn["parent"] for turn in tree(server, "a")] == [None]


@pytest.mark.parametrize(
    "path", ["/sessions", "/sessions/next", "/sessions/a", "/sessions/a/tree", "/sessions/a/sequences"]
)
def test_only_allowed_hosts_read_sessions(path: str) -> None:
    """A web page that has pointed its own name at this server reads no conversation."""
    server = agents_site("A", allowed_hosts=["localhost"])
    answer = server.post(
        "/sessions/a/v1/chat/completions",
        {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9},
        headers={"Host": "evil.example"},
    )
    assert answer.status_code == 200  # as /v1/chat/completions does
    assert server.get(path, headers={"Host": "localhost:8000"}).status_code == 200
    refused = server.get(path, headers={"Host": "evil.example"})
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "host_not_allowed"


def test_sessions_are_counted() -> None:
    server = agents_site()
    messages, _ = run_chat(server)
    chat(server, [{"role": "user", "content": "other"}])
    chat(server, messages, temperature=0.5)
    text = server.get("/metrics").text.replace(',model_name="tiny"', "")
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tokserve:session"))
    assert {name: float(value) for name, value in lines if "_bytes" not in name} == {
        'tokserve:sessions{engine="0"}': 1.0,
        'tokserve:session_files_stale{engine="0"}': 0.0,
        'tokserve:session_blocks{engine="0"}': 0.0,
        'tokserve:session_cache_hits_total{engine="0"}': 0.0,
        'tokserve:session_turns_total{engine="0",kind="continued"}': 3.0,
        'tokserve:session_turns_total{engine="0",kind="root"}': 2.0,
        'tokserve:session_turns_total{engine="0",kind="lost"}': 0.0,
        'tokserve:session_roots_total{engine="0",reason="it is the first turn of the session"}': 1.0,
        'tokserve:session_roots_total{engine="0",reason="message N differs"}': 1.0,
    }
    assert "tokserve:sessions" not in site(endless).get("/metrics").text


def test_a_server_that_is_made_later_has_the_sessions(tmp_path: Path) -> None:
    options = {"session_dir": str(tmp_path), "api_key": ["a", "b"]}
    keys = [{"Authorization": f"Bearer {key}"} for key in ("a", "b")]
    server = agents_site(**options)
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 400}
    assert server.post("/sessions/s/v1/chat/completions", body, headers=keys[0]).status_code == 200
    assert server.post("/sessions/s/metadata", {"reward": 1}, headers=keys[0]).status_code == 200
    assert server.post("/sessions/s/close", {}, headers=keys[0]).status_code == 200
    before = tree(server, "s", headers=keys[0])
    service = server.app.state.serving.state_of(LocalService).service
    service.files.close()
    server = agents_site(**options)
    assert tree(server, "s", headers=keys[0]) == before
    assert server.get("/sessions/s/tree", headers=keys[1]).status_code == 404
    taken = server.get("/sessions/next", headers=keys[0]).json()
    assert (taken["session_id"], taken["metadata"]) == ("s", {"reward": 1})
    with pytest.raises(StartError, match="another server keeps its sessions"):
        agents_site(**options)
