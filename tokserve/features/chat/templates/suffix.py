"""What a chat template writes behind an answer: the end of its turn, new messages, and the prompt of the next answer.

A conversation is continued by ids: those of the earlier prompt and of the answer as it was sampled stay, and only what
is new is rendered, behind a short conversation with the same answer.  The answer's text is replaced by a mark, and what
follows the mark is tokenized.  `Suffixes` raises NotContinued where a template cannot be continued in this way.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokserve.base.errors import RequestError
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.templates.histories import Message

QUESTION: Message = {"role": "user", "content": "?"}
SYSTEM: Message = {"role": "system", "content": "?"}
INSTRUCTIONS = ("system", "developer")
ARGUMENT = "text"  # the name of the argument of calls that holds the mark
NO_PLACE = "the chat template does not write an answer as it is"
OTHER_END = "the chat template ends a turn with calls in another way than a turn without them"


class NotContinued(Exception):
    """The messages cannot be rendered behind an answer; the message says why."""


class AnswerEnd(NamedTuple):
    """How the ids of an answer end.  `token`: the last id.  `ended`: it is a token that ended the answer, and not part
    of its text."""

    token: int
    ended: bool


class Suffixes:
    """Renders what is new in a conversation.  `eos_ids`: the tokens that end an answer of the model."""

    def __init__(self, template: ChatTemplate, eos_ids: Collection[int]) -> None:
        self._template = template
        self._eos_ids = frozenset(eos_ids)

    def ids(
        self, answer: Message, end: AnswerEnd, messages: Sequence[Message], first_role: str, **options: Any
    ) -> list[int]:
        """The ids that continue the answer of the assistant: the end of its turn, if the answer lacks it, `messages`
        and the generation prompt.  `first_role`: of the conversation's first message.  `options` are those of
        `ChatTemplate.text`, for the whole conversation.  Raises NotContinued."""
        for message in messages:
            role = message.get("role") if isinstance(message, Mapping) else None
            if role in INSTRUCTIONS and not self._template.takes_role_later(role):
                raise NotContinued(f"the chat template puts a later message of the {role} at the start")
        mark = f"x{secrets.token_hex(16)}x"
        history = [*([SYSTEM] if first_role in INSTRUCTIONS else []), QUESTION]
        try:
            turn = _marked(answer, mark, several=self._template.takes_several_calls(options))
            closing = self._closing(history, turn, mark, options) if "tool_calls" in turn else ""
            ids = self._template.ids_behind([*history, turn, *messages], mark, closing, anchor=self._anchor, **options)
        except RequestError as error:
            raise NotContinued(f"the chat template does not render what is new: {error.message}") from None
        if ids is None:
            raise NotContinued(NO_PLACE if not closing else OTHER_END)
        return self._behind(end, ids)

    def check(self, tools: Sequence[dict[str, Any]] | None = None) -> None:
        """Raise NotContinued for a template that cannot be continued; `tools`: also behind calls of the first."""
        end = AnswerEnd(-1, False)
        self.ids({"role": "assistant", "content": "1st answer"}, end, [QUESTION], "user")
        if tools:
            function = {"name": tools[0]["function"]["name"], "arguments": {}}
            call = {"id": "sample001", "type": "function", "function": function}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "sample001", "content": "1st result"}
            self.ids(turn, end, [result], "user", tools=tools)

    def _closing(self, history: list[Message], turn: Message, mark: str, options: dict[str, Any]) -> str:
        """What the template writes between the mark, in a call's argument, and the end of the turn."""
        plain = {"role": "assistant", "content": mark}
        shown = {name: value for name, value in options.items() if name not in ("context", "images")}
        shown |= {"add_generation_prompt": False, "continue_final_message": False}
        behind_text, behind_calls = (
            self._template.text([*history, one, QUESTION], **shown).rpartition(mark)[2] for one in (plain, turn)
        )
        if not behind_text or not behind_calls.endswith(behind_text):
            raise NotContinued(OTHER_END)
        return behind_calls[: len(behind_calls) - len(behind_text)]

    def _behind(self, end: AnswerEnd, ids: list[int]) -> list[int]:
        """The ids without the end of the turn that the answer has: a token that ends an answer of the model, or the
        same token, where it is the first special one."""
        if not end.ended:
            return ids
        special = self._template.tokenizer.special_ids | self._eos_ids | {end.token}
        at = next((index for index, token in enumerate(ids) if token in special), None)
        if at is None:
            return ids
        both_end = ids[at] in self._eos_ids and end.token in self._eos_ids
        return ids[at + 1 :] if ids[at] == end.token or both_end else ids

    @cached_property
    def _anchor(self) -> str:
        """The text of a special token that does not change what follows it; "" if the tokenizer has none.  Tokenizers
        that begin a text with a space would put one in the middle otherwise."""
        tokenizer = self._template.tokenizer
        named = [text for text in tokenizer.special_tokens.values() if text]
        spelled = (tokenizer.spelling(token) for token in sorted(tokenizer.special_ids))
        for text in (*named, *filter(None, spelled)):
            ids = tokenizer.encode(text + "\n", add_special_tokens=False)
            if len(ids) > 1 and ids[0] == tokenizer.id_of(text):
                return text
        return ""


def _marked(answer: Message, mark: str, *, several: bool) -> dict[str, Any]:
    """The answer with the mark in the place of its content or, if it has calls, of their arguments; of the first one's
    where the template does not take `several`."""
    calls = answer.get("tool_calls")
    calls = calls if several or not calls else calls[:1]
    if not calls:
        return {"role": "assistant", "content": mark}
    marked = [{**call, "function": {**call["function"], "arguments": {ARGUMENT: mark}}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": marked}
