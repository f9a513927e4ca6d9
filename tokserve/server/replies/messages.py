"""Outputs as chat messages beside their tokens, for the token route: what a room that knows chats has to give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tokserve.base.errors import RequestError
from tokserve.base.rooms import contributions
from tokserve.client.outputs import ChoiceOutput
from tokserve.protocol.params import SamplingParams
from tokserve.server.serving import Serving


class MessageReader(Protocol):
    """Reads the choices of one reply."""

    def message(self, choice: ChoiceOutput, /) -> Any:
        """The message of a whole choice."""

    def delta(self, delta: ChoiceOutput, /) -> Any:
        """What a delta adds to its choice's message; the deltas of a choice come in order."""


def message_reader(
    serving: Serving, chat_request: Any, field: str, params: SamplingParams, prompt: Sequence[int], key: str
) -> MessageReader:
    """Who reads the outputs for `prompt`.  `chat_request`: the body of the chat that was rendered, as far as it is
    known, and `field` its name; `key`: that of the reply.  Raises RequestError."""
    makers = [make for _, make in contributions("messages")]
    if not makers:
        raise RequestError("this server reads no chat messages", field="output_mode", code="unsupported")
    reader: MessageReader = makers[-1](serving, chat_request, field, params, prompt, key)
    return reader
