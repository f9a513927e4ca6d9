"""What a scripted server replies: a `ScriptedReply` for each choice, and the messages that carry it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class ScriptedReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One choice's output, and what goes wrong with it.

    `token_ids`: the output.  Where neither they nor the request's parameters end it, the model's EOS token follows.
    `logprobs`: of these tokens, in the same order; default: -1.0 each.
    `refuse`: 503 or 429; the request (all its choices) is refused with this status and a Retry-After of one second.
    `delays`: seconds to wait before the token of this index.
    `versions`: from the token of this index on, the weights have this version, for every request.
    `abort_at`: before the token of this index, the choice ends with finish_reason "abort", as after `/abort_requests`.
    `fail_at`: instead of the token of this index, the choice ends with an error, as after logits that are not finite.
    `disconnect_at`: before the token of this index, the connection is closed without an end of the response.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    refuse: int | None = None
    delays: Mapping[int, float] = {}
    versions: Mapping[int, str] = {}
    abort_at: int | None = None
    fail_at: int | None = None
    disconnect_at: int | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"there are {len(self.token_ids)} token_ids and {len(self.logprobs)} logprobs")
        if self.refuse not in (None, 503, 429):
            raise ValueError(f"refuse must be 503 or 429, got {self.refuse}")


class Choice(msgspec.Struct, frozen=True):
    """A choice that needs a reply.  `prompt_ids`: its prompt; `index`: which of the request's choices."""

    request_id: str
    prompt_ids: list[int]
    index: int


class Scripted(msgspec.Struct, frozen=True):
    """The reply to a choice; `error`: there is none, and why."""

    reply: ScriptedReply = ScriptedReply()
    error: str | None = None
