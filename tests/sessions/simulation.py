"""Random conversations of an agent with a model, over the store and a chat template, without a server.

The agent repeats what it got in forms of its own, edits, retries, cuts and branches.  The model's answers are texts as
the template writes them, tokenized as they are in the rendered conversation, or tokens that no tokenizer would choose.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.templates.suffix import Suffixes
from tokserve.features.sessions.canonical import PromptContext, canonical, chain
from tokserve.features.sessions.planning import extension, new_ids
from tokserve.features.sessions.store import SessionStore
from tokserve.features.sessions.turns import StoredTurn, TurnAnswer, TurnPrompt
from tokserve.protocol.prompt import pack_ids, unpack_ids

WORDS = [
    "the fox",
    "naïve café",
    "漢字",
    "🙂🚀",
    "47 + 38",
    "\n\n",
    '{"a": 1}',
    "def f(x):",
    " spaces ",
    "</think>",
    "<|x|>",
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
CONTEXT = PromptContext("", b"tools", b"template")
OWNER, SESSION = "", "s"


@dataclass
class Request:
    """A request that was answered: its messages, and the turn that it made."""

    messages: list[dict[str, Any]]
    turn: StoredTurn


@dataclass
class Simulation:
    """One agent and one model.  `eos`: the token that ends an answer."""

    template: ChatTemplate
    eos: int
    seed: int
    shows_tools: bool = True
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.store = SessionStore(max_sessions=4, max_bytes=1 << 24, ttl=1e9)
        self.suffixes = Suffixes(self.template, [self.eos])
        self.options: dict[str, Any] = {"tools": TOOLS} if self.shows_tools else {}
        self.now = 0.0

    def text(self) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, 6)))

    def run(self, turns: int) -> None:
        """Let the agent send so many requests."""
        messages = [{"role": "user", "content": self.text()}]
        if self.rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": self.text()})
        for _ in range(turns):
            request = self.answer(messages)
            messages = self.next_messages(messages, request.turn.answer.message)

    def next_messages(self, messages: list[dict[str, Any]], answer: dict[str, Any]) -> list[dict[str, Any]]:
        """What the agent sends next."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.08 and len(messages) > 1:  # a retry, or a branch at an earlier place
            cut = rng.choice([len(messages), *(i for i, one in enumerate(messages, 1) if one["role"] == "user")])
            return messages[:cut]
        if kind < 0.14:  # an edit of an earlier message
            index = rng.choice([i for i, one in enumerate(messages) if one["role"] == "user"])
            edited = {**messages[index], "content": self.text() + " edited"}
            messages = [*messages[:index], edited, *messages[index + 1 :]]
        if kind < 0.17:  # a compaction
            return [{"role": "user", "content": "summary: " + self.text()}]
        repeated = [self.repeated(message) for message in [*messages, answer]]
        calls = answer.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self.text()} for call in calls]
        content: Any = self.text()
        if rng.random() < 0.02:
            content = [{"type": "text", "text": content}, IMAGE]
        return [*repeated, *results, *([] if calls else [{"role": "user", "content": content}])]

    def repeated(self, message: dict[str, Any]) -> dict[str, Any]:
        """The same message in another form."""
        rng, other = self.rng, dict(message)
        content = other.get("content")
        if isinstance(content, str) and rng.random() < 0.2 and message["role"] != "assistant":
            other["content"] = [{"type": "text", "text": content}]
        if message["role"] == "assistant":
            if rng.random() < 0.3:
                other["content"] = (content or "") + " " * rng.randint(0, 2)
            if not content and rng.random() < 0.5:
                other["content"] = None
            if rng.random() < 0.5:
                other.pop("reasoning", None)
            other["extra"] = rng.random()
        calls = other.get("tool_calls") or []
        if calls:
            other["tool_calls"] = [self._repeated_call(call) for call in calls]
        return other

    def _repeated_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.loads(call["function"]["arguments"])
        text = json.dumps(dict(reversed(arguments.items())), indent=self.rng.choice([None, 2]))
        return {**call, "function": {**call["function"], "arguments": text}}

    def answer(self, messages: list[dict[str, Any]]) -> Request:
        """TurnAnswer a request as the server does, and keep the turn."""
        self.now += 1.0
        digests = chain(messages)
        match = self.store.match(OWNER, SESSION, CONTEXT, digests, self.now)
        added = new_ids(match, messages, self.suffixes, self.options)
        parent, because, ids = match.turn_id, added.because, added.ids
        if ids is None:
            rendered = pack_ids(self.template.render(without_images(messages), **self.options))
            ids = extension(match, rendered)
            parent, because, ids = (None, because, rendered) if ids is None else (parent, None, ids)
        first = match.num_messages if parent is not None else 0
        prompt = TurnPrompt(
            context=CONTEXT, parent=parent, because=because, new_ids=ids, chain=digests[first:], messages=b"[]"
        )
        prompt_ids = unpack_ids((match.ids if parent is not None else b"") + ids)
        turn_id = self.store.add(OWNER, SESSION, match.number, prompt, self._sampled(messages, prompt_ids), self.now)
        assert turn_id is not None
        turn = self.store.get(OWNER, SESSION).turns[turn_id]
        self.requests.append(Request(messages, turn))
        return self.requests[-1]

    def _sampled(self, messages: list[dict[str, Any]], prompt: list[int]) -> TurnAnswer:
        rng = self.rng
        message: dict[str, Any] = {"role": "assistant", "content": self.text().replace("</think>", "").strip()}
        if self.shows_tools and rng.random() < 0.5:
            message["content"] = ""
            message["tool_calls"] = [self._call() for _ in range(rng.randint(1, 2))]
        elif rng.random() < 0.3:
            message["reasoning"] = self.text()
        ids, ended = self._ids(messages, message, prompt), rng.random() < 0.8
        if ended and (not ids or ids[-1] != self.eos):
            ids = [*ids, self.eos]
        if not ended:
            ids = [token for token in ids if token != self.eos] or [self.eos + 3]
        return TurnAnswer(
            token_ids=pack_ids(ids),
            token_logprobs=b"\0" * 4 * len(ids),
            mode="raw",
            finish_reason="stop" if ended else "length",
            stop_detail="eos" if ended else "max_tokens",
            seed=0,
            weight_versions=[],
            prompt_weight_versions=[],
            message=message,
            request_id="r",
        )

    def _call(self) -> dict[str, Any]:
        arguments = {"place": self.text(), "count": self.rng.choice([1, 2.5, 10**20, -3])}
        name = "".join(self.rng.choice("abcdefghij") for _ in range(9))
        return {"id": name, "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}

    def _ids(self, messages: list[dict[str, Any]], message: dict[str, Any], prompt: list[int]) -> list[int]:
        """The ids of an answer as the template writes it, where that continues the prompt; else of its text."""
        rendered = self.template.render(
            [*without_images(messages), message], add_generation_prompt=False, **self.options
        )
        if rendered[: len(prompt)] == prompt and self.eos in rendered[len(prompt) :]:
            rest = rendered[len(prompt) :]
            return rest[: rest.index(self.eos) + 1]
        text = message["content"] or json.dumps(message.get("tool_calls", ""))
        return self.template.tokenizer.encode(text, add_special_tokens=False)


def without_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a template of text takes them."""
    return [
        message | {"content": [part for part in message["content"] if part != IMAGE]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


class FaithfulSimulation(Simulation):
    """An agent that repeats what it got, and a model whose answers end and have no reasoning."""

    def next_messages(self, messages: list[dict[str, Any]], answer: dict[str, Any]) -> list[dict[str, Any]]:
        calls = answer.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self.text()} for call in calls]
        return [*messages, answer, *results, *([] if calls else [{"role": "user", "content": self.text()}])]

    def _sampled(self, messages: list[dict[str, Any]], prompt: list[int]) -> TurnAnswer:
        while True:
            sampled = super()._sampled(messages, prompt)
            if sampled.stop_detail == "eos" and "reasoning" not in sampled.message:
                return sampled


def deepest(simulation: Simulation, request: Request) -> set[str | None]:
    """The turns that the request may continue, by comparing messages: the oracle of the store's digests."""
    best, turns = 0, {None}
    for other in simulation.requests:
        if other is request:
            break
        sequence = [*other.messages, other.turn.answer.message]
        if len(sequence) > len(request.messages) or len(sequence) < best:
            continue
        if [canonical(one) for one in sequence] == [canonical(one) for one in request.messages[: len(sequence)]]:
            turns = {other.turn.turn_id} | (turns if len(sequence) == best else set())
            best = len(sequence)
    return turns
