"""What a session consists of: turns, each with its parent, as the store keeps them and as processes send them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tokserve.features.sessions.canonical import PromptContext

Span = tuple[str, int, int]  # a version of the weights, and the first and one past the last position


class TurnAnswer(msgspec.Struct, kw_only=True):
    """What was sampled in a turn, and what its client got.

    `token_ids`: int32, `token_logprobs`: float32 [len(token_ids)], little-endian; `mode`: how the latter were computed.
    `message`: the message of the assistant as the client got it.  `mask_rows`, `mask_ids`: as `SamplingMasks`.
    `routed_experts`: an npy file.  `stop_detail`: see `ChoiceOutput`.
    """

    token_ids: bytes
    token_logprobs: bytes
    mode: str
    finish_reason: str
    stop_detail: str | None
    seed: int
    weight_versions: list[Span]
    prompt_weight_versions: list[Span]
    message: dict[str, Any]
    request_id: str
    mask_rows: bytes | None = None
    mask_ids: bytes = b""
    routed_experts: bytes | None = None


class TurnPrompt(msgspec.Struct, kw_only=True):
    """What a turn answers.  `parent`: the id of the turn that it continues, or None; `because`: then why.

    `new_ids`: int32 ids behind those of the parent and its answer.  `chain`: the digests of `messages`, the messages
    behind the parent's answer, as JSON.
    """

    context: PromptContext
    parent: str | None
    because: str | None
    new_ids: bytes
    chain: list[bytes]
    messages: bytes


class StoredTurn(msgspec.Struct, kw_only=True):
    """A prompt and one answer to it.  `key`: the digest of the chain that ends with the answer's message;
    `num_messages`: of that chain; `num_ids`: those of the prompt and the answer; `depth`: turns before it."""

    turn_id: str
    prompt: TurnPrompt
    answer: TurnAnswer
    key: bytes
    num_messages: int
    num_ids: int
    depth: int
    created: float
    metadata: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        prompt, answer = self.prompt, self.answer
        parts = (prompt.new_ids, prompt.messages, answer.token_ids, answer.token_logprobs, answer.mask_ids)
        more = (answer.mask_rows or b"", answer.routed_experts or b"")
        message = answer.message
        text = len(message.get("content") or "") + len(message.get("reasoning") or "")
        text += sum(len(str(call)) for call in message.get("tool_calls") or ())
        return TURN_BYTES + sum(map(len, (*parts, *more))) + 2 * text + 64 * len(prompt.chain)


TURN_BYTES = 2048  # of a turn's objects


class Session(msgspec.Struct, kw_only=True):
    """A tree of turns.  `running`: the requests of it that are being answered, by id, with the digest of the chain of
    their messages.  `lease_end`: until when a trainer has it, in seconds of Unix time; 0.0: none has.  `number`: of the
    sessions that the store has made; one that is made with the id of a deleted one has another.  `change`: the store's
    count of changes at the last one of this session."""

    session_id: str
    owner: str
    created: float = msgspec.field(default_factory=time.time)
    last_used: float = msgspec.field(default_factory=time.time)
    closed: bool = False
    turns: dict[str, StoredTurn] = {}
    by_key: dict[bytes, list[str]] = {}
    prefixes: dict[bytes, int] = {}  # digests of chains of messages, with the number of messages
    metadata: dict[str, Any] = {}
    running: dict[str, bytes] = {}
    lease_end: float = 0.0
    num_bytes: int = 0
    num_turns: int = 0
    num_roots: int = 0
    num_tokens: int = 0
    number: int = 0
    change: int = 0

    @property
    def state(self) -> str:
        """open: a request is being answered, or none was yet; idle: none is; closed."""
        if self.closed:
            return "closed"
        return "idle" if self.turns and not self.running else "open"

    def path(self, turn: StoredTurn) -> list[StoredTurn]:
        """The turns from a root to this one."""
        turns = [turn]
        while (parent := turns[-1].prompt.parent) is not None:
            turns.append(self.turns[parent])
        return turns[::-1]

    def ids(self, turn: StoredTurn) -> bytes:
        """The ids of the prompt and the answer of a turn."""
        return b"".join(one.prompt.new_ids + one.answer.token_ids for one in self.path(turn))


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """Which turn a request continues: its id, the ids up to its end, how its answer ends, its message, and how many of
    the request's messages are in it.  Without a turn, `because` says why.  `number`: see `Session`."""

    number: int = 0
    turn_id: str | None = None
    ids: bytes = b""
    ended: bool = False
    message: dict[str, Any] = {}
    num_messages: int = 0
    because: str | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A session without its turns, as lists have it."""

    session_id: str
    state: str
    turns: int
    roots: int
    tokens: int
    created: float
    last_used: float
    metadata: dict[str, Any]
    lease_end: float
