"""Makes the requests of the three backends, and parses their replies.

Only the measured fields are declared, so that the decoder skips the rest of a chunk (logprobs, say): the client shares
the machine with the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tokserve.base.errors import StartError
from tokserve.base.structs import UNREADABLE
from tokserve.bench.datasets import Prompt, joined

Backend = Literal["tokens", "openai", "openai-chat"]
PATHS: dict[Backend, str] = {
    "tokens": "/inference/v1/generate",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
FAILED = ("error", "abort", "deadline")  # finish reasons of a request that was not served to its end


class MessageText(msgspec.Struct):
    """A piece of a chat message, or all of it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def text(self) -> str:
        """The first field that is not empty."""
        return self.content or self.reasoning_content or self.reasoning or ""


class ReplyChoice(msgspec.Struct):
    """The union of the three routes' choices."""

    index: int = 0
    token_ids: list[int] | None = None
    text: str | None = None
    delta: MessageText | None = None
    message: MessageText | None = None
    finish_reason: str | None = None


class ReplyPromptDetails(msgspec.Struct):
    """usage.prompt_tokens_details."""

    cached_tokens: int | None = None


class ReplyUsage(msgspec.Struct):
    """The server's own counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: ReplyPromptDetails | None = None


class ReplyChunk(msgspec.Struct):
    """An event of a stream, or a whole reply."""

    choices: list[ReplyChoice] = []
    usage: ReplyUsage | None = None
    error: msgspec.Raw | None = None


class BadReply(Exception):
    """The reply cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """The common options of all requests of a run."""

    backend: Backend = "tokens"
    model: str = ""
    stream: bool = True
    n: int = 1
    temperature: float = 0.0
    ignore_eos: bool = True
    logprobs: int | None = None
    return_token_ids: bool = False  # needed for conversations over the completions route

    def body(self, prompt: Any, output_len: int) -> bytes:
        """The request as JSON.  `prompt` is ids, text, or for chat a list of messages."""
        sampling: dict[str, Any] = {"max_tokens": output_len, "temperature": self.temperature}
        if self.n > 1:
            sampling["n"] = self.n
        if self.ignore_eos:
            sampling["ignore_eos"] = True
        body: dict[str, Any] = {"model": self.model, "stream": self.stream}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.logprobs is not None and self.backend == "openai-chat":
            sampling |= {"logprobs": True, "top_logprobs": self.logprobs}
        elif self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
        if self.backend == "tokens":
            return msgspec.json.encode(body | {"token_ids": prompt, "sampling_params": sampling})
        if self.return_token_ids and self.backend == "openai":
            body["return_token_ids"] = True
        name = "messages" if self.backend == "openai-chat" else "prompt"
        return msgspec.json.encode(body | {name: prompt} | sampling)


class EventLines:
    """The payloads of a server-sent event stream, from bytes cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The `data:` payloads that `piece` completes; comments and other fields are dropped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(slots=True)
class ReceivedReply:
    """One request's reply while it arrives.  Times are the caller's clock in seconds.

    A delivery is an event in which a choice received tokens: `first` is the first of all, `gaps` the times between
    deliveries of the same choice.  Over chat, tokens without text are not seen, so they delay `first`.
    """

    shape: RequestShape
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    usage: ReplyUsage | None = None
    counted: int = 0  # token ids received
    finished: dict[int, str] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)  # of choice 0
    output_text: list[str] = field(default_factory=list)  # of choice 0
    _begun: dict[int, float] = field(default_factory=dict)
    _latest: dict[int, float] = field(default_factory=dict)

    def take(self, payload: bytes, now: float) -> None:
        """Add an event or a whole reply that arrived at `now`; raises BadReply."""
        if payload == b"[DONE]":
            return
        try:
            chunk = _DECODER.decode(payload)
        except UNREADABLE as error:
            raise BadReply(f"{error} in {payload[:200]!r}") from None
        if chunk.error is not None and bytes(chunk.error) != b"null":
            raise BadReply(bytes(chunk.error)[:300].decode(errors="replace"))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self._take_choice(choice, now)

    def _take_choice(self, choice: ReplyChoice, now: float) -> None:
        index, ids = choice.index, choice.token_ids or ()
        message = choice.delta or choice.message
        text = message.text() if message else choice.text or ""
        self.counted += len(ids)
        if index == 0:
            self.output_ids.extend(ids)
            if text:
                self.output_text.append(text)
        if choice.finish_reason is not None:
            self.finished[index] = choice.finish_reason
        delivery = bool(ids or text) or choice.text is not None  # completions: a token may have no text
        if not delivery and index in self._begun and choice.finish_reason is not None:
            self._latest[index] = now  # chat: the last tokens may have had no text
        if not delivery and (choice.finish_reason is None or index in self._begun):
            return
        if self.first is None:
            self.first = now
        if index in self._latest:
            self.gaps.append(now - self._latest[index])
        self._latest[index] = now
        self._begun.setdefault(index, now)

    def check(self) -> None:
        """Raise BadReply unless every choice was served to its end."""
        if len(self.finished) != self.shape.n:
            raise BadReply(f"the reply ended early: {len(self.finished)} of {self.shape.n} choices finished")
        if bad := [reason for reason in self.finished.values() if reason in FAILED]:
            raise BadReply(f"finish_reason {bad[0]!r}")
        if self.shape.backend != "tokens" and self.usage is None:
            raise BadReply("the server sent no usage, so its tokens cannot be counted")

    @property
    def output_tokens(self) -> int:
        """Ids received on the token route; the server's own count where text is received."""
        if self.shape.backend == "tokens" or self.usage is None:
            return self.counted
        return self.usage.completion_tokens

    def tpot(self) -> float | None:
        """Seconds per output token after a choice's first; None if no choice has a second."""
        later = self.output_tokens - len(self._begun)
        if later <= 0 or not self.shape.stream:
            return None
        return sum(self._latest[i] - self._begun[i] for i in self._begun) / later


_DECODER = msgspec.json.Decoder(ReplyChunk)


class ConversationHistory:
    """A conversation so far, in the form of the backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._messages: list[dict[str, str]] = []
        self._prompt: Prompt | None = None

    def next_prompt(self, new: Prompt) -> Any:
        """The whole prompt of the next turn, which adds `new`."""
        if self._backend == "openai-chat":
            self._messages.append({"role": "user", "content": str(new)})
            return list(self._messages)
        if self._backend == "tokens" and isinstance(new, str):
            raise StartError("the tokens backend needs token ids, and the dataset has text: use --backend openai")
        self._prompt = new if self._prompt is None else joined(self._prompt, new)
        return self._prompt

    def add_reply(self, reply: ReceivedReply) -> None:
        text = "".join(reply.output_text)
        if self._backend == "openai-chat":
            self._messages.append({"role": "assistant", "content": text})
        elif isinstance(self._prompt, str):
            self._prompt += text
        elif self._prompt is not None:
            if not reply.output_ids:
                raise BadReply("the server returned no token ids, which the next turn needs")
            self._prompt = self._prompt + reply.output_ids
