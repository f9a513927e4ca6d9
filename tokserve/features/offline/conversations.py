"""Conversations of the Python API as prompts: rendered by the chat template, their images fetched later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokserve.base.errors import RequestError, invalid
from tokserve.client.async_llm import AsyncLLM
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.prompts import ParsedPrompt, Tokenization
from tokserve.features.images.media.images import image_slots
from tokserve.features.images.python_images import with_urls

Message = Mapping[str, Any]
Messages = Sequence[Message] | Sequence[Sequence[Message]]


class Conversations:
    """Renders with the model's template, or that of the options."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    @cached_property
    def template(self) -> ChatTemplate:
        """The template.  Raises RequestError without a tokenizer, StartError for a template that does not compile."""
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise RequestError("chat needs a tokenizer, and this LLM was made with tokens_only")
        server = self._llm.config.server
        return ChatTemplate(
            tokenizer,
            server.chat_template,
            server.default_chat_template_kwargs,
            special_tokens=server.special_tokens_in_content,
        )

    def prompts(
        self,
        messages: Messages,
        how: Tokenization,
        *,
        content_format: str,
        settings: Mapping[str, Any] | None,
        **options: Any,
    ) -> list[ParsedPrompt]:
        """The prompts of one conversation, or of several; `options` are those of `ChatTemplate.text`.  Raises
        RequestError."""
        if content_format not in ("auto", "string", "openai"):
            raise invalid("chat_template_content_format", f"must be auto, string or openai, got {content_format!r}")
        check_settings(settings)
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        if not all(isinstance(one, Sequence) and not isinstance(one, str) for one in conversations):
            raise RequestError("messages must be a list of messages, or a list of such lists", field="messages")
        return [self._rendered(conversation, how, options) for conversation in conversations]

    def _rendered(self, conversation: Sequence[Message], how: Tokenization, options: Mapping[str, Any]) -> ParsedPrompt:
        template, reader = self.template, self._llm.images
        slots = None
        if reader is not None:
            slots = image_slots(reader.kind, lambda token: template.tokenizer.decode([token], False))
            conversation = with_urls(conversation)
        ids = template.render(conversation, images=slots, add_special_tokens=bool(how.special), **options)
        images = () if slots is None else tuple(slots.images)
        frame = template.tokenizer.frame if how.special else (0, 0)
        return ParsedPrompt(ids, template.tokenizer.decode(ids, False), images=images, frame=frame)


def check_settings(settings: Mapping[str, Any] | None) -> None:
    """Refuse settings of the image processor for one call: they are the engine's, for all requests."""
    if settings:
        raise invalid(
            "mm_processor_kwargs",
            "is an option of LLM(...): images of all requests are processed alike",
            code="unsupported",
        )
