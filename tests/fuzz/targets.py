"""What is fuzzed: functions of bytes that return, or raise what their callers expect; anything else is a finding."""

from __future__ import annotations

import asyncio
import atexit
import json
import random
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Message
from tokenizers import Tokenizer as Backend

from tests.server.byte_tokenizer import TOKENIZER
from tests.server.site import site
from tests.text.checkpoints import CHATML, KINDS
from tokserve.base.errors import RequestError
from tokserve.base.structs import UNREADABLE
from tokserve.dialects.anthropic import messages as anthropic_messages
from tokserve.dialects.openai import chat, completions, render, responses, tokenize
from tokserve.dialects.openai.derender import handlers
from tokserve.features.chat.chat import ChatTemplate
from tokserve.protocol import messages
from tokserve.protocol.columns import Column
from tokserve.protocol.params import RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt
from tokserve.server.http import body
from tokserve.server.tokens import aborts, generate_body
from tokserve.text.detokenizer import Detokenizer
from tokserve.text.tokenizer import Tokenizer

Target = Callable[[bytes], None]
Route = Callable[[Request], Coroutine[Any, Any, Any]]
LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)
SERVING = site().app.state.serving
TOKENIZERS = [Tokenizer(Backend.from_str(make())) for make in KINDS.values()]
CALLS = (
    "{% for m in messages %}{{ m['role'] | upper }}{{ m.content | trim }}{% for t in m.tool_calls or [] %}"
    "{{ t.function.name }}{{ t.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
TEMPLATES = [ChatTemplate(TOKENIZER), ChatTemplate(TOKENIZER, CHATML), ChatTemplate(TOKENIZER, CALLS)]
ATOMS: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    1.5,
    "",
    "x",
    "\u0000",
    "ä" * 50,
    "\ud800",
    [],
    {},
    [None],
    [[]],
    {"": {}},
    {"type": "text", "text": "a"},
    {"type": "image_url"},
    [{"type": "text"}],
    "{{ x }}",
    "{%",
]
KEYS = ["role", "content", "name", "tool_calls", "tool_call_id", "function", "arguments", "type", "text", "x"]


def bodies(data: bytes) -> None:
    """A body of any POST route, JSON or msgpack, up to the point where the engine would be asked."""
    if not data:
        return
    packed, raw = bool(data[0] & 1), data[1:]
    route = ROUTES[(data[0] >> 1) % len(ROUTES)]
    try:
        LOOP.run_until_complete(route(_request(raw, packed)))
    except RequestError as error:
        assert error.status < 500, error


def _request(raw: bytes, packed: bool) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    kind = body.MSGPACK if packed else body.JSON
    headers = [(b"content-type", kind.encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}, receive)


async def _generate(request: Request) -> None:
    packed = body.is_msgpack(request)
    requested = generate_body.decode_body(await SERVING.bodies.read(request), packed)
    prompt, fields = generate_body.prompt_of(requested)
    params = generate_body.decode_params(requested.sampling_params, packed)
    await SERVING.requests.check(
        request, SERVING.requests.request_of(request, requested, params, text=False), [prompt], fields
    )


async def _chat(request: Request) -> None:
    await chat.read_chat(SERVING, request)


async def _chat_tokens(request: Request) -> None:
    await chat.read_chat(SERVING, request, prompt="tokens")


async def _completions(request: Request) -> None:
    await completions.read_completion(SERVING, request)


async def _abort(request: Request) -> None:
    value, _ = await SERVING.bodies.load(request)
    aborts.read_target(value)


def _handler(
    handler: Callable[[Any, Request], Coroutine[Any, Any, Any]],
) -> Callable[[Request], Coroutine[Any, Any, Any]]:
    return lambda request: handler(SERVING, request)


ROUTES: list[Route] = [
    _generate,
    _chat,
    _chat_tokens,
    _completions,
    _abort,
    _handler(tokenize.tokenize),
    _handler(tokenize.detokenize),
    _handler(render.render_chat),
    _handler(render.render_completions),
    _handler(handlers.derender_chat),
    _handler(handlers.derender_completions),
    _handler(responses.read_response),
    _handler(anthropic_messages.read_messages),
    _handler(anthropic_messages.count_tokens),
]


def wire(data: bytes) -> None:
    """A message to the engine, or from it; what can be read is the same when it is written and read again."""
    for decode in (messages.decode_to_engine, messages.decode_from_engine):
        try:
            message = decode(data)
        except UNREADABLE:
            continue
        assert messages.encode(decode(messages.encode(message))) == messages.encode(message)


def template(data: bytes) -> None:
    """Conversations of wrong and right messages."""
    rng = random.Random(data)
    chosen = [_message(rng) for _ in range(rng.randrange(4))]
    try:
        rng.choice(TEMPLATES).render(
            chosen,
            add_generation_prompt=rng.random() < 0.5,
            continue_final_message=rng.random() < 0.3,
            kwargs=rng.choice([None, {}, {"x": rng.choice(ATOMS)}]),
        )
    except RequestError as error:
        assert error.status < 500, error


def _message(rng: random.Random) -> dict[str, Any]:
    message = {key: _value(rng, 3) for key in rng.sample(KEYS, rng.randrange(4))}
    if rng.random() < 0.8:
        message |= {"role": rng.choice(["user", "assistant", "system", "tool"])}
    if rng.random() < 0.7:
        message |= {"content": rng.choice(["hi", "", " a ", "<eos>", [{"type": "text", "text": "b"}]])}
    if rng.random() < 0.2:
        call = {"function": {"name": "f", "arguments": rng.choice(["{}", "{", "[" * 99, {}, None, '{"a": NaN}'])}}
        message |= {"tool_calls": [call, _value(rng, 2)][: rng.randrange(3)]}
    return message


def _value(rng: random.Random, depth: int) -> Any:
    if not depth or rng.random() < 0.6:
        return rng.choice(ATOMS)
    if rng.random() < 0.5:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {rng.choice(KEYS): _value(rng, depth - 1) for _ in range(rng.randrange(3))}


def detokenizer(data: bytes) -> None:
    """Any ids in any portions: the joined text is that of all ids, and a stop is found wherever it is cut."""
    if len(data) < 4:
        return
    tokenizer, skip = TOKENIZERS[data[0] % len(TOKENIZERS)], bool(data[0] & 64)
    ids = [int.from_bytes(data[i : i + 2], "big") % (tokenizer.vocab_size + 2) for i in range(4, len(data) - 1, 2)]
    edges = sorted({0, len(ids), data[1] % (len(ids) + 1), data[2] % (len(ids) + 1)})
    full = tokenizer.continuation(ids, skip)
    plain = Detokenizer(tokenizer, skip_special=skip)
    parts = [plain.push(ids[a:b])[0] for a, b in pairwise(edges)]
    assert "".join(parts) + plain.push((), True)[0] == full, (ids, edges)
    place = data[3] % (len(full) + 1)
    stop = full[place : place + 1 + data[3] % 5] or "zz"
    ends = []
    for cuts in (edges, list(range(len(ids) + 1))):
        stopping = Detokenizer(tokenizer, [stop, "q"], skip_special=skip)
        text = "".join(stopping.push(ids[a:b])[0] for a, b in pairwise(cuts)) + stopping.push((), True)[0]
        ends.append((text, stopping.hit))
        assert full.startswith(text) and stop not in text, (ids, cuts, stop)
    assert ends[0] == ends[1], (ids, edges, stop)


def seeds(name: str) -> list[bytes]:
    """Good inputs of a target, to begin with."""
    if name == "bodies":
        params = {"max_tokens": 5, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1.5}, "logprobs": 2, "n": 2}
        chat = [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "y"},
        ]
        choice = {"index": 0, "token_ids": [65, 66], "finish_reason": "stop", "logprobs": None}
        called = [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        ]
        tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
        values: list[Any] = [
            {"token_ids": [5, 6], "sampling_params": params, "stream": False, "request_id": "a", "cache_salt": "s"},
            {"token_ids_b64": "BQAAAA==", "sampling_params": params, "deadline_ms": 5},
            {"messages": chat, "stop": "x", "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
            {"tokens": [5, 6]},
            {"prompt": ["a", "b"], "echo": True, "n": 2, "logprobs": 1},
            {"prompt": [[5], [6]]},
            {"request_ids": ["a"]},
            {"group_id": "g"},
            {"prompt": "x", "return_token_strs": True},
            {"tokens": [5], "skip_special_tokens": True},
            {"input": "x", "instructions": "y", "text": {"format": {"type": "json_object"}}, "reasoning": {}},
            {"input": [*chat, *called], "tools": [tool], "tool_choice": {"type": "function", "name": "f"}},
            {"generate_responses": [{"choices": [choice]}], "request": {"messages": chat}},
            {"generate_responses": [{"choices": [choice], "prompt_token_ids": [5]}]},
        ]
        return [
            bytes([2 * route + packed]) + (msgspec.msgpack.encode(value) if packed else json.dumps(value).encode())
            for route in range(len(ROUTES))
            for packed in (0, 1)
            for value in values
        ]
    if name == "wire":
        sampling, options = SamplingParams(stop=["a"], logit_bias={5: 1.0}), RequestOptions(group_id="g")
        request = messages.EngineRequest("r#0", TokenPrompt(b"\5\0\0\0"), sampling, options, 3)
        rare = messages.RareFields(
            0, messages.Finish("stop", "eos", 2), values={"prompt_logprobs": Column(b"12345678", 8)}
        )
        step = messages.StepOutput(messages.StepStats(1, 2), ["r#0"], b"\5\0\0\0", b"", [], [rare])
        samples: list[Any] = [
            step,
            messages.Submit(1, "r", [request], "c"),
            messages.Abort(["r#0"]),
            messages.Reply(2, {"a": [1]}),
            messages.Call(2, "abort", {"keys": ["r"]}),
            messages.SubmitReply(1),
            messages.Dead("x"),
            messages.Ready(9, 9, 9, 9, [2], "0"),
        ]
        return [messages.encode(message) for message in samples]
    return [bytes(range(start, start + 24)) for start in range(0, 224, 8)]


TARGETS: dict[str, Target] = {"bodies": bodies, "wire": wire, "template": template, "detokenizer": detokenizer}
