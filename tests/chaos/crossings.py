"""Requests that cross the features at random, the ways to ask one, and answers in one shape whichever way was gone.

A request is a prompt, sampling parameters and perhaps an adapter; a way is the rest: formats, msgpack, streams,
choices, terms.  No way may change an answer.  What the demo model's vocabulary holds is known here.
"""

from __future__ import annotations

import base64
import json
import random
import struct
from typing import Any

import httpx
import msgspec
import numpy as np

GENERATE = "/inference/v1/generate"
MSGPACK = "application/msgpack"
ADAPTERS = ("one", "two")
VOCAB, EOS, CONTEXT, FLOOR = 288, 287, 512, -9999.0
COMMON = (64, 65, 68, 72, 77, 82, 83, 220, 198, 15, 16, 240, 159, 286, EOS)  # ids that outputs have
STOPS = ["e", "al", "an", "5", " ", "n", "\ufffd", "\n", "<|im_end|>", "é", "ing"]
FORMS: list[dict[str, Any]] = [
    {"regex": "[ab]{2,9}c"},
    {"choice": ["été", "hiver"]},
    {"grammar": 'start: "(" start ")" | "x"'},
    {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
    {"json_object": True},
]
Body = dict[str, Any]


def ids(rng: random.Random, most: int) -> list[int]:
    """Some token ids."""
    count = rng.randrange(1, most + 1)
    return [rng.randrange(VOCAB) if rng.random() < 0.4 else rng.choice(COMMON) for _ in range(count)]


def request(rng: random.Random) -> Body:
    """`token_ids`, `sampling_params`, perhaps `model`.  Prompts begin alike, and end around the ends of pages."""
    shared = random.Random(rng.randrange(3))
    start = [shared.randrange(3, 285) for _ in range(CONTEXT)]
    length = rng.choice([0, 15, 16, 17, 47, 48, 49, 96, 97, rng.randrange(300)])
    body: Body = {"token_ids": start[:length] + ids(rng, 20), "sampling_params": parameters(rng)}
    if rng.random() < 0.08:
        body["token_ids"] = start[: CONTEXT - rng.randrange(1, 30)]
        body["sampling_params"].pop("max_tokens")
    if rng.random() < 0.3:
        body["sampling_params"]["prompt_logprobs"] = rng.choice([0, 0, 1, 5, -1])
        body["sampling_params"]["prompt_logprobs_start"] = rng.randrange(len(body["token_ids"]))
    return body | ({"model": rng.choice(ADAPTERS)} if rng.random() < 0.3 else {})


def parameters(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters of all sorts, with a seed."""
    most = rng.choice([1, 2, 5, 15, 16, 17, 33, 64, 100])
    options: list[tuple[float, dict[str, Any]]] = [
        (0.25, {"top_k": rng.choice([-1, 1, 2, 20, 1000])}),
        (0.25, {"top_p": rng.choice([1e-9, 0.5, 0.95, 1.0])}),
        (0.2, {"min_p": rng.choice([0.001, 0.3, 1.0])}),
        (0.2, {"presence_penalty": rng.choice([-2.0, 0.3, 2.0])}),
        (0.2, {"frequency_penalty": rng.choice([-2.0, 0.3, 2.0])}),
        (0.2, {"repetition_penalty": rng.choice([0.01, 0.9, 1.3, 100.0])}),
        (0.2, {"logit_bias": {str(id_): rng.choice([-100.0, 4.0, 300.0, 1e30]) for id_ in ids(rng, 5)}}),
        (0.15, {"allowed_token_ids": ids(rng, 60)}),
        (0.15, {"bad_token_ids": ids(rng, 20)}),
        (0.15, {"bad_token_sequences": [ids(rng, 3) for _ in range(4)]}),
        (0.25, {"stop_token_ids": ids(rng, 5)}),
        (0.2, {"stop_token_sequences": [ids(rng, 3) for _ in range(4)]}),
        (0.35, {"ignore_eos": True}),
        (0.15, {"repetition_detection": {"max_pattern_size": rng.randrange(1, 9), "min_count": rng.choice([2, 4])}}),
        (0.25, {"min_tokens": rng.randrange(most + 1)}),
        (0.6, {"logprobs": rng.choice([0, 0, 1, 3, 20, -1])}),
        (0.2, {"logprob_token_ids": ids(rng, 9)}),
        (0.25, {"stop": rng.sample(STOPS, 3)}),
        (0.1, {"bad_words": ["n", " a"]}),
        (0.2, {"include_stop_str_in_output": True}),
        (0.2, {"skip_special_tokens": False}),
        (0.15, {"structured_outputs": rng.choice(FORMS)}),
    ]
    chosen = {name: value for share, entry in options if rng.random() < share for name, value in entry.items()}
    return chosen | {
        "temperature": rng.choice([0.0, 0.0, 1e-30, 0.001, 0.7, 1.0, 1.0, 2.0]),
        "max_tokens": most,
        "seed": rng.choice([0, 7, -(2**63), 2**63 - 9, rng.randrange(2**40)]),
        "logprobs_mode": rng.choice(["raw", "temperature", "processed"]),
    }


def way(rng: random.Random, requested: Body) -> dict[str, Any]:
    """How a request is sent: fields of the body, and the formats `sent` and `back` of request and reply."""
    chosen: dict[str, Any] = {
        "logprobs_format": rng.choice(["objects", "arrays", "base64"]),
        "stream": rng.random() < 0.45,
        "output_mode": rng.choice(["tokens", "text"]),
        "return_token_ids": rng.random() < 0.3,
        "cache_salt": rng.choice([None, None, "s", "t"]),
        "priority": rng.choice([0, -5, 3, 2**40]),
        "group_id": rng.choice([None, "g"]),
        "deadline_ms": rng.choice([None, 10**8]),
        "sent": rng.choice(["json", "json", "msgpack", "bytes"]),
        "n": 1,
    }
    chosen["back"] = "json" if chosen["stream"] or rng.random() < 0.6 else "msgpack"
    if requested["sampling_params"]["temperature"] > 0 and rng.random() < 0.35:
        chosen["n"] = rng.choice([2, 3, 5])
    return chosen


PLAIN = {"logprobs_format": "base64", "output_mode": "text", "sent": "json", "back": "json", "stream": False, "n": 1}


async def ask(client: httpx.AsyncClient, requested: Body, ending: dict[str, Any]) -> tuple[int, Any]:
    """Status and reply; a stream's events are joined."""
    body = requested | {name: value for name, value in ending.items() if name not in ("sent", "back", "n")}
    body["sampling_params"] = requested["sampling_params"] | {"n": ending["n"]}
    if ending["sent"] == "bytes":
        body["token_ids"] = struct.pack(f"<{len(requested['token_ids'])}i", *requested["token_ids"])
    kind = MSGPACK if ending["sent"] in ("bytes", "msgpack") else "application/json"
    content = msgspec.msgpack.encode(body) if kind == MSGPACK else msgspec.json.encode(body)
    headers = {"content-type": kind} | ({"accept": MSGPACK} if ending["back"] == "msgpack" else {})
    answer = await client.post(GENERATE, content=content, headers=headers)
    if answer.status_code != 200:
        return answer.status_code, answer.json()
    if ending["stream"]:
        *lines, last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert last == "[DONE]"
        return 200, _joined([json.loads(line) for line in lines])
    return 200, answer.json() if ending["back"] == "json" else msgspec.msgpack.decode(answer.content)


def _joined(events: list[Any]) -> Any:
    choices: dict[int, dict[str, Any]] = {}
    reply: dict[str, Any] = {}
    for event in events:
        for delta in event.pop("choices", ()):
            choice = choices.setdefault(delta["index"], {"token_ids": [], "rows": []})
            assert choice.get("finish_reason") is None, "an event after the end"
            ids_, actual = delta.pop("token_ids"), delta.pop("logprobs")
            choice["token_ids"] += ids_
            choice["rows"] += rows(actual, ids_) if actual else []
            choice["text"] = choice.pop("text", "") + delta.pop("text", "")
            choice |= delta
        reply |= event
    return reply | {"choices": [choices[index] for index in sorted(choices)]}


def rows(actual: Any, tokens: list[int]) -> list[Any]:
    """Logprobs of any format: (logprob, rank, [(id, logprob) of the others, in order]) by token."""
    if "content" in actual:
        entries = actual["content"]
        assert [entry["token_id"] for entry in entries] == tokens
        tops = [[(top["token_id"], top["logprob"]) for top in entry["top_logprobs"][1:]] for entry in entries]
        return [(entry["logprob"], entry["rank"], top) for entry, top in zip(entries, tops, strict=True)]
    columns = [actual[name] for name in ("token_logprobs", "ranks", "top_token_ids", "top_logprobs")]
    if "shape" in actual:
        raw = [base64.b64decode(column) if isinstance(column, str) else column for column in columns]
        arrays = [np.frombuffer(column, kind) for column, kind in zip(raw, ("<f4", "<i4", "<i4", "<f4"), strict=True)]
        columns = [array.reshape(actual["shape"] if i > 1 else -1).tolist() for i, array in enumerate(arrays)]
    result = []
    for token, logprob, rank, ids_, values in zip(tokens, *columns, strict=True):
        others = {id_: max(value, FLOOR) for id_, value in zip(ids_, values, strict=True) if id_ != token}
        result.append((max(logprob, FLOOR), rank, list(others.items())))
    return result


def answer(reply: Any, requested: Body, index: int = 0) -> tuple[Any, ...]:
    """The parts of a reply that must be equal however it is sent: tokens, end, logprobs and prompt logprobs."""
    choice = reply["choices"][index]
    tokens = choice["token_ids"]
    if isinstance(tokens, bytes):
        tokens = list(struct.unpack(f"<{len(tokens) // 4}i", tokens))
    actual = choice["rows"] if "rows" in choice else rows(choice["logprobs"], tokens) if choice["logprobs"] else []
    scores = reply.get("prompt_logprobs")
    if isinstance(scores, list):
        entries = [[(int(id_), score) for id_, score in entry.items()] for entry in scores if entry]
        scores = [
            (sampled["logprob"], sampled["rank"], [(id_, score["logprob"]) for id_, score in others])
            for (_, sampled), *others in entries
        ]
    elif scores is not None:
        scores = rows(scores, requested["token_ids"][scores["start"] :])
    return tokens, choice["finish_reason"], choice["stop_reason"], choice["stop_detail"]["kind"], actual, scores
