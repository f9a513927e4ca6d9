"""Ids that a client keeps itself: NeMo-RL's and NeMo Gym's `required_prefix_token_ids`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.byte_tokenizer import EOS, VOCAB, ids
from tests.server.site import chat_site
from tests.text.tool_templates import HERMES

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "A"}
MESSAGES = [QUESTION, ANSWER, {"role": "user", "content": "x"}]
NEW = "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
PREFIX = [*ids("anything: "), *ids("A")]


@pytest.mark.parametrize("prefix", [PREFIX, [*PREFIX, EOS]])
def test_a_prompt_begins_with_the_ids_and_only_the_rest_is_rendered(prefix: list[int]) -> None:
    server = chat_site("Yes", HERMES)
    body = {"messages": MESSAGES, "required_prefix_token_ids": prefix}
    reply = server.post("/v1/chat/completions", body | {"return_token_ids": True})
    assert reply.json()["prompt_token_ids"] == [*prefix, *ids(NEW)]
    assert "x-ignored-fields" not in reply.headers
    assert server.post("/tokenize", body | {"model": "tiny"}).json()["tokens"] == [*prefix, *ids(NEW)]


def test_the_last_answer_may_have_the_ids() -> None:
    answer = ANSWER | {"prompt_token_ids": PREFIX[:-1], "generation_token_ids": [PREFIX[-1], EOS]}
    older = ANSWER | {"prompt_token_ids": [5], "generation_token_ids": [6]}
    messages = [QUESTION, older, QUESTION, answer, MESSAGES[-1]]
    reply = chat_site("Yes", HERMES).post("/v1/chat/completions", {"messages": messages, "return_token_ids": True})
    assert reply.json()["prompt_token_ids"] == [*PREFIX, EOS, *ids(NEW)]


def test_a_prefix_is_no_session() -> None:
    server = chat_site("Yes", HERMES, sessions=True)
    body = {"messages": MESSAGES, "required_prefix_token_ids": PREFIX}
    assert server.post("/v1/chat/completions", body, headers={"X-Session-ID": "s"}).status_code == 200
    assert server.get("/sessions").json() == {"sessions": []}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": [QUESTION]}, "required_prefix_token_ids"),
        ({"required_prefix_token_ids": []}, "required_prefix_token_ids"),
        ({"required_prefix_token_ids": [3, VOCAB]}, "required_prefix_token_ids[1]"),
        ({"required_prefix_token_ids": ["3"]}, "required_prefix_token_ids[0]"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "required_prefix_token_ids"),
    ],
)
def test_what_cannot_be_continued_is_named(changes: dict[str, Any], field: str) -> None:
    body = {"messages": MESSAGES, "required_prefix_token_ids": PREFIX} | changes
    answer = chat_site("Yes", HERMES).post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_template_that_cannot_be_continued_is_named() -> None:
    shouts = "{% for m in messages %}{{ m.content | upper }};{% endfor %}"
    body = {"messages": MESSAGES, "required_prefix_token_ids": PREFIX}
    answer = chat_site("Yes", shouts).post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    assert "does not write an answer as it is" in answer.json()["error"]["message"]


def test_the_capability_is_said() -> None:
    reply = chat_site("Yes").get("/v1/nemo-rl/prefix-token-capability").json()
    assert reply["active"] is reply["required_prefix_token_ids"] is reply["return_token_ids"] is True
