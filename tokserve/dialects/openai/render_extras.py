"""What a rendered request may say of its prompt: the text, where each token lies in it, which are the assistant's.

The mask is the loss mask of supervised training.  It follows from `{% generation %}` in the chat template, or else from
the turns: an assistant's tokens are those between the generation prompt and the end of its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokserve.base.errors import RequestError, invalid
from tokserve.dialects.openai.schemas import ChatBody, TextBody
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.text_context import TextContext
from tokserve.features.images.parts import CHAT_KINDS
from tokserve.server.serving import Serving

FIELDS = ("return_token_offsets", "return_prompt_text", "return_assistant_tokens_mask")
Span = tuple[int, int]  # the places in a text of its first character and of the one after its last


class PromptExtras(NamedTuple):
    """The fields of a rendered request that a body asks for; None: it does not."""

    token_offsets: list[list[int]] | None = None
    prompt_text: str | None = None
    assistant_tokens_mask: list[int] | None = None


def asked_for(body: TextBody) -> list[str]:
    """The fields of the body that ask for something of this module."""
    return [name for name in FIELDS if getattr(body, name, None)]


def of_text(serving: Serving, body: TextBody, text: str | list[int], ids: Sequence[int], special: bool) -> PromptExtras:
    """The fields for a prompt of a completion.  `special`: special tokens were added to its text.  Raises RequestError
    for a prompt without a text, of which these are."""
    names = asked_for(body)
    if not names:
        return PromptExtras()
    if not isinstance(text, str):
        raise invalid(names[0], "is of a prompt's text, and this prompt is given as token ids", code="unsupported")
    offsets = _offsets(serving, names[0], text, ids, special)
    return PromptExtras(_lists(body, offsets), text if body.return_prompt_text else None)


def of_chat(serving: Serving, body: ChatBody, options: dict[str, Any], ids: Sequence[int]) -> PromptExtras:
    """The fields for a conversation.  `options`: as `chat_prompts.template_options` gives them.  Raises RequestError
    for a conversation with images, whose tokens are in no text, and where the template does not show which text is the
    assistant's."""
    names = asked_for(body)
    if not names:
        return PromptExtras()
    if any(part.get("type") in CHAT_KINDS for part in _parts(body)):
        raise invalid(names[0], "is not supported for conversations with images", code="unsupported")
    assert body.messages is not None
    of_render = ("add_special_tokens", "context")
    shown = {name: value for name, value in options.items() if name not in of_render}
    text = serving.state_of(TextContext).template.text(body.messages, **shown)
    offsets = _offsets(serving, names[0], text, ids, options["add_special_tokens"])
    mask = None
    if body.return_assistant_tokens_mask:
        spans = assistant_spans(serving.state_of(TextContext).template, body.messages, text, shown)
        mask = [int(any(begin <= first < last <= end for begin, end in spans)) for first, last in offsets]
    return PromptExtras(_lists(body, offsets), text if body.return_prompt_text else None, mask)


def assistant_spans(template: ChatTemplate, messages: Sequence[Any], text: str, options: dict[str, Any]) -> list[Span]:
    """Where the assistant's parts lie in the `text` of a conversation.  `options`: those of `ChatTemplate.text`.
    Raises RequestError."""
    marked = template.generation_spans(messages, **options)
    if marked is not None:
        return marked
    spans = []
    turns = options | {"add_generation_prompt": None, "continue_final_message": False}
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        is_open = index == len(messages) - 1 and bool(options.get("continue_final_message"))
        before = template.text(messages[:index], **turns | {"add_generation_prompt": True})
        after = text if is_open else template.text(messages[: index + 1], **turns | {"add_generation_prompt": False})
        if not (after.startswith(before) and text.startswith(after)):
            raise RequestError(
                f"return_assistant_tokens_mask: the chat template does not show messages[{index}] after the generation "
                "prompt as it is, and has no {% generation %}, so which tokens are the assistant's is not known",
                field="return_assistant_tokens_mask",
                code="unsupported",
            )
        spans.append((len(before), len(after)))
    return spans


def _lists(body: TextBody, offsets: list[Span]) -> list[list[int]] | None:
    return [list(span) for span in offsets] if body.return_token_offsets else None


def _parts(body: ChatBody) -> list[Any]:
    contents = [message.get("content") for message in body.messages or () if isinstance(message, dict)]
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def _offsets(serving: Serving, field: str, text: str, ids: Sequence[int], special: bool) -> list[Span]:
    """The place of every token in the text, in code points; (0, 0) for special tokens that were added to it."""
    encoded, offsets = serving.tokenizer.encode_with_offsets(text, special)
    if encoded != list(ids):
        raise invalid(
            field, "is not known: a message spells a special token, which is encoded as text", code="unsupported"
        )
    return offsets
