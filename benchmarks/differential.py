"""Sends the same random bodies to two servers, and counts the differences of their replies by kind.

    python benchmarks/differential.py http://127.0.0.1:8000 http://127.0.0.1:8001 --count 500 --ignore stop_detail

Shows what changes for a client of the first server when it uses the second.  Greedy, so both must write the same: serve
a checkpoint whose output varies with its prompt, in float32.  Differences are explained in results/conformance-vllm.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx

Body = dict[str, Any]
TOLERANCE = 2e-3  # of logprobs: both compute in float32, in their own order
PER_SERVER = frozenset({"id", "request_id", "created", "system_fingerprint", "cached_tokens", "version", "seed"})
BY_TOKEN = ("top_logprobs[]", "prompt_logprobs[]")  # objects whose keys are tokens, not names
TEXTS = (
    "def main():\n    return",
    "Hello world",
    "é",
    "日本語 text",
    "🙂 smile",
    "import os, sys",
    " ",
    "\n",
    "x" * 40,
    "<|im_end|>",
    "a<|endoftext|>b",
    "class Foo(object):\n",
    "\t\tx",
    "\u0301a",
    "ﬁ\u200bz",
    "0 1 2 3",
)
STOPS = ("e", " ", "self", "\n", "the", "a", ".", "(", "or", "   ", "é", "<|im_end|>", "ing", "t")
WRONG: tuple[Any, ...] = (
    None,
    "",
    "x",
    -1,
    0,
    1.5,
    True,
    [],
    {},
    [None],
    ["a"],
    [-1],
    {"a": 1},
    10**6,
    2**63,
    "1",
    [""],
    [[1, 2]],
    {"5": "x"},
)
Fields = tuple[tuple[float, str, tuple[Any, ...]], ...]  # probability, field, values
SAMPLING: Fields = (
    (0.6, "max_tokens", (1, 1, 2, 3, 5, 8, 16)),
    (0.1, "stop", STOPS),
    (0.1, "include_stop_str_in_output", (True, False)),
    (0.1, "min_tokens", (0, 1, 2, 4)),
    (0.2, "ignore_eos", (True, False)),
    (0.2, "skip_special_tokens", (True, False)),
    (0.1, "spaces_between_special_tokens", (True, False)),
    (0.1, "repetition_penalty", (0.5, 1.0, 1.3, 2.0)),
    (0.1, "presence_penalty", (-2, -0.5, 0, 1, 2)),
    (0.1, "frequency_penalty", (-2, -0.5, 0, 1, 2)),
    (0.1, "prompt_logprobs", (0, 1, 3)),
    (0.1, "seed", (0, 1, 42)),
    (0.1, "n", (1,)),
)
OF_TEXT: Fields = (
    (0.3, "return_token_ids", (True, False)),
    (0.15, "return_tokens_as_token_ids", (True, False)),
    (0.15, "add_special_tokens", (True, False)),
    (0.05, "user", ("u",)),
    (0.05, "response_format", ({"type": "text"},)),
)
USAGE: tuple[Body, ...] = (
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": False},
    {},
)


class Bodies:
    """Random bodies of each route, from one seed; token ids are below `vocab`."""

    def __init__(self, seed: str, vocab: int) -> None:
        self._random = random.Random(seed)
        self._vocab = vocab

    def body(self, route: str, wrong: float) -> tuple[str, Body]:
        """A path and a body; with probability `wrong` one of its fields, or a new one, has a value of any kind."""
        path, body = ROUTES[route](self)
        if self._chance(wrong):
            inner = body["sampling_params"] if self._chance(0.5) and "sampling_params" in body else body
            names = {name for _, name, _ in SAMPLING + OF_TEXT} | {"logprobs", "logit_bias", "model", *body}
            inner[self._random.choice(sorted(names))] = self._random.choice(WRONG)
        return path, body

    def completions(self) -> tuple[str, Body]:
        kind = self._random.randrange(4)
        one: Callable[[], Any] = self._text if kind < 2 else self._ids
        body = {"prompt": [one() for _ in range(self._random.randint(1, 3))] if kind % 2 else one()}
        body |= self._fields(OF_TEXT) | self._sampling() | self._stream()
        if self._chance(0.4):
            body["logprobs"] = self._random.choice([0, 1, 2, 5])
        if self._chance(0.25):
            body["echo"] = True
            if self._chance(0.3):
                body["max_tokens"] = 0
                body.pop("min_tokens", None)
        return "/v1/completions", body

    def chat(self) -> tuple[str, Body]:
        body = (
            {"messages": self._messages(), "max_tokens": 9} | self._fields(OF_TEXT) | self._sampling() | self._stream()
        )
        if self._chance(0.4):
            body |= {"logprobs": True, "top_logprobs": self._random.choice([0, 1, 2, 5])}
        if self._chance(0.1):
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return "/v1/chat/completions", body

    def generate(self) -> tuple[str, Body]:
        params = {"max_tokens": 6} | self._sampling()
        if self._chance(0.4):
            params["logprobs"] = self._random.choice([0, 1, 2, 5])
        body = {"token_ids": self._ids(), "sampling_params": params} | self._stream()
        if self._chance(0.3):
            body["output_mode"] = "text"
        return "/inference/v1/generate", body

    def tokenize(self) -> tuple[str, Body]:
        if self._chance(0.3):
            return "/detokenize", {"tokens": self._ids()}
        body: Body = {"messages": self._messages()} if self._chance(0.5) else {"prompt": self._text() + self._text()}
        return "/tokenize", body | {"return_token_strs": self._chance(0.5)}

    def _fields(self, table: Fields) -> Body:
        return {name: self._random.choice(values) for odds, name, values in table if self._chance(odds)}

    def _sampling(self) -> Body:
        body: Body = {"temperature": 0} | self._fields(SAMPLING)
        if self._chance(0.15):
            body["logit_bias"] = {str(self._token()): self._random.choice([-100, -5, 2, 15, 100])}
        if self._chance(0.1):
            body["stop_token_ids"] = [self._token() for _ in range(self._vocab // 20)]
        if self._chance(0.05):
            body["allowed_token_ids"] = [*self._ids(), *self._ids()]
        return body

    def _stream(self) -> Body:
        if not self._chance(0.35):
            return {}
        return {"stream": True} | ({"stream_options": self._random.choice(USAGE)} if self._chance(0.5) else {})

    def _messages(self) -> list[Body]:
        roles = ["system", "developer", None, None, None]
        first = self._random.choice(roles)
        turns = [first, "user"] if first else ["user"]
        turns += ["assistant", "user", "assistant"][: self._random.randrange(4)]
        return [{"role": role, "content": self._content()} for role in turns]

    def _content(self) -> str | list[Body]:
        if self._chance(0.7):
            return self._text()
        return [{"type": "text", "text": self._text()} for _ in range(self._random.randint(1, 3))]

    def _text(self) -> str:
        return self._random.choice(TEXTS)

    def _ids(self) -> list[int]:
        return [self._token() for _ in range(self._random.randint(1, 14))]

    def _token(self) -> int:
        return self._random.randrange(self._vocab)

    def _chance(self, odds: float) -> bool:
        return self._random.random() < odds


ROUTES: dict[str, Callable[[Bodies], tuple[str, Body]]] = {
    "completions": Bodies.completions,
    "chat": Bodies.chat,
    "generate": Bodies.generate,
    "tokenize": Bodies.tokenize,
}


def ask(client: httpx.Client, path: str, body: Body) -> tuple[int, Any]:
    """Status and reply; of a stream, its choices joined."""
    try:
        response = client.post(path, json=body)
    except httpx.TransportError as error:
        return 0, type(error).__name__  # a server that hangs up
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return response.status_code, joined(response.text)
    return response.status_code, response.json() if response.content else None


def joined(stream: str) -> Body:
    """The choices of a stream as if they had come at once, its usage and how it ended."""
    lines = [line.removeprefix("data:").strip() for line in stream.split("\n") if line.startswith("data:")]
    reply: Body = {"choices": {}, "done": lines[-1:] == ["[DONE]"]}
    for line in lines:
        event = {} if line == "[DONE]" else json.loads(line)
        reply |= {name: event[name] for name in ("error", "object", "prompt_token_ids") if event.get(name) is not None}
        if event.get("usage") and not event.get("choices"):
            reply["usage"] = event["usage"]
        for choice in event.get("choices", ()):
            _append(reply["choices"].setdefault(choice["index"], {}), choice | choice.pop("delta", {}))
    reply["choices"] = [reply["choices"][index] for index in sorted(reply["choices"])]
    return reply


def _append(sum_: Body, delta: Body) -> None:
    for name, value in delta.items():
        if value is None or name in ("index", "role", "prompt_logprobs", "stop_reason", "finish_reason"):
            sum_[name] = sum_.get(name) if value is None else value
        elif isinstance(value, dict) and isinstance(sum_.get(name), dict):
            _append(sum_[name], value)
        elif isinstance(value, str | list) and sum_.get(name) is not None:
            sum_[name] = sum_[name] + value
        else:
            sum_[name] = value


def differences(first: Any, second: Any, ignored: frozenset[str], path: str = "$") -> Iterator[tuple[str, str]]:
    """(where, what) for each key that only one has, and each value or type that differs; null is as good as absent."""
    if isinstance(first, dict) and isinstance(second, dict):
        for name in sorted((first.keys() | second.keys()) - ignored):
            by_token = path.endswith(BY_TOKEN) and name not in ("token", "token_id", "logprob", "rank", "bytes")
            where = f"{path}.<token>" if by_token else f"{path}.{name}"
            one, other = first.get(name), second.get(name)
            if (one is None) != (other is None):
                yield where, "only second" if one is None else "only first"
            else:
                yield from differences(one, other, ignored, where)
    elif isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            yield path, "length"
        else:
            for one, other in zip(first, second, strict=True):
                yield from differences(one, other, ignored, f"{path}[]")
    elif isinstance(first, float) or isinstance(second, float):
        if not isinstance(first, int | float) or not isinstance(second, int | float) or abs(first - second) > TOLERANCE:
            yield path, "value"
    elif first != second:
        yield path, "value" if type(first) is type(second) else f"{type(first).__name__}, {type(second).__name__}"


def kinds(path: str, first: tuple[int, Any], second: tuple[int, Any], ignored: frozenset[str]) -> set[str]:
    """The differences of the two replies to one body; if neither server replies, that is a difference."""
    if not first[0] and not second[0]:
        return {f"{path}  no reply: {first[1]}, {second[1]}"}
    if first[0] != second[0]:
        error = first[1] if first[0] >= 400 else second[1]
        message = error["error"]["message"] if isinstance(error, dict) and "error" in error else str(error)
        return {f"{path}  status {first[0]}, {second[0]}: {message[:100]!r}"}
    if first[0] >= 400:
        return set()
    return {f"{path}  {where}: {what}" for where, what in differences(first[1], second[1], ignored)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Where two servers' replies to the same random bodies differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("first", help="base URL")
    parser.add_argument("second", help="base URL")
    parser.add_argument("--routes", default=",".join(ROUTES), help="asked in turns")
    parser.add_argument("--count", type=int, default=300, help="bodies")
    parser.add_argument("--seed", default="0", help="of the bodies")
    parser.add_argument("--vocab-size", type=int, default=4096, help="token ids are below this; no more than both have")
    parser.add_argument("--wrong", type=float, default=0.0, help="share of bodies with a value of any kind in a field")
    parser.add_argument(
        "--ignore", default="", help="fields that may differ, besides ids and times, with commas between"
    )
    args = parser.parse_args()
    ignored = PER_SERVER.union(args.ignore.split(","))
    differences_by_kind: Counter[str] = Counter()
    shortest: dict[str, str] = {}
    same = 0
    routes = args.routes.split(",")
    if unknown := set(routes) - ROUTES.keys():
        parser.error(f"--routes: {', '.join(sorted(unknown))} not among {', '.join(ROUTES)}")
    with httpx.Client(base_url=args.first, timeout=120) as one, httpx.Client(base_url=args.second, timeout=120) as two:
        for number in range(args.count):
            bodies = Bodies(f"{args.seed}-{number}", args.vocab_size)
            path, body = bodies.body(routes[number % len(routes)], args.wrong)
            differs = kinds(path, ask(one, path, body), ask(two, path, body), ignored)
            same += not differs
            differences_by_kind.update(differs)
            sent = json.dumps(body, ensure_ascii=False)
            shortest |= {kind: min(shortest.get(kind, sent), sent, key=len) for kind in differs}
    print(f"{same} of {args.count} alike")
    for kind, times in sorted(differences_by_kind.items()):
        print(f"{times:5} {kind}\n      {shortest[kind][:300]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
