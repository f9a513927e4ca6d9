"""The prompt of a chat body: its conversation rendered by the chat template, or continued by its ids.

Conversations that a room follows (`features/chat/conversation_hooks`) may get a prompt of the room's.
"""

from __future__ import annotations

from typing import Any

from tokserve.base.errors import RequestError, invalid
from tokserve.client.outputs import ChoiceOutput
from tokserve.dialects.openai import tools
from tokserve.dialects.openai.schemas import ChatBody, TokenizeBody
from tokserve.dialects.openai.tools import OutputParser
from tokserve.features.chat.chat import plain_message
from tokserve.features.chat.conversation_hooks import ChatConversation, ConversationTurn, hook_of
from tokserve.features.chat.templates.histories import with_tool_calls
from tokserve.features.chat.templates.suffix import AnswerEnd, NotContinued, Suffixes
from tokserve.features.chat.text_context import TextContext
from tokserve.features.images import request_images
from tokserve.features.images.media.images import image_slots
from tokserve.features.images.parts import ImageSlots
from tokserve.features.images.server_images import ServerImages
from tokserve.protocol.prompt import TokenPrompt, pack_ids
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

PREFIX = "required_prefix_token_ids"
PREFIX_OF_MESSAGE = ("prompt_token_ids", "generation_token_ids")  # of NeMo Gym's messages of the assistant
THINKING = ("enable_thinking", "reasoning_effort")  # what templates of models that think read; a body's effort is both


async def followed_prompt(
    call: RouteCall[ChatBody], *, keeps_logprobs: bool
) -> tuple[TokenPrompt, ConversationTurn | None]:
    """The prompt of a chat that is to be answered, and the turn that it is of a conversation which a room follows.
    `keeps_logprobs`: its client gets logprobs.  Raises RequestError."""
    serving, body = call.serving, call.body
    hook = None if prefix_of(body) else hook_of(serving)  # with a prefix, the client keeps the ids
    if hook is None:
        return await prompt_of(call, body.reasoning_effort), None
    slots = _image_slots(serving)
    options = template_options(serving, body, body.reasoning_effort, slots)
    assert body.messages is not None
    conversation = ChatConversation(
        messages=body.messages,
        model=serving.model.adapter(body.model),
        options=options,
        session_id=(body.model_extra or {}).get("session_id"),
        size=call.size,
        keeps_logprobs=keeps_logprobs,
    )
    turn = await hook.begin(call.request, conversation)
    if turn is not None and turn.prompt is not None:
        return turn.prompt, turn
    prompt = await prompt_of(call, body.reasoning_effort)
    if turn is not None:
        await turn.rendered(call.request, prompt)
    return prompt, turn


async def prompt_of(call: RouteCall[ChatBody | TokenizeBody], effort: str | None = None) -> TokenPrompt:
    """The conversation as a prompt, with its images.  `effort`: as `rendered` takes it."""
    serving, body = call.serving, call.body
    if prefix := prefix_of(body):
        return await call.run(lambda: continued_prompt(serving, body, effort, *prefix))
    slots = _image_slots(serving)
    ids = await call.run(lambda: rendered(serving, body, effort, slots))
    if slots is None or not slots.images:
        return TokenPrompt(pack_ids(ids))
    return await request_images.fetched(serving, call.request, ids, slots.images, "messages")


def rendered(
    serving: Serving, body: ChatBody | TokenizeBody, effort: str | None = None, slots: ImageSlots | None = None
) -> list[int]:
    """The conversation as token ids.  `effort`: the body's reasoning_effort; variables that it sends itself win.
    `slots`: takes the images; None: they are refused."""
    options = template_options(serving, body, effort, slots)
    assert body.messages is not None
    try:
        return serving.state_of(TextContext).template.render(body.messages, **options)
    except RecursionError:  # JSON text inside a message: the arguments of a tool call
        raise RequestError("messages are nested too deeply", field="messages") from None


def prefix_of(body: ChatBody | TokenizeBody) -> tuple[str, list[int]] | None:
    """The ids that the prompt begins with, up to the end of the last answer in its messages, and the field that has
    them: `required_prefix_token_ids`, or `prompt_token_ids` and `generation_token_ids` of that answer."""
    if body.required_prefix_token_ids is not None:
        return PREFIX, body.required_prefix_token_ids
    index = _last_answer(body)
    answer = {} if index is None or body.messages is None else body.messages[index]
    ids = [answer.get(name) for name in PREFIX_OF_MESSAGE]
    if not all(isinstance(part, list) and part for part in ids):
        return None
    return f"messages[{index}].{PREFIX_OF_MESSAGE[1]}", [token for part in ids if part for token in part]


def _last_answer(body: ChatBody | TokenizeBody) -> int | None:
    """The number of the last message of the assistant."""
    messages = body.messages or []
    answers = (i for i, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "assistant")
    return max(answers, default=None)


def continued_prompt(
    serving: Serving, body: ChatBody | TokenizeBody, effort: str | None, field: str, prefix: list[int]
) -> TokenPrompt:
    """The prompt that begins with the ids of `field`, which stand for all messages up to the last answer; what follows
    is rendered behind them.  Raises RequestError."""
    options = template_options(serving, body, effort, None)
    index, vocab = _last_answer(body), serving.llm.ready.vocab_size
    if index is None or body.messages is None:
        raise invalid(field, "needs a message of the assistant, at whose end the ids end")
    wrong = next((i for i, token in enumerate(prefix) if type(token) is not int or not 0 <= token < vocab), None)
    if wrong is not None:
        raise invalid(f"{field}[{wrong}]", f"must be a token id from 0 to {vocab - 1}")
    if not prefix:
        raise invalid(field, "must not be empty")
    eos_ids = serving.llm.ready.eos_token_ids
    end = AnswerEnd(prefix[-1], prefix[-1] in eos_ids)
    options = {name: value for name, value in options.items() if name not in ("context", "add_special_tokens")}
    messages = [plain_message(i, message) for i, message in enumerate(with_tool_calls(body.messages[: index + 1]))]
    try:
        ids = Suffixes(serving.state_of(TextContext).template, eos_ids).ids(
            messages[index], end, body.messages[index + 1 :], messages[0]["role"], **options
        )
    except NotContinued as error:
        raise RequestError(f"{field}: {error}", field=field, code="unsupported") from None
    return TokenPrompt(pack_ids([*prefix, *ids]))


def template_options(
    serving: Serving, body: ChatBody | TokenizeBody, effort: str | None, slots: ImageSlots | None
) -> dict[str, Any]:
    """The options with which `ChatTemplate` renders the conversation of a body.  Raises RequestError for a body without
    messages or with too many, and for a template that the server does not take from its clients."""
    if body.messages is None:
        raise RequestError("messages is required", field="messages")
    serving.state_of(TextContext).check_messages(body.messages, "messages")
    if body.chat_template is not None and not may_render(serving, body.chat_template):
        raise RequestError(
            "chat_template: templates from requests are refused (see --trust-request-chat-template)",
            field="chat_template",
            code="untrusted_template",
        )
    return {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
        "tools": body.tools,
        "documents": body.documents,
        "template": body.chat_template,
        "kwargs": template_effort(effort) | (body.chat_template_kwargs or {}),
        "add_special_tokens": bool(body.add_special_tokens),
        "context": serving.llm.ready.max_model_len,
        "must_show_tools": not isinstance(body, ChatBody) or tools.is_free(body.tool_choice),
        "images": slots,
    }


def _image_slots(serving: Serving) -> ImageSlots | None:
    """What takes the images of a conversation; None: the model takes none."""
    reader = serving.state_of(ServerImages).reader
    return None if reader is None else image_slots(reader.kind, lambda token: serving.tokenizer.decode([token], False))


def template_effort(effort: str | None) -> dict[str, Any]:
    """The variables of the template for a reasoning_effort."""
    return {} if effort is None else dict(zip(THINKING, (effort != "none", effort), strict=True))


def may_render(serving: Serving, template: str) -> bool:
    """Whether a template of a body may be used: it names one of the model's, or the server trusts its clients'."""
    return serving.state_of(TextContext).template.knows(template) or serving.config.server.trust_request_chat_template


def returned_message(choice: ChoiceOutput, reader: OutputParser | None) -> dict[str, Any]:
    """The message that a client of chat or responses gets for a whole choice; `reader` as of a renderer."""
    if reader is None:
        return {"role": "assistant", "content": choice.text or ""}
    read = reader.read(choice)
    message: dict[str, Any] = {"role": "assistant", "content": read.content}
    if read.reasoning:
        message["reasoning"] = read.reasoning
    if read.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in read.calls
        ]
    return message
