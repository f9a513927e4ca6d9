"""Attacks on the routes of other dialects, and on drafts, masks and tools: more of everything than any client sends.

The server of a soak needs `--sglang-api`; elsewhere the attacks on SGLang's routes get a 404.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

from tests.hostile.attack import CHAT, COMPLETIONS, GENERATE, Answer, attack, leave, post, words

MESSAGES, COUNT_TOKENS, SGLANG = "/v1/messages", "/v1/messages/count_tokens", "/generate"
REFUSED_NESTED = ("input_embeds", "image_data", "session_params", "custom_logit_processor")  # of SGLang, read by hand


def turn(content: Any, role: str = "user", **others: Any) -> dict[str, Any]:
    """A body of /v1/messages with this turn."""
    return {"model": "demo", "max_tokens": 4, "messages": [{"role": role, "content": content}], **others}


def nested(depth: int, before: bytes, after: bytes) -> bytes:
    """A body with lists in lists at a place."""
    return before + b"[" * depth + b"]" * depth + after


# --- Anthropic's routes ---


@attack
def many_blocks(url: str, rng: random.Random) -> list[Answer]:
    """100,000 blocks: of a turn, of the system prompt, of a tool's result, and of references to tools."""
    text = {"type": "text", "text": "x"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text] * 100_000}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    bodies = [
        turn([text] * 100_000),
        turn("x", system=[text] * 100_000),
        turn([result]),
        turn([call] * 50_000, "assistant"),
    ]
    return [post(url, path, body) for body in bodies for path in (MESSAGES, COUNT_TOKENS)]


@attack
def many_tools(url: str, rng: random.Random) -> list[Answer]:
    """10,000 tools, shown to the model, one of which must be called; and tools that are defined within turns."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    anthropic = [{"name": f"f{i}", "description": "d", "input_schema": schema} for i in range(10_000)]
    functions = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(10_000)]
    user = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    return [
        post(url, MESSAGES, turn("x", tools=anthropic)),
        post(url, MESSAGES, turn("x", tools=anthropic, tool_choice={"type": "any"})),
        post(url, CHAT, user | {"tools": functions, "tool_choice": "required"}),
        post(url, CHAT, user | {"tools": functions, "tool_choice": "auto"}),
        post(
            url,
            "/v1/responses",
            {
                "input": "x",
                "max_output_tokens": 4,
                "tool_choice": "required",
                "tools": [{"type": "function", "name": f"f{i}", "parameters": schema} for i in range(10_000)],
            },
        ),
    ]


@attack
def recursive_tools(url: str, rng: random.Random) -> list[Answer]:
    """Schemas that contain themselves, refer to each other twice, or are 400 deep."""
    itself = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    doubling: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"}}
        for i in range(40)
    } | {"d40": {"type": "string"}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    schemas = [itself, {"type": "object", "$defs": doubling, "properties": {"a": {"$ref": "#/$defs/d0"}}}, deep]
    return [
        post(url, MESSAGES, turn("x", tools=[{"name": "f", "input_schema": schema}], tool_choice={"type": "any"}))
        for schema in schemas
    ]


@attack
def nested_bodies(url: str, rng: random.Random) -> list[Answer]:
    """Bodies nested as deep as they are decoded, and deeper."""
    open_message = b'{"model":"demo","max_tokens":4,"messages":[{"role":"user","content":'
    places = [
        (MESSAGES, open_message, b"}]}"),
        (MESSAGES, open_message + b'"x"}],"system":', b"}"),
        (CHAT, b'{"messages":[{"role":"user","content":', b"}]}"),
        *((SGLANG, b'{"input_ids":[5],"%b":' % name.encode(), b"}") for name in REFUSED_NESTED),
    ]
    return [post(url, path, nested(depth, *around)) for path, *around in places for depth in (300, 500, 900, 1_000_000)]


# --- SGLang's dialect ---


@attack
def many_prompts(url: str, rng: random.Random) -> list[Answer]:
    """10,000 prompts, as texts and as ids; and as many as are allowed, with parameters of their own."""
    short = {"max_new_tokens": 1, "ignore_eos": True}
    most = 4096
    return [
        post(url, SGLANG, {"text": ["a"] * 10_000, "sampling_params": short}),
        post(url, SGLANG, {"input_ids": [[5, 6]] * 10_000, "sampling_params": short}),
        post(url, SGLANG, {"input_ids": [[5, 6]] * most, "sampling_params": [short] * most, "return_logprob": True}),
        post(url, SGLANG, {"input_ids": [[5] * 2000] * 200, "sampling_params": short}),
    ]


@attack
def sglang_grammars(url: str, rng: random.Random) -> list[Answer]:
    """Costly expressions, a schema that fails, and the grammars that it does not take."""
    bomb = "".join(f"(a|b|ab){{0,{100 + i}}}" for i in range(rng.randrange(300, 400)))
    forms: list[dict[str, Any]] = [
        {"regex": bomb},
        {"regex": "(a|b|ab)*" * 1800},
        {"ebnf": "root ::= " + '"a" ' * 100_000},
        {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}},
        {"json_schema": "[" * 100_000},
    ]
    return [post(url, SGLANG, {"input_ids": [5], "sampling_params": form | {"max_new_tokens": 8}}) for form in forms]


# --- drafts ---


@attack
def draft_corpora(url: str, rng: random.Random) -> list[Answer]:
    """Outputs to be kept as drafts: many groups, a very long one, very many short ones; then requests of the groups."""
    ids = [rng.randrange(3, 250) for _ in range(20_000)]
    bodies = [{"draft_group": f"{rng.random()}", "token_ids": [ids[i:]]} for i in range(30)]
    bodies.append({"draft_group": "long", "token_ids": [ids * 80]})
    bodies.append({"draft_group": "short", "token_ids": [ids[i : i + 5] for i in range(15_000)]})
    answers = [post(url, "/add_draft_corpus", body) for body in bodies]
    used = [
        post(url, GENERATE, {"token_ids": ids[:4], "draft_group": group, "sampling_params": {"max_tokens": 8, "n": 8}})
        for group in ("long", "short")
    ]
    return answers + used + [post(url, "/remove_draft_corpus", {"draft_group": name}) for name in ("long", "short")]


@attack
def large_predictions(url: str, rng: random.Random) -> list[Answer]:
    """Predictions of 10 MB, whole and in parts, and as many ids of drafts as anybody can send."""
    user = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    parts = [{"type": "text", "text": "x"}] * 100_000
    contents: list[Any] = [words(10_000_000), parts, words(2000)]
    answers = [
        post(url, path, body | {"prediction": {"type": "content", "content": content}})
        for content in contents
        for path, body in ((CHAT, user), (COMPLETIONS, {"prompt": "a", "max_tokens": 4}))
    ]
    for count in (1_000_000, 2000):
        raw = json.dumps({"token_ids": [5], "draft_token_ids": [7] * count, "sampling_params": {"n": 64}}).encode()
        answers.append(post(url, GENERATE, raw))
    return answers


# --- masks ---


@attack
def large_masks(url: str, rng: random.Random) -> list[Answer]:
    """The sampling masks of 64 choices, of the whole vocabulary."""
    params = {"n": 64, "max_tokens": 2000, "top_k": -1, "ignore_eos": True, "return_sampling_mask": True, "seed": 1}
    flat = params | {"temperature": 2.0}
    return [
        post(url, GENERATE, {"token_ids": [5], "sampling_params": params | {"n": 512}}),
        post(url, GENERATE, {"token_ids": [5], "sampling_params": flat | {"n": 16, "max_tokens": 500, "logprobs": 20}}),
        post(
            url,
            SGLANG,
            {
                "input_ids": [5],
                "return_sampling_mask": True,
                "sampling_params": {"n": 512, "max_new_tokens": 2000, "ignore_eos": True, "temperature": 2.0},
            },
        ),
    ]


# --- choices ---


@attack
def many_choices_left(url: str, rng: random.Random) -> list[Answer]:
    """Requests with as many choices as allowed, from clients that disconnect."""
    params = {"n": 4, "max_tokens": 500, "ignore_eos": True, "seed": rng.randrange(1 << 30)}
    leave(url, COMPLETIONS, {"prompt": ["a"] * 4096, **params}, 2)
    time.sleep(2.0)  # the last client leaves after 20 ms; then its choices end one after the other
    return []
