"""What rendered requests say of their prompts: ids, text, places of tokens, the assistant's tokens; responses too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replies import good
from tests.server.byte_tokenizer import TOKENIZER, ids
from tests.server.scripted_llm import says
from tests.server.site import Site, chat_site, site
from tests.text.tool_templates import HERMES, OPENED

CHAT, COMPLETIONS, RESPONSES, GENERATE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/inference/v1/generate",
)
TURNS = [
    {"role": "user", "content": "a\u00e9?"},
    {"role": "assistant", "content": "one \U0001f600"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "two"},
]
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}[end]{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ALL = {"return_token_offsets": True, "return_prompt_text": True, "return_assistant_tokens_mask": True}


def rendered(s: Site, path: str = CHAT, **body: Any) -> dict[str, Any]:
    actual: dict[str, Any] = good(s.post(path + "/render", body))
    return actual


def test_a_rendered_request_has_an_id() -> None:
    s = site(says("ok"))
    first, second = (rendered(s, messages=TURNS[:1])["request_id"] for _ in range(2))
    assert first != second
    assert rendered(s, messages=TURNS[:1], request_id="mine")["request_id"] == "mine"
    answer = s.post(CHAT + "/render", {"messages": TURNS[:1], "request_id": "mine"}, headers={"X-Request-Id": "header"})
    assert good(answer)["request_id"] == "header" and answer.headers["x-request-id"] == "header"
    several = good(s.post(COMPLETIONS + "/render", {"prompt": ["a", "b"]}))
    names = [one["request_id"] for one in several]
    assert [name.rpartition("-")[2] for name in names] == ["0", "1"] and len({name[:-2] for name in names}) == 1
    replies = [good(s.post(GENERATE, several[0]))["request_id"] for _ in range(2)]  # one may be sent many times at once
    assert all(name.startswith(f"generate-tokens-{names[0]}-") for name in replies) and replies[0] != replies[1]
    renamed = several[0] | {"request_id": "mine"}
    assert good(s.post(GENERATE, renamed))["request_id"] == "generate-tokens-mine"
    refused = s.post(CHAT, {"messages": TURNS[:1], "request_id": "mine"}, headers={"X-Request-Id": "header"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "request_id"


def test_the_text_of_a_prompt_and_the_places_of_its_tokens() -> None:
    s = chat_site("ok", HERMES)
    plain = rendered(s, messages=TURNS[:1], request_id="r")
    assert plain.keys().isdisjoint(("token_offsets", "prompt_text", "assistant_tokens_mask"))
    full = rendered(s, messages=TURNS[:1], request_id="r", return_token_offsets=True, return_prompt_text=True)
    text = full.pop("prompt_text")
    offsets = full.pop("token_offsets")
    assert full == plain and text == TOKENIZER.decode(full["token_ids"], False)
    assert len(offsets) == len(full["token_ids"]) and [first for first, _ in offsets] == sorted(
        first for first, _ in offsets
    )
    seen = {text[first:last] for first, last in offsets}
    assert "".join(dict.fromkeys(seen)) and seen >= {"a", "\u00e9", "?"} and offsets[-1][1] == len(text)
    (one,) = good(s.post(COMPLETIONS + "/render", {"prompt": "h\u00e9", **{name: True for name in list(ALL)[:2]}}))
    assert one["prompt_text"] == "h\u00e9" and one["token_offsets"][0] == [0, 1] and one["token_offsets"][-1] == [1, 2]
    good(s.post(GENERATE, one))


@pytest.mark.parametrize("source", [HERMES, MARKED], ids=["turns", "marks"])
def test_the_mask_of_the_assistants_tokens(source: str) -> None:
    s = chat_site("ok", source)
    one = rendered(s, messages=TURNS, add_generation_prompt=False, **ALL)
    mask, offsets = one["assistant_tokens_mask"], one["token_offsets"]
    assert len(mask) == len(one["token_ids"]) == len(offsets)
    end = "[end]" if source == MARKED else "<|im_end|>\n"
    chosen = [token for token, is_answer in zip(one["token_ids"], mask, strict=True) if is_answer]
    assert TOKENIZER.decode(chosen, False) == f"one \U0001f600{end}two{end}"
    assert good(s.post(GENERATE, one))["choices"]
    open_turn = rendered(s, messages=TURNS[:2], continue_final_message=True, **ALL)
    mask = open_turn["assistant_tokens_mask"]
    chosen = [token for token, is_answer in zip(open_turn["token_ids"], mask, strict=True) if is_answer]
    assert TOKENIZER.decode(chosen, False) == "one \U0001f600"
    no_answer = rendered(s, messages=TURNS[:1], **ALL)
    assert set(no_answer["assistant_tokens_mask"]) == {0}


def refusal(answer: Any) -> tuple[str, str]:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["code"]


def test_extras_that_cannot_be_told_are_refused() -> None:
    opened = chat_site("ok", OPENED)  # whose generation prompt opens a thought that earlier turns do not show
    body = {"messages": TURNS, "add_generation_prompt": False}
    answer = opened.post(CHAT + "/render", body | {"return_assistant_tokens_mask": True})
    assert refusal(answer) == ("return_assistant_tokens_mask", "unsupported") and "messages[1]" in answer.text
    s = chat_site("ok", HERMES)
    answer = s.post(COMPLETIONS + "/render", {"prompt": ids("a"), "return_prompt_text": True})
    assert refusal(answer) == ("return_prompt_text", "unsupported")


def test_a_response_is_rendered_as_it_is_generated() -> None:
    s = chat_site("ok", HERMES)
    tool = {"type": "function", "name": "ping", "parameters": {"type": "object", "properties": {}}}
    body = {"input": "hi", "instructions": "Be brief.", "tools": [tool], "max_output_tokens": 5, "request_id": "r"}
    one = rendered(s, RESPONSES, **body)
    good(s.post(RESPONSES, body | {"request_id": "s"}))
    assert one["token_ids"] == list(s.llm.calls[-1].prompt) and one["request_id"] == "r"
    assert one["sampling_params"]["max_tokens"] == 5 and "ping" in TOKENIZER.decode(one["token_ids"], False)
    generated = good(s.post(GENERATE, one))
    assert TOKENIZER.decode(generated["choices"][0]["token_ids"]) == "ok"
    assert refusal(s.post(RESPONSES + "/render", {"input": 5}))[0] == "input"
    unknown = s.post(RESPONSES + "/render", {"input": "hi", "previous_response_id": "resp_1"})
    assert unknown.json()["error"]["param"] == "previous_response_id"
