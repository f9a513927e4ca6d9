"""How a room follows conversations: it may make a prompt of one, and is told what was answered.

The three text dialects make a `ChatConversation` of a body; `hook_of` finds the room's hook in the table of rooms.
Without one, nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request

from tokserve.base.rooms import contributions
from tokserve.client.outputs import ChoiceOutput
from tokserve.protocol.prompt import TokenPrompt
from tokserve.server.generation import Generation
from tokserve.server.serving import Serving

ReturnedMessage = Callable[[ChoiceOutput], dict[str, Any]]  # the message that the client gets for a choice, as in chat


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """A conversation that is to be answered.

    `messages`: as chat has them.  `model`: the adapter, "" for the model itself.  `options`: of `ChatTemplate.text`.
    `session_id`: a field of the body, as it was sent.  `size`: bytes of the body.  `keeps_logprobs`: the client gets
    logprobs.
    """

    messages: Sequence[Any]
    model: str
    options: Mapping[str, Any]
    session_id: Any = None
    size: int = 0
    keeps_logprobs: bool = False
    request_id: str = ""
    rank: int | None = field(default=None)


class ConversationTurn(Protocol):
    """One request of a conversation that is followed.  `prompt`: the ids to answer; None: the conversation is to be
    rendered.  `rank`: the engine to use among several; None: any.  `cache_key`: `RequestOptions.session`.  The logprobs
    of sampled tokens must be requested."""

    prompt: TokenPrompt | None
    rank: int | None
    cache_key: str

    async def rendered(self, request: Request, prompt: TokenPrompt) -> None:
        """The prompt is this one, as `prompt` was None."""

    def attach(self, generation: Generation, message: ReturnedMessage) -> None:
        """The engine has accepted the request; nothing of its output was taken yet."""


class ConversationHook(Protocol):
    """Follows the conversations of a server."""

    async def begin(self, request: Request, conversation: ChatConversation) -> ConversationTurn | None:
        """A conversation is to be answered.  None: it is not followed.  Raises RequestError."""


def hook_of(serving: Serving) -> ConversationHook | None:
    """The server's hook; None: conversations are not followed."""
    state = serving.state
    if not hasattr(state, "conversation_hook"):
        hooks = (make(serving) for _, make in contributions("conversations"))
        state.conversation_hook = next((hook for hook in hooks if hook is not None), None)
    hook: ConversationHook | None = state.conversation_hook
    return hook
